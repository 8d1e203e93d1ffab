# SPDX-License-Identifier: Apache-2.0
"""The tile schedule of the Hopper kernels, made from the sizes of the groups by one kernel, or
by the product itself.

XLA takes five kernels for `tile_schedule.row_tiles`, each of which waits for the previous one,
about as long as a small product. Here one block goes through the experts once, with
the running sums as scalars, while each of its threads holds tiles and notes whose rows they
cover. All products of a layer with many rows, and of its gradient, share one schedule: equal
calls within a program are one kernel, which XLA runs once. One with few rows makes its own.
Dims: R rows, E experts; P tiles of rows, B bounds of groups
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.tile_schedule import RowTiles, max_row_tiles
from pallas_kernels.launches import num_bytes, record
from pallas_kernels.mosaic_gpu import Mosaic
from pallas_kernels.tiling.gpu import (
    BARRIER_BYTES,
    FEW_ROWS,
    ROW_ALIGNMENT,
    SHARED_BYTES,
    Tiling,
    shared_bytes,
)

THREADS = 128


def schedule(group_sizes_E, num_rows: int, block: int, mosaic: Mosaic):
    """`tile_schedule.row_tiles` and the bounds of the groups.

    Args:
        block: rows of a tile, a power of 2.

    Returns:
        (tiles, bound_B): arrays padded to multiples of 128; expert e has the rows from
            `bound_B[e]` to `bound_B[e + 1]`.
    """
    (num_experts,) = group_sizes_E.shape
    num_tiles = max_row_tiles(num_rows, num_experts, block)
    sizes = [num_tiles] * 4 + [2, num_experts + 1]
    results = [jax.ShapeDtypeStruct((_whole(size),), jnp.int32) for size in sizes]
    nbytes = [num_bytes(each.shape, each.dtype) for each in results]
    record(
        "tile_schedule",
        [group_sizes_E],
        results,
        lambda _: ([num_bytes((num_experts,), jnp.int32)], nbytes),
    )
    *arrays, bound_B = _run(group_sizes_E, num_rows, block, tuple(results), mosaic)
    return RowTiles(*arrays), bound_B


# A jitted function is one function in the program that calls it: so XLA sees equal kernels.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _run(group_sizes_E, num_rows: int, block: int, results: tuple, mosaic: Mosaic):
    run = mosaic.kernel(
        functools.partial(_body, num_rows=num_rows, block=block, mosaic=mosaic),
        out_type=results,
        scratch_types={},
        grid=1,
        num_threads=1,
        name="tile_schedule",
    )
    return run(group_sizes_E)


def _whole(size: int) -> int:
    return -(-size // THREADS) * THREADS


def _body(
    sizes_gmem,
    expert_gmem,
    start_gmem,
    offset_gmem,
    size_gmem,
    count_gmem,
    bound_gmem,
    *,
    num_rows,
    block,
    mosaic,
):
    index_B = mosaic.iota(bound_gmem.shape)
    tile_P = mosaic.iota(expert_gmem.shape)
    values, count, bound_B = _tiles(sizes_gmem, tile_P, index_B, num_rows, block)
    refs = expert_gmem, start_gmem, offset_gmem, size_gmem
    for ref, value_P in zip(refs, values, strict=True):
        ref[...] = value_P
    index = mosaic.iota((THREADS,))
    count_gmem[...] = jnp.where(index == 0, index * 0 + count[0], index * 0 + count[1])
    bound_gmem[...] = bound_B


def table_shape(num_rows: int, num_experts: int, block: int) -> tuple[int, int]:
    """The shape of the int32 table in shared memory that `schedule_inside` fills."""
    return 4, _whole(max_row_tiles(num_rows, num_experts, block) + 2)


def fits_inside(table, tiling: Tiling, x_dtype, w_dtype, num_matrices: int) -> bool:
    """Whether a product makes its own schedule: its stages leave shared memory for the table.

    It does not with many rows, where other products share the schedule and a launch is a small
    part, nor with parts of D, whose sum needs it outside.
    """
    taken = shared_bytes(tiling, x_dtype, w_dtype, num_matrices=num_matrices)
    free = SHARED_BYTES - BARRIER_BYTES - taken
    return tiling.tile_n <= FEW_ROWS and tiling.splits == 1 and 4 * math.prod(table) <= free


def schedule_inside(sizes_gmem, table_smem, is_made, maker, *, num_rows, block, mosaic):
    """`schedule` within the kernel of a product, made by each of its blocks for itself.

    That kernel then waits for no other one, which takes as long as it does (5 us of 37 to 73
    with few rows: experiments/accelerator). All warpgroups call this, and may read the tiles
    when it returns.

    Args:
        table_smem: int32 of `table_shape`.
        is_made: barrier of one arrival.
        maker: the number of the warpgroup that makes the schedule.
    """
    size = table_smem.shape[1]

    @pl.when(lax.axis_index("wg") == maker)
    def _():
        tile_P = mosaic.iota((size,))
        (expert_P, *others), count, _ = _tiles(sizes_gmem, tile_P, None, num_rows, block)
        # The numbers of tiles are stored where no tile can be.
        for i in range(2):
            expert_P = jnp.where(tile_P == size - 2 + i, tile_P * 0 + count[i], expert_P)
        for i, value_P in enumerate([expert_P, *others]):
            table_smem[i] = value_P
        plgpu.commit_smem()
        plgpu.barrier_arrive(is_made)

    plgpu.barrier_wait(is_made)
    return RowTiles(
        *(table_smem.at[i] for i in range(4)), count=table_smem.at[0, pl.ds(size - 2, 2)]
    )


def _tiles(sizes_gmem, tile_P, index_B, num_rows: int, block: int):
    """(expert, start, offset and size of tiles; `RowTiles.count`; bounds, or None)."""
    num_experts = sizes_gmem.shape[0]
    zero_P = tile_P * 0

    def group(e, carry, end):
        begin, num_tiles, expert_P, begin_P, end_P, start_P, *bounds = carry
        first = begin & -ROW_ALIGNMENT
        tiles = (end - first + (block - 1)) >> (block.bit_length() - 1)
        tiles = lax.select(end > begin, tiles, 0)
        is_own_P = (tile_P >= num_tiles) & (tile_P < num_tiles + tiles)
        start = tile_P * block + (first - num_tiles * block)
        return (
            end,
            num_tiles + tiles,
            # Added to zeros: a scalar broadcast by itself loses its sign in Mosaic's types.
            jnp.where(is_own_P, zero_P + e, expert_P),
            jnp.where(is_own_P, zero_P + begin, begin_P),
            jnp.where(is_own_P, zero_P + end, end_P),
            jnp.where(is_own_P, start, start_P),
            *(jnp.where(index_B > e, index_B * 0 + end, bound_B) for bound_B in bounds),
        )

    def expert(e, carry):
        # Sizes may sum to more than there are rows.
        end = lax.min(carry[0] + sizes_gmem[e], jnp.int32(num_rows))
        return group(e, carry, end)

    zero = sizes_gmem[0] * 0
    start = zero, zero, zero_P + num_experts, zero_P, zero_P, zero_P
    start += () if index_B is None else (index_B * 0,)
    carry = lax.fori_loop(0, num_experts, expert, start)
    of_experts = carry[1]
    # The rows of no expert.
    carry = group(num_experts, carry, jnp.int32(num_rows))
    _, num_tiles, expert_P, begin_P, end_P, start_P, *bounds = carry
    lower_P = jnp.maximum(begin_P, start_P)
    size_P = jnp.minimum(end_P, start_P + block) - lower_P
    values = expert_P, start_P, lower_P - start_P, size_P
    return values, (num_tiles, of_experts), bounds[0] if bounds else None
