# SPDX-License-Identifier: Apache-2.0
"""Parts of all Hopper kernels: launch, shared memory, ring of stages, warpgroups.

Mosaic GPU is Pallas's compiler for Hopper and later. What differs between JAX 0.10.2, 0.11 and
0.12 is only here: 0.10.2 has the interpreter on private paths, lowers by lanes unless told
otherwise, and loads with an index that 0.12 no longer takes; 0.12 has a store that may be slow.
So is what differs between a kernel on Hopper and one that the CPU interprets (`Mosaic`).
Dims: R rows, X columns
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.dtypes import itemsize_bits
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.operands import vary_like
from pallas_kernels.tiling.gpu import H200_SMS, ROW_ALIGNMENT

try:  # JAX 0.11 and later
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams, force_gpu_interpret_mode
except ImportError:
    from jax._src.pallas.mosaic_gpu.interpret.params import (
        InterpretGPUParams,
        force_gpu_interpret_mode,
    )

# By warpgroups, 0.10.2 refuses shared memory that is swizzled and not tiled.
_SEMANTICS = (
    plgpu.LoweringSemantics.Warpgroup
    if jax.__version_info__ >= (0, 11, 0)
    else plgpu.LoweringSemantics.Lane
)
# Registers of a thread that only starts copies.
PRODUCER_REGISTERS = 40


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """The compiler for Hopper, or its interpreter: no kernel asks which of them runs it.

    What the interpreter lacks in JAX 0.10.2, 0.11.2 and 0.12.0.1 alike has a substitute here,
    with the same arithmetic in the same order: no tile in shared memory is swizzled, views of
    transposed tiles are copies, registers have no layouts, copies out of bounds need zeros
    there.
    """

    is_interpreted: bool = False

    @property
    def num_sms(self) -> int:
        """Blocks to start: 2 if interpreted, else the GPU's SMs, or an H200's without a GPU."""
        if self.is_interpreted:
            return 2
        if jax.default_backend() == "gpu":
            return jax.devices()[0].core_count
        return H200_SMS

    def kernel(self, body, *, out_type, scratch_types, grid, num_threads, name):
        """A kernel of `grid` blocks, axis `sm`, of `num_threads` warpgroups, axis `wg`.

        Its results are a list, as `out_type` is. Interpreted, it looks for races between
        warpgroups, copies included.
        """
        kernel = plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch_types,
            grid=(grid,),
            grid_names=("sm",),
            num_threads=num_threads,
            thread_name="wg",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(lowering_semantics=_SEMANTICS),
        )

        def run(*operands):
            interpreter = force_gpu_interpret_mode(InterpretGPUParams(detect_races=True))
            with interpreter if self.is_interpreted else contextlib.nullcontext():
                # `plgpu.kernel` types its results as the same on all devices of a `shard_map`.
                return [vary_like(result, *operands) for result in kernel(*operands)]

        return run

    def rows(self, x_RX, tile: int):
        """Rows padded to a multiple of 8, and those that a tile reads past the last one."""
        x_RX = padded(x_RX, 0, ROW_ALIGNMENT)
        return jnp.pad(x_RX, ((0, tile), (0, 0))) if self.is_interpreted else x_RX

    def blocks(self, array, axis: int, block: int):
        """The array, with padding that copies of whole blocks read past the end of an axis."""
        return padded(array, axis, block) if self.is_interpreted else array

    def smem(self, shape: tuple[int, ...], dtype):
        """Shared memory for matrices of the tensor core."""
        return plgpu.SMEM(
            shape, dtype, transforms=() if self.is_interpreted else tiled(shape[-1], dtype)
        )

    def smem_of_rows(self, shape: tuple[int, ...], dtype, *, is_swizzled: bool):
        """Shared memory that is read from any row on, and is therefore not in tiles of 8."""
        is_swizzled = is_swizzled and not self.is_interpreted
        transforms = (plgpu.SwizzleTransform(128),) if is_swizzled else ()
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def scratch_of_transposes(self, **scratch: tuple) -> dict[str, tuple]:
        """Shape and dtype, by name, of the scratch memory that `transposed` needs."""
        return scratch if self.is_interpreted else {}

    def transposed(self, ref, scratch):
        """The transpose of a tile: a view, or a copy in the scratch memory."""
        if not self.is_interpreted:
            return plgpu.transpose_ref(ref, (1, 0))
        scratch = scratch.at[:, : ref.shape[0]]
        scratch[...] = ref[...].T
        # The next copy into `ref` must come after this read.
        plgpu.commit_smem()
        return scratch

    def store_transposed(self, ref, value) -> None:
        """Stores registers of layout `WGMMA_TRANSPOSED` with their columns as rows."""
        if self.is_interpreted:
            ref[...] = value.T
        elif hasattr(plgpu, "store"):
            # JAX 0.12 and later refuse a float32 store, which is not one of its quick ones,
            # unless told so.
            is_quick = value.dtype.itemsize == 2
            plgpu.store(plgpu.transpose_ref(ref, (1, 0)), value, optimized=is_quick)
        else:
            plgpu.transpose_ref(ref, (1, 0))[...] = value

    def load(self, ref, layout, *, optimized: bool = True) -> jax.Array:
        """All of a reference in registers of a layout.

        Args:
            optimized: refuse a load that the layout makes slow; without it, vectors from global
                memory can be loaded too.
        """
        if self.is_interpreted:
            return ref[...]
        if jax.__version_info__ < (0, 11, 0):
            return plgpu.load(ref, (), layout=layout, optimized=optimized)
        return plgpu.load(ref, layout=layout, optimized=optimized)

    def prefetch(self, ref) -> None:
        """Brings what will be loaded from global memory into the L2 cache.

        The copy engine does it, for float32 rows of multiples of 16 bytes and at most 256
        numbers; others are loaded from memory.
        """
        columns = ref.shape[-1]
        if not self.is_interpreted and columns % 4 == 0 and columns <= 256:
            plgpu.async_prefetch(ref)

    def as_layout(self, value, layout):
        """A value in registers of a layout."""
        return value if self.is_interpreted else plgpu.layout_cast(value, layout)

    def iota(self, shape: tuple[int, ...], layout=None):
        """int32 0, 1, .. along the first axis; a vector's element i is with thread i % 128.

        Args:
            layout: the register layout; None for a vector whose length is a multiple of 128.
        """
        if self.is_interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, 0)
        layout = layout or plgpu.Layout.WG_STRIDED(shape, vec_size=1)
        return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)


def padded(array, axis: int, multiple: int):
    """The array with zeros after it, up to a multiple of its size along an axis."""
    missing = -array.shape[axis] % multiple
    widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
    return jnp.pad(array, widths) if missing else array


# Numerator and denominator of the error function's rational approximation in Eigen and XLA.
_ERF = (
    (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
     -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
     -1.42647390514189e-02),
)  # fmt: skip


def erf(x):
    """The error function in float32, to 5e-7, which Mosaic does not lower by warpgroups."""
    x = jnp.minimum(jnp.maximum(x, -4.0), 4.0)
    square = x * x
    numerator, denominator = (
        functools.reduce(lambda sum_, each: sum_ * square + each, coefficients)
        for coefficients in _ERF
    )
    return x * numerator / denominator


def turns_of(tiles, num_sms: int):
    """Number of this block's tiles; the n-th is tile number `sm + n * num_sms`."""
    last = tiles - lax.axis_index("sm") + (num_sms - 1)
    return lax.div(last, jnp.int32(num_sms))


