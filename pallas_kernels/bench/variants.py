# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper kernel that tell what bounds it, to be timed side by side on a card.

A variant is another tiling, or the kernel traced with a part of it replaced. Variants that
leave out work give wrong numbers, and are for timing alone: if leaving a part out gains
nothing, that part does not bound the kernel.

Dims: R rows, D inputs, F outputs, E experts, M features of a warpgroup, K one step of D
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import gpu_swap_ab
from pallas_kernels.mosaic_gpu import Consumer, Mosaic, Ring
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantized_grouped_matmul import gpu
from pallas_kernels.tiling.gpu import Tiling, fitted

AS_IS = "as is"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change of the kernel of quantized weights.

    Attributes:
        tiling: returns the tiling to run with, given the default one.
        replaced: returns the context in which the kernel is traced, for the card or the
            interpreter.
        is_right: whether its results are the product's.
    """

    name: str
    tiling: Callable[[Tiling], Tiling] = lambda tiling: tiling
    replaced: Callable[[Mosaic], contextlib.AbstractContextManager] = contextlib.nullcontext
    is_right: bool = True


def product(variant: Variant, sizes: tuple[int, int, int, int], bits: int, mosaic: Mosaic):
    """`(x_RD, w, group_sizes_E) -> y_RF`, to be traced within `variant.replaced(mosaic)`.

    Args:
        sizes: R, D, F and E.

    Raises:
        ValueError: the kernel cannot run with the variant's tiling.
    """
    R, D, F, E = sizes
    tiling = variant.tiling(gpu.default_tiling(R, D, F, E, bits))
    # As many stages as fit, as the default has.
    w_dtype = jnp.int8 if bits == 8 else jnp.int4
    tiling = fitted(tiling, jnp.bfloat16, w_dtype, most=max(8, tiling.stages))

    def run(x_RD, w: QTensor, group_sizes_E):
        return gpu.forward(
            x_RD,
            w.values,
            w.scales_EFG,
            group_sizes_E,
            tiling=tiling,
            interpret=mosaic.is_interpreted,
        )

    return run


def variants() -> list[Variant]:
    """All of them, the shipped kernel first."""

    def narrow(tiling: Tiling, **changes) -> Tiling:
        """A warpgroup has 64 features, as every one had on 2026-11-26."""
        return dataclasses.replace(tiling, tile_m=64, **changes)

    return [
        Variant(AS_IS),
        Variant("tile_m=64", narrow),
        Variant("tile_m=64 and load-ahead", narrow, _load_ahead(True)),
        Variant("no load-ahead", replaced=_load_ahead(False)),
        Variant("512 channels", lambda tiling: narrow(tiling, tile_k=512, splits=1)),
        Variant(
            "twice the stages",
            lambda tiling: dataclasses.replace(
                tiling, stages=2 * tiling.stages, tile_k=tiling.tile_k // 2, splits=1
            ),
        ),
        Variant("fence in the producer", replaced=_fence_in_the_producer),
        Variant("copy only", replaced=_copy_only, is_right=False),
        Variant("convert without wgmma", replaced=_convert_without_wgmma, is_right=False),
        Variant("wgmma without convert", replaced=_wgmma_without_convert, is_right=False),
    ]


def _load_ahead(is_ahead: bool) -> Callable[[Mosaic], contextlib.AbstractContextManager]:
    """The next step's weights are loaded while the products of this one run, or never."""
    return lambda mosaic: mock.patch.object(gpu_swap_ab._Consumer, "loads_ahead", is_ahead)


@contextlib.contextmanager
def _fence_in_the_producer(mosaic: Mosaic) -> Iterator[None]:
    """The copying warpgroup orders the reads of a stage before its next copy, instead of the
    warpgroups that read it."""
    slot_to_fill = Ring.slot_to_fill

    def after_a_fence(ring: Ring, step):
        slot = slot_to_fill(ring, step)
        plgpu.commit_smem()
        return slot

    def release(consumer, slot) -> None:
        consumer.w_ring.release(slot)

    with (
        mock.patch.object(Ring, "slot_to_fill", after_a_fence),
        mock.patch.object(gpu_swap_ab._Consumer, "_release_weights", release),
    ):
        yield


@contextlib.contextmanager
def _accumulating(one_step: Callable) -> Iterator[None]:
    """The sums of a tile replaced by what `one_step(consumer, slot, load, total)` makes of
    `total`, bfloat16 `[M, 64]`, in each step."""

    def accumulate_ahead(self: Consumer, shapes, steps, first_step, load, multiply, *, number):
        [shape] = shapes

        def step(k, total_MK):
            slot = self.ring.slot(first_step + k)
            self.ring.wait_until_full(slot)
            total_MK = one_step(self, slot, load, total_MK)
            self.ring.release(slot)
            return total_MK

        # Inside `jax.shard_map` types name mesh axes; of zeros those of what was loaded.
        zero = lax.convert_element_type(number * 0, jnp.bfloat16)
        zero_MK = lax.broadcast(zero, (shape[0], gpu.CONVERTED))
        zero_MK = self.mosaic.as_layout(zero_MK, plgpu.Layout.WGMMA)
        total_MK = lax.fori_loop(0, steps, step, zero_MK)
        sum_M = jnp.sum(total_MK.astype(jnp.float32), axis=1)
        return [lax.broadcast_in_dim(sum_M, shape, [0])]

    with (
        mock.patch.object(Consumer, "accumulate_ahead", accumulate_ahead),
        mock.patch.object(gpu_swap_ab._Consumer, "loads_ahead", True),
    ):
        yield


def _copy_only(mosaic: Mosaic) -> contextlib.AbstractContextManager:
    def one_step(consumer, slot, load, total_MK):
        consumer.w_ring.release(slot)
        return total_MK

    return _accumulating(one_step)


def _convert_without_wgmma(mosaic: Mosaic) -> contextlib.AbstractContextManager:
    """Converted weights are added up, an instruction for each two, which products are not."""

    def one_step(consumer, slot, load, total_MK):
        [q_MK] = load(slot)
        q_MK = consumer.mosaic.as_layout(q_MK, plgpu.Layout.WGMMA)
        for first in range(0, consumer.walk.tiling.tile_k, gpu.CONVERTED):
            part_MK = q_MK[:, first : first + gpu.CONVERTED]
            total_MK = total_MK + gpu._converted(part_MK, jnp.bfloat16)
        return total_MK

    return _accumulating(one_step)


def _wgmma_without_convert(mosaic: Mosaic) -> contextlib.AbstractContextManager:
    """Products of ones: the compiler then leaves out the loads of weights, too."""

    def ones(q_MK, dtype):
        return mosaic.as_layout(jnp.ones(q_MK.shape), plgpu.Layout.WGMMA).astype(dtype)

    return mock.patch.object(gpu, "_converted", ones)
