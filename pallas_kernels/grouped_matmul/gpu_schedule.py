# SPDX-License-Identifier: Apache-2.0
"""Who does what in the Hopper kernels: the rows of each tile, the warpgroups of a block.

Which rows each tile of a grouped product covers is computed by XLA before the kernel.

A tile belongs to one expert. It starts at a multiple of 8 rows, as the copy engine's tiled
view of the rows asks, so that it may cover rows of a neighbour: they are multiplied and not
stored. Experts without rows have no tile; their weights are not read. The rows past the last
expert's form a group of their own, number E, whose tiles are stored as zeros.
Dims: R E; P tiles of rows
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.routing.groups import group_bounds

ROW_ALIGNMENT = 8
PRODUCER_REGISTERS = 40


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Tiles of rows in the order of the experts.

    Attributes:
        expert_P: int32, the group of each tile; E for the rows of no expert.
        start_P: int32, first row of the tile, a multiple of 8.
        offset_P: int32, rows of the tile before those of its group.
        size_P: int32, how many of its rows are the group's.
        count_1: int32, how many tiles there are; the rest of the arrays is unused.
    """

    expert_P: jax.Array
    start_P: jax.Array
    offset_P: jax.Array
    size_P: jax.Array
    count_1: jax.Array

    def arrays(self) -> tuple[jax.Array, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def max_row_tiles(num_rows: int, num_experts: int, block: int) -> int:
    """No split of the rows into groups gives more tiles.

    A group of n > 0 rows starts up to 7 rows into its first tile: at most
    floor((n + 7 + block - 1) / block) tiles.
    """
    groups = min(num_experts, num_rows) + 1
    return (aligned(num_rows) + groups * (ROW_ALIGNMENT - 1 + block - 1)) // block


def aligned(num_rows: int) -> int:
    return -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def row_tiles(group_sizes_E, num_rows: int, block: int) -> RowTiles:
    """Covers `num_rows` rows, sorted by expert, and those up to a multiple of 8 with tiles."""
    num_experts = group_sizes_E.shape[0]
    begin_E, end_E = group_bounds(group_sizes_E, num_rows)
    begin_G = jnp.append(begin_E, end_E[-1])
    end_G = jnp.append(end_E, aligned(num_rows))
    first_G = begin_G // ROW_ALIGNMENT * ROW_ALIGNMENT
    tiles_G = jnp.where(end_G > begin_G, -(-(end_G - first_G) // block), 0)
    tiles_end_G = jnp.cumsum(tiles_G)
    tile_P = jnp.arange(max_row_tiles(num_rows, num_experts, block), dtype=jnp.int32)
    # Comparing all with all is one small fused loop; a search is a chain of launches.
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
        count_1=tiles_end_G[-1:],
    )


def summed_splits(parts_SPFT, tiles: RowTiles, group_sizes_E, num_rows: int):
    """Rows out of tiles that hold parts of their sums, `[R, F]` float32; of no expert zero.

    Args:
        parts_SPFT: S parts for each tile; what a tile has of other groups is not used.
    """
    block = parts_SPFT.shape[-1]
    row_R = jnp.arange(num_rows, dtype=jnp.int32)
    begin_P = tiles.start_P + tiles.offset_P
    is_used_P = jnp.arange(begin_P.shape[0]) < tiles.count_1
    is_begun_RP = (row_R[:, None] >= begin_P[None]) & is_used_P[None]
    tile_R = jnp.sum(is_begun_RP, axis=1, dtype=jnp.int32) - 1
    within_R = jnp.clip(row_R - tiles.start_P[tile_R], 0, block - 1)
    y_RF = jnp.sum(parts_SPFT[:, tile_R, :, within_R], axis=1)
    is_real_R = row_R < jnp.sum(group_sizes_E)
    return jnp.where(is_real_R[:, None], y_RF, 0.0)


def copy_and_multiply(
    groups: int, copy: Callable[[], None], tile_loop: Callable, turns: Callable
) -> None:
    """Splits the work of a block whose kernel was started with `groups + 1` warpgroups.

    A thread that only starts copies needs few registers; what it gives back, the accumulators
    of the others get.

    Args:
        groups: warpgroups that multiply; the one after them copies.
        copy: issues all copies of the block.
        tile_loop: of the number of a multiplying warpgroup, the body of a loop over its tiles
            that counts the steps of the ring, `(turn, step) -> step`.
        turns: says how many tiles this block has.
    """
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == groups)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        copy()

    @pl.when(warpgroup < groups)
    def _():
        registers = min(232, (512 - PRODUCER_REGISTERS) // groups // 8 * 8)
        plgpu.set_max_registers(registers, action="increase")
        lax.fori_loop(0, turns(), tile_loop(warpgroup), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