def tiled(columns: int, dtype) -> tuple:
    """The transforms that the tensor core requires of a matrix in shared memory."""
    swizzle = min(128, columns * itemsize_bits(dtype) // 8)
    columns = swizzle * 8 // itemsize_bits(dtype)
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of shared memory that copies fill and products empty, step after step.

    Attributes:
        full, empty: barriers, one per stage: it may be read, it may be overwritten.
    """

    stages: int
    full: Any
    empty: Any

    def slot(self, step):
        """The number of the stage that a step uses."""
        return lax.rem(step, self.stages)

    def slot_to_fill(self, step):
        """`slot`, once it may be overwritten."""
        slot = self.slot(step)
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
        return slot

    def wait_until_full(self, slot) -> None:
        plgpu.barrier_wait(self.full.at[slot])

    def release(self, slot) -> None:
        """Signals that this warpgroup has read a stage."""
        plgpu.barrier_arrive(self.empty.at[slot])

    def release_before(self, step) -> None:
        """Signals that the stage of the previous step has been read."""
        self.release(lax.rem(step + self.stages - 1, self.stages))


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A warpgroup that multiplies; each kernel adds its products' operands and results.

    Attributes:
        mosaic: the card or the interpreter, which runs the kernel.
        walk: the order in which its block takes tiles.
        ring: ring of the operands' stages.
        own: shared memory of this warpgroup only, by name.
        warpgroup: the warpgroup's number.
    """

    mosaic: Mosaic
    walk: Any
    ring: Ring
    own: dict[str, Any]
    warpgroup: Any

    def accumulate(self, shapes: list, steps, first_step, multiply: Callable) -> list:
        """Returns the float32 sums of `steps` steps of the ring, with these shapes.

        Args:
            multiply: `(accumulators, k, slot)` issues the products of the k-th step.
        """

        def accumulate(*accumulators):
            def one_step(k, step):
                slot = self.ring.slot(step)
                self.ring.wait_until_full(slot)
                multiply(accumulators, k, slot)
                # The products of the previous step are done; these still run.
                plgpu.wgmma_wait(len(accumulators))
                pl.when(k > 0)(lambda: self.ring.release_before(step))
                return step + 1

            end = lax.fori_loop(0, steps, one_step, first_step)
            sums = [acc[...] for acc in accumulators]
            pl.when(steps > 0)(lambda: self.ring.release_before(end))
            return sums

        return pl.run_scoped(accumulate, *map(plgpu.ACC, shapes))

    def accumulate_ahead(
        self, shapes: list, steps, first_step, load: Callable, multiply: Callable, *, number
    ) -> list:
        """`accumulate` with one operand multiplied out of registers.

        The operand is loaded for the next step while the products of this one run. These
        products end before the next ones are issued: if products out of registers still run at
        the end of a loop, ptxas makes each of them wait for the previous one (C7513).

        Args:
            load: `(slot)` loads the operand from a full stage.
            multiply: `(accumulators, loaded, slot)` issues the products of a step.
            number: any number that was loaded from memory.
        """

        def load_step(step):
            slot = self.ring.slot(step)
            self.ring.wait_until_full(slot)
            return load(slot)

        def accumulate(*accumulators):
            def one_step(k, loaded):
                step = first_step + k
                slot = self.ring.slot(step)
                multiply(accumulators, loaded, slot)
                loaded = lax.cond(k + 1 < steps, lambda: load_step(step + 1), lambda: loaded)
                plgpu.wgmma_wait(0)
                self.ring.release(slot)
                return loaded

            lax.fori_loop(0, steps, one_step, load_step(first_step))
            return [acc[...] for acc in accumulators]

        def zeros():
            # Inside `jax.shard_map` types of loaded values name mesh axes: so do those of sums.
            zero = lax.convert_element_type(number * 0, jnp.float32)
            return [
                self.mosaic.as_layout(lax.broadcast(zero, shape), plgpu.Layout.WGMMA)
                for shape in shapes
            ]

        # Without steps there is nothing to load.
        sums = functools.partial(pl.run_scoped, accumulate, *map(plgpu.ACC, shapes))
        return lax.cond(steps > 0, sums, zeros)


def copy_and_multiply(
    groups: int,
    rings: Collection[Ring],
    copy_tile: Callable,
    tile_loop: Callable,
    turns: Callable,
) -> None:
    """Splits the work of a block whose kernel was started with `groups + 1` warpgroups.

    A thread that only starts copies needs few registers; the registers that it releases are for
    the accumulators of the other warpgroups. Bodies of loops over tiles count the steps of the
    ring of stages, `(turn, step) -> step`.

    Args:
        groups: number of warpgroups that multiply; the one after them copies.
        rings: rings of stages whose steps are counted together.
        copy_tile: the body that issues the copies of a tile.
        tile_loop: number of a multiplying warpgroup -> the body that computes a tile.
        turns: returns the number of this block's tiles.
    """
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == groups)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        steps = lax.fori_loop(0, turns(), copy_tile, jnp.int32(0))

        for ring in rings:

            @pl.loop(lax.max(steps - ring.stages, 0), steps)
            def _(step, ring=ring):  # No barrier is left in the middle of a phase.
                plgpu.barrier_wait(ring.empty.at[ring.slot(step)])

    @pl.when(warpgroup < groups)
    def _():
        registers = min(232, (512 - PRODUCER_REGISTERS) // groups // 8 * 8)
        plgpu.set_max_registers(registers, action="increase")
        lax.fori_loop(0, turns(), tile_loop(warpgroup), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
