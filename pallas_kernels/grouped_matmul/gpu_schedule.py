# SPDX-License-Identifier: Apache-2.0
"""The tile schedule of the Hopper kernels, made by one kernel from the sizes of the groups.

XLA takes five kernels for `tile_schedule.row_tiles`, each of which waits for the one before it,
about as long as a small product. Here one block goes through the experts once, with scalars of
the running sums, while each of its threads holds tiles and notes whose rows they cover.
All products of a layer, and of its gradient, share one schedule: the same call within a
program is the same kernel, which XLA runs once.
Dims: R rows, E experts; P tiles of rows, B bounds of groups
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.tile_schedule import RowTiles, max_row_tiles
from pallas_kernels.launches import num_bytes, record
from pallas_kernels.mosaic_gpu import Mosaic
from pallas_kernels.tiling.gpu import ROW_ALIGNMENT

THREADS = 128


def schedule(group_sizes_E, num_rows: int, block: int, mosaic: Mosaic):
    """`tile_schedule.row_tiles` and the bounds of the groups.

    Args:
        block: rows of a tile, a power of 2.

    Returns:
        (tiles, bound_B): arrays padded to multiples of 128; of the bounds, expert e has rows
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


# A jitted function is one function of the program that calls it: so XLA sees equal kernels.
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
    num_experts = sizes_gmem.shape[0]
    tile_P = mosaic.iota(expert_gmem.shape)
    index_B = mosaic.iota(bound_gmem.shape)
    zero_P, zero_B = tile_P * 0, index_B * 0

    def group(e, carry, end):
        begin, num_tiles, expert_P, begin_P, end_P, start_P, bound_B = carry
        first = begin & -ROW_ALIGNMENT
        tiles = (end - first + (block - 1)) >> (block.bit_length() - 1)
        tiles = lax.select(end > begin, tiles, 0)
        is_own_P = (tile_P >= num_tiles) & (tile_P < num_tiles + tiles)
        start = tile_P * block + (first - num_tiles * block)
        return (
            end,
            num_tiles + tiles,
            # Added to zeros: a scalar that is broadcast alone loses its sign in Mosaic's types.
            jnp.where(is_own_P, zero_P + e, expert_P),
            jnp.where(is_own_P, zero_P + begin, begin_P),
            jnp.where(is_own_P, zero_P + end, end_P),
            jnp.where(is_own_P, start, start_P),
            jnp.where(index_B > e, zero_B + end, bound_B),
        )

    def expert(e, carry):
        # Sizes may sum to more than there are rows.
        end = lax.min(carry[0] + sizes_gmem[e], jnp.int32(num_rows))
        return group(e, carry, end)

    zero = sizes_gmem[0] * 0
    start = zero, zero, zero_P + num_experts, zero_P, zero_P, zero_P, zero_B
    carry = lax.fori_loop(0, num_experts, expert, start)
    of_experts = carry[1]
    # The rows of no expert.
    carry = group(num_experts, carry, jnp.int32(num_rows))
    _, num_tiles, expert_P, begin_P, end_P, start_P, bound_B = carry
    lower_P = jnp.maximum(begin_P, start_P)
    expert_gmem[...] = expert_P
    start_gmem[...] = start_P
    offset_gmem[...] = lower_P - start_P
    size_gmem[...] = jnp.minimum(end_P, start_P + block) - lower_P
    index = mosaic.iota((THREADS,))
    count_gmem[...] = jnp.where(index == 0, index * 0 + num_tiles, index * 0 + of_experts)
    bound_gmem[...] = bound_B
