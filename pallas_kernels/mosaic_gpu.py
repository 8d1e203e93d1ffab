# SPDX-License-Identifier: Apache-2.0
"""Parts of both Hopper kernels: their start, warpgroups, shared memory and registers.

Mosaic GPU is Pallas' compiler for Hopper and later. What differs between JAX 0.10.2, 0.11 and
0.12 stands here alone: 0.10.2 has the interpreter on private paths, lowers by lanes unless told
otherwise, and loads with an index that 0.12 no longer takes.
"""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.dtypes import itemsize_bits
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.operands import vary_like

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
# Of a thread that only starts copies.
PRODUCER_REGISTERS = 40


def mosaic_gpu_kernel(body, *, out_type, scratch_types, grid, num_threads, interpret, name):
    """A Mosaic GPU kernel: `grid` blocks, axis `sm`, of `num_threads` warpgroups, axis `wg`.

    Its results are a list, as `out_type` is.

    Interpreted, it runs on the CPU and looks for races between warpgroups, copies included.
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
        with interpreter if interpret else contextlib.nullcontext():
            # `plgpu.kernel` types its results as the same on all devices of a `shard_map`.
            return [vary_like(result, *operands) for result in kernel(*operands)]

    return run


def turns_of(tiles, num_sms: int):
    """How many of the tiles this block has; the n-th is number `sm + n * num_sms`."""
    last = tiles - lax.axis_index("sm") + (num_sms - 1)
    return lax.div(last, jnp.int32(num_sms))


def copy_and_multiply(
    groups: int, stages: int, empty, copy_tile: Callable, tile_loop: Callable, turns: Callable
) -> None:
    """Splits the work of a block whose kernel was started with `groups + 1` warpgroups.

    A thread that only starts copies needs few registers; what it gives back, the accumulators
    of the others get. Bodies of loops over tiles count the steps of the ring of stages,
    `(turn, step) -> step`.

    Args:
        groups: warpgroups that multiply; the one after them copies.
        empty: the barriers of the stages that may be overwritten.
        copy_tile: the body that issues the copies of a tile.
        tile_loop: of the number of a multiplying warpgroup, the body that computes a tile.
        turns: says how many tiles this block has.
    """
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == groups)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        steps = lax.fori_loop(0, turns(), copy_tile, jnp.int32(0))

        @pl.loop(lax.max(steps - stages, 0), steps)
        def _(step):  # No barrier is left in the middle of a phase.
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    @pl.when(warpgroup < groups)
    def _():
        registers = min(232, (512 - PRODUCER_REGISTERS) // groups // 8 * 8)
        plgpu.set_max_registers(registers, action="increase")
        lax.fori_loop(0, turns(), tile_loop(warpgroup), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def release_before(empty, step, stages: int) -> None:
    """Says that the stage of the step before is read."""
    plgpu.barrier_arrive(empty.at[lax.rem(step + stages - 1, stages)])


def tiled(columns: int, dtype) -> tuple:
    """The transforms that the tensor core asks of a matrix in shared memory."""
    swizzle = min(128, columns * itemsize_bits(dtype) // 8)
    columns = swizzle * 8 // itemsize_bits(dtype)
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))


def tiled_smem(shape: tuple[int, ...], dtype, interpret: bool):
    """Shared memory for matrices of the tensor core; plain where it is interpreted."""
    transforms = () if interpret else tiled(shape[-1], dtype)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def transposed(ref, scratch, interpret: bool):
    """The transpose of a tile: a view, or, interpreted, a copy: 0.10.2 interprets no view."""
    if not interpret:
        return plgpu.transpose_ref(ref, (1, 0))
    scratch = scratch.at[:, : ref.shape[0]]
    scratch[...] = ref[...].T
    # The next copy into `ref` must come after this read.
    plgpu.commit_smem()
    return scratch


def strided_iota(size: int, interpret: bool):
    """int32 0, 1, .. in registers, element i with thread i % 128; of a multiple of 128."""
    if interpret:
        return lax.iota(jnp.int32, size)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def load_as(ref, layout, *, optimized: bool = True) -> jax.Array:
    """All of a reference in registers of a layout.

    Args:
        optimized: refuse a load that the layout makes slow; without it, vectors from global
            memory can be loaded too.
    """
    if jax.__version_info__ < (0, 11, 0):
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)
