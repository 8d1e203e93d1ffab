# SPDX-License-Identifier: Apache-2.0
"""Tile schedules: which rows each tile covers, and whose matrix they meet.

Rows are sorted by expert. A tile holds rows of one expert, so that a block of rows of two
experts is two tiles (Gale et al. 2022, MegaBlocks, arXiv:2211.15841, and JAX's megablox). XLA
computes the schedule from prefix sums before the kernel, without a loop: scalar code in the
kernel takes longer than the product itself once experts are many and rows few.

There are two types, since tiles are copied in two ways: a TPU's pipeline copies blocks that lie
side by side, by their numbers (`BlockTiles`); Hopper's copy engine and the loop of
`separate.py` copy from any row on (`RowTiles`), so that an expert's few rows are one tile.
Dims: R rows, E experts; P tiles, G groups of rows: the experts', then those of none
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sorted_rows import group_bounds
from pallas_kernels.tiling.gpu import ROW_ALIGNMENT


class BlockTiles(NamedTuple):
    """Tiles within blocks of rows, in order; of each array the first `count[0]` are used.

    Attributes:
        expert_P: the expert whose matrix is used.
        block_P: the block of rows.
        begin_P, end_P: the expert's rows within the block, counted from the block's first;
            equal if the tile has no rows and only zeros are to be written.
        count: [tiles, tiles before the first block that lies past the last expert's rows].
    """

    expert_P: jax.Array
    block_P: jax.Array
    begin_P: jax.Array
    end_P: jax.Array
    count: jax.Array


def num_blocks(num_rows: int, block: int) -> int:
    return -(-num_rows // block)


def tiles_by_block(group_sizes_E, num_rows: int, block: int) -> BlockTiles:
    """Every block once for each expert that has rows in it, then the blocks without rows.

    A block past the last expert's rows is one tile, so that zeros are written to it. It names
    the expert of the previous tile, whose matrix is already there.
    """
    begin_E, end_E = group_bounds(group_sizes_E, num_rows)
    first_E, last_E = begin_E // block, (end_E - 1) // block
    has_rows_E = end_E > begin_E
    per_expert_E = jnp.where(has_rows_E, last_E - first_E + 1, 0)
    last_expert = jnp.max(jnp.where(has_rows_E, jnp.arange(end_E.size), 0))
    used_blocks = -(-end_E[-1] // block)
    with_rows = jnp.sum(per_expert_E)
    count = with_rows + num_blocks(num_rows, block) - used_blocks
    # Each further expert of a block adds a tile to those of the blocks themselves.
    size = num_blocks(num_rows, block) + min(end_E.size, num_rows) - 1
    tile_P = jnp.arange(size, dtype=jnp.int32)
    expert_P = jnp.minimum(_expert_of_tile(per_expert_E, tile_P), last_expert)
    first_tile_E = jnp.cumsum(per_expert_E) - per_expert_E
    block_P = jnp.where(
        tile_P < with_rows,
        first_E[expert_P] + tile_P - first_tile_E[expert_P],
        used_blocks + tile_P - with_rows,
    )
    # Unused places hold indices within bounds.
    block_P = jnp.minimum(block_P, num_blocks(num_rows, block) - 1)
    return _block_tiles(begin_E, end_E, expert_P, block_P, block, [count, with_rows])


def tiles_by_expert(group_sizes_E, num_rows: int, block: int) -> BlockTiles:
    """Every expert with each block that holds rows of it; an expert without rows once.

    The latter's tile writes the zeros of its gradient. It names the block of the previous tile,
    which is already there. Blocks past the last expert's rows are in no tile.
    """
    begin_E, end_E = group_bounds(group_sizes_E, num_rows)
    has_rows_E, last_E = end_E > begin_E, (end_E - 1) // block
    first_E = jnp.where(has_rows_E, begin_E // block, jnp.maximum(end_E - 1, 0) // block)
    per_expert_E = jnp.where(has_rows_E, last_E - first_E + 1, 1)
    count = jnp.sum(per_expert_E)
    size = num_blocks(num_rows, block) + end_E.size - 1
    tile_P = jnp.arange(size, dtype=jnp.int32)
    expert_P = jnp.minimum(_expert_of_tile(per_expert_E, tile_P), end_E.size - 1)
    first_tile_E = jnp.cumsum(per_expert_E) - per_expert_E
    block_P = first_E[expert_P] + tile_P - first_tile_E[expert_P]
    block_P = jnp.clip(block_P, 0, num_blocks(num_rows, block) - 1)
    return _block_tiles(begin_E, end_E, expert_P, block_P, block, [count, count])


def _expert_of_tile(per_expert_E, tile_P):
    # Comparing with all costs less than a binary search, which would be a loop.
    return jnp.searchsorted(
        jnp.cumsum(per_expert_E), tile_P, side="right", method="compare_all"
    )


def _block_tiles(begin_E, end_E, expert_P, block_P, block: int, count) -> BlockTiles:
    start_P = block_P * block
    begin_P = jnp.clip(begin_E[expert_P] - start_P, 0, block)
    end_P = jnp.clip(end_E[expert_P] - start_P, 0, block)
    # A block past the last rows names an expert whose rows end before it: 0 to 0.
    arrays = (expert_P, block_P, jnp.minimum(begin_P, end_P), end_P, jnp.stack(count))
    return BlockTiles(*(array.astype(jnp.int32) for array in arrays))


class RowTiles(NamedTuple):
    """Tiles that begin at a row, in the order of the experts; the first `count[0]` are used.

    A tile may cover rows of another expert: they are multiplied and not stored. Experts
    without rows have no tile; their weights are not read. On Hopper tiles begin at multiples
    of 8, and the rows past the last expert's are a group of their own, number E, whose tiles
    are stored as zeros.

    Attributes:
        expert_P: int32, the group of each tile; E for the rows of no expert.
        start_P: int32, first row of the tile.
        offset_P: int32, rows of the tile before those of its group.
        size_P: int32, how many of its rows are the group's.
        count: int32 [tiles, tiles of experts]; the rest of the arrays is unused.
    """

    expert_P: jax.Array
    start_P: jax.Array
    offset_P: jax.Array
    size_P: jax.Array
    count: jax.Array


def max_row_tiles(num_rows: int, num_experts: int, block: int) -> int:
    """The most tiles that any split of the rows into groups gives.

    A group of n > 0 rows starts up to 7 rows into its first tile: at most
    floor((n + 7 + block - 1) / block) tiles.
    """
    groups = min(num_experts, num_rows) + 1
    return (_aligned(num_rows) + groups * (ROW_ALIGNMENT - 1 + block - 1)) // block


def _aligned(num_rows: int) -> int:
    return -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def row_tiles(group_sizes_E, num_rows: int, block: int) -> RowTiles:
    """Tiles of up to `block` rows; `gpu_schedule.py` is the kernel that makes them."""
    num_experts = group_sizes_E.shape[0]
    _, end_E = group_bounds(group_sizes_E, num_rows)
    begin_G, end_G = jnp.pad(end_E, (1, 0)), jnp.append(end_E, num_rows)
    first_G = begin_G // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles_G = jnp.where(end_G > begin_G, -(-(end_G - first_G) // block), 0)
    tiles_end_G = jnp.cumsum(tiles_G)
    tile_P = jnp.arange(max_row_tiles(num_rows, num_experts, block), dtype=jnp.int32)
    # Comparing all with all is one small fused loop; a search would be a chain of launches.
    group_P = jnp.sum(tile_P[:, None] >= tiles_end_G[None], axis=1, dtype=jnp.int32)
    group_P = jnp.minimum(group_P, num_experts)
    turn_P = tile_P - (tiles_end_G - tiles_G)[group_P]
    start_P = first_G[group_P] + turn_P * block
    lower_P = jnp.maximum(begin_G[group_P], start_P)
    upper_P = jnp.minimum(end_G[group_P], start_P + block)
    used_P = tile_P < tiles_end_G[-1]
    return RowTiles(
        expert_P=group_P,
        start_P=jnp.where(used_P, start_P, 0),
        offset_P=jnp.where(used_P, lower_P - start_P, 0),
        size_P=jnp.where(used_P, upper_P - lower_P, 0),
        count=tiles_end_G[jnp.array([-1, -2])],
    )
