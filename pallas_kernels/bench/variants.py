# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper kernel that show what bounds it, to be timed side by side on a card.

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

from pallas_kernels.grouped_matmul import gpu_product
from pallas_kernels.mosaic_gpu import Consumer, Mosaic
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
        is_in_fragments: whether weights are in the order of `QTensor.fragments`.
        is_right: whether its results are the product's.
    """

    name: str
    tiling: Callable[[Tiling], Tiling] = lambda tiling: tiling
    replaced: Callable[[Mosaic], contextlib.AbstractContextManager] = contextlib.nullcontext
    is_in_fragments: bool = True
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
    # As many stages as fit, as in the default.
    w_dtype = jnp.int8 if bits == 8 else jnp.int4
    tiling = fitted(tiling, jnp.bfloat16, w_dtype, most=max(8, tiling.stages))

    def run(x_RD, w: QTensor, group_sizes_E):
        return gpu.forward(
            x_RD,
            w.values,
            w.scales_EFG,
            group_sizes_E,
            is_fragments=w.is_fragments,
            tiling=tiling,
            interpret=mosaic.is_interpreted,
        )

    return run


def variants() -> list[Variant]:
    """All of them, the shipped kernel first."""

    def narrow(tiling: Tiling, **changes) -> Tiling:
        """A warpgroup has 64 features."""
        return dataclasses.replace(tiling, tile_m=64, **changes)

    return [
        Variant(AS_IS),
        Variant("native order", is_in_fragments=False),
        Variant("schedule outside", replaced=_schedule_outside),
        Variant("load-ahead", replaced=_load_ahead(True)),
        Variant("no load-ahead", replaced=_load_ahead(False)),
        Variant("256 channels", lambda tiling: dataclasses.replace(tiling, tile_k=256)),
        Variant("512 channels", lambda tiling: narrow(tiling, tile_k=512)),
        Variant("in parts", lambda tiling: narrow(tiling, splits=4)),
        Variant("copy only", replaced=_copy_only, is_right=False),
        Variant("wgmma without convert", replaced=_wgmma_without_convert, is_right=False),
    ]


def _load_ahead(is_ahead: bool) -> Callable[[Mosaic], contextlib.AbstractContextManager]:
    """The next step's weights are loaded while the products of this one run, or never."""
    return lambda mosaic: mock.patch.object(gpu_product._Consumer, "loads_ahead", is_ahead)


def _schedule_outside(mosaic: Mosaic) -> contextlib.AbstractContextManager:
    """A kernel before the product makes its schedule."""
    return mock.patch.object(gpu_product, "fits_inside", lambda *_: False)


@contextlib.contextmanager
def _copy_only(mosaic: Mosaic) -> Iterator[None]:
    """The warpgroups that multiply signal that they have read each stage, but read nothing."""

    def accumulate_ahead(self, shapes, steps, first_step, load, multiply, *, number):
        def step(k, carry):
            slot = self.ring.slot(first_step + k)
            self.ring.wait_until_full(slot)
            self.w_ring.release(slot)
            self.ring.release(slot)
            return carry

        lax.fori_loop(0, steps, step, jnp.int32(0))
        # Inside `jax.shard_map` types name mesh axes: for zeros, those of what was loaded.
        zero = lax.convert_element_type(number * 0, jnp.float32)
        sums = [lax.broadcast(zero, shape) for shape in shapes]
        return [mosaic.as_layout(each, plgpu.Layout.WGMMA) for each in sums]

    with (
        mock.patch.object(Consumer, "accumulate_ahead", accumulate_ahead),
        mock.patch.object(gpu_product._Consumer, "loads_ahead", True),
    ):
        yield


def _wgmma_without_convert(mosaic: Mosaic) -> contextlib.AbstractContextManager:
    """Products of ones: the compiler then leaves out the loads of weights, too."""

    def ones(q_MK, dtype, is_fragments, mosaic):
        return mosaic.as_layout(jnp.ones(q_MK.shape), plgpu.Layout.WGMMA).astype(dtype)

    return mock.patch.object(gpu, "_converted", ones)
