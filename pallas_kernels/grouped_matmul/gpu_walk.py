# SPDX-License-Identifier: Apache-2.0
"""The order in which blocks of a Hopper GPU take tiles of a product, and the bytes they copy.

Dims: R rows, D inputs, F outputs, E experts; P tiles of rows, S parts of D
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.tile_schedule import RowTiles, row_tiles
from pallas_kernels.launches import Cache, num_bytes
from pallas_kernels.mosaic_gpu import turns_of
from pallas_kernels.sorted_rows import group_bounds
from pallas_kernels.tiling.gpu import ROW_ALIGNMENT, Tiling, best_parts

# Rows of a part of a tile that has a product of its own: each is a loop in the program.
CUT = (64, 96, 128, 160, 192)


@dataclasses.dataclass(frozen=True)
class Walk:
    """The order in which the blocks of the GPU take tiles of rows times matrices.

    Attributes:
        depth_steps: steps along D of all parts.
        parts: parts of D, each a tile of its own; those of a run if the tiling has several.
    """

    tiling: Tiling
    features: int
    depth_steps: int
    num_experts: int
    parts: Any = 1

    @property
    def feature_tiles(self) -> int:
        return pl.cdiv(self.features, self.tiling.tile_m * self.tiling.warpgroups)

    @property
    def stored_features(self) -> int:
        """Number of features of a stored row of results; for sums in parts, those of whole
        tiles.

        Their rows are not swizzled in shared memory, and Mosaic cuts off such a copy of one row
        at the array's end, but not at the row's: the rest would go into the next one.
        """
        if self.tiling.splits == 1:
            return self.features
        return self.feature_tiles * self.tiling.tile_m * self.tiling.warpgroups

    def parts_table(self, most_tiles: int) -> np.ndarray:
        """int32, the parts of D by the number of tiles of rows, up to `most_tiles` of these.

        They depend on nothing else: runs with equally many tiles add up in the same order.
        """
        tiling = self.tiling
        return np.asarray(
            [
                best_parts(
                    tiles * self.feature_tiles, self.depth_steps, tiling.splits, tiling.num_sms
                )
                for tiles in range(most_tiles + 1)
            ],
            np.int32,
        )

    def of_run(self, tiles: RowTiles) -> "Walk":
        """The walk with the parts of D that the tiles of a run ask for."""
        if self.tiling.splits == 1:
            return self
        table = self.parts_table(tiles.expert_P.shape[0])
        row_tiles = self.row_tiles(tiles)
        parts = jnp.int32(table[0])
        # A few comparisons: the table would be a load that waits for the load of the number.
        for first in np.flatnonzero(np.diff(table)) + 1:
            parts = lax.select(row_tiles >= int(first), jnp.int32(table[first]), parts)
        return dataclasses.replace(self, parts=parts)

    def sum_of_parts(self, parts_SRF, tiles: RowTiles):
        """The sum of the parts that a run has; others are not written and may hold anything."""
        # XLA fuses a lookup with the sum; the comparisons of `of_run` would be another kernel.
        table = jnp.asarray(self.parts_table(tiles.expert_P.shape[0]))
        index_S = lax.iota(jnp.int32, parts_SRF.shape[0])
        is_written_S = index_S < table[self.row_tiles(tiles)]
        return jnp.sum(jnp.where(is_written_S[:, None, None], parts_SRF, 0), axis=0)

    def row_tiles(self, tiles: RowTiles):
        """Number of tiles of rows to take; sums in parts leave out those of no expert."""
        return tiles.count[int(self.tiling.splits > 1)]

    def turns(self, tiles: RowTiles):
        total = self.row_tiles(tiles) * (self.feature_tiles * self.parts)
        return turns_of(total, self.tiling.num_sms)

    def tile(self, turn, tiles: RowTiles):
        """(tile of rows, tile of features, split) of a turn.

        Features go in panels: all rows of a panel before the next one, so that the weights
        of a panel and the rows are in the cache together.
        """
        index = lax.axis_index("sm") + turn * self.tiling.num_sms
        return self.place(index, self.row_tiles(tiles))

    def place(self, index, row_tiles):
        """(tile of rows, tile of features, split) of the index-th tile of all blocks."""
        split = jnp.int32(0)
        if self.tiling.splits > 1:
            split = lax.rem(index, self.parts)
            index = lax.div(index, self.parts)
        if self.tiling.panel >= self.feature_tiles:
            row_tile = lax.div(index, self.feature_tiles)
            return row_tile, index - row_tile * self.feature_tiles, split
        return *_in_panels(index, row_tiles, self.feature_tiles, self.tiling.panel), split

    def steps(self, expert):
        """Steps along D of a part; none for the rows of no expert."""
        return lax.select(expert < self.num_experts, self.part_steps, 0)

    @property
    def part_steps(self):
        if self.tiling.splits == 1:
            return self.depth_steps
        return lax.div(jnp.int32(self.depth_steps), self.parts)


@dataclasses.dataclass(frozen=True)
class GradientWalk:
    """The order in which the blocks of the GPU take tiles of the experts' gradients."""

    tiling: Tiling
    num_experts: int
    D: int
    F: int

    @property
    def tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.D, self.tiling.tile_m * self.tiling.warpgroups), pl.cdiv(
            self.F, self.tiling.tile_n
        )

    def turns(self):
        return turns_of(self.num_experts * math.prod(self.tiles), self.tiling.num_sms)

    def tile(self, turn):
        """(expert, tile of D, tile of F): panels of F, all of D in each."""
        return self.place(lax.axis_index("sm") + turn * self.tiling.num_sms)

    def place(self, index):
        """(expert, tile of D, tile of F) of the index-th tile of all blocks."""
        d_tiles, f_tiles = self.tiles
        expert = lax.div(index, d_tiles * f_tiles)
        rest = index - expert * (d_tiles * f_tiles)
        return expert, *_in_panels(rest, d_tiles, f_tiles, min(self.tiling.panel, f_tiles))

    def rows(self, bound_gmem, expert):
        """(first, begin, end, steps): the first step's first row, relative to it the expert's
        first row and the one after its last, and how many steps they take."""
        first_row, end_row = bound_gmem[expert], bound_gmem[expert + 1]
        first = first_row & -ROW_ALIGNMENT
        steps = lax.div(
            end_row - first + (self.tiling.tile_k - 1), jnp.int32(self.tiling.tile_k)
        )
        steps = lax.select(end_row > first_row, steps, 0)
        return first, first_row - first, end_row - first, steps


def _in_panels(index, rows, columns: int, panel: int):
    """(row, column) of the index-th tile: all rows of `panel` columns before the next ones."""
    in_panel = rows * panel
    which = lax.div(index, in_panel)
    rest = index - which * in_panel
    width = lax.min(panel, columns - which * panel)
    row = lax.div(rest, width)
    return row, which * panel + rest - row * width


def copied_bytes(
    group_sizes_E, *, walk: Walk, num_rows: int, x, w, num_matrices: int, once, results
):
    """Bytes from and to memory of each operand and result, behind a cache (`launches.Cache`).

    Args:
        x, w: dtypes of the rows and the matrices.
        once: shapes and dtypes of the operands that are counted once: the schedule's and the
            epilogue's.
    """
    tiling, cache = walk.tiling, Cache()
    tiles = row_tiles(jnp.asarray(group_sizes_E, jnp.int32), num_rows, tiling.tile_n)
    walk, count = walk.of_run(tiles), walk.row_tiles(tiles)
    expert_P, start_P, offset_P, size_P, _ = map(np.asarray, tiles)
    total = int(count) * walk.feature_tiles * int(walk.parts)
    places = jax.vmap(walk.place, in_axes=(0, None))(jnp.arange(total, dtype=jnp.int32), count)
    depth = int(walk.part_steps) * tiling.tile_k
    features = tiling.tile_m * tiling.warpgroups
    x_bytes, w_bytes, y_bytes = 0, [0] * num_matrices, 0
    for row_tile, column, split in zip(*map(np.asarray, places), strict=True):
        expert = expert_P[row_tile]
        columns = min(features, walk.features - column * features)
        stored = size_P[row_tile], min(features, walk.stored_features - column * features)
        y_bytes += num_bytes(stored, results[0].dtype)
        if expert < walk.num_experts:
            rows = copied_rows(tiling, offset_P[row_tile] + size_P[row_tile])
            first = start_P[row_tile]
            end = min(start_P[row_tile] + rows, num_rows)
            # Tiles begin at multiples of 8 rows and share some with their neighbours.
            for eight in range(first // ROW_ALIGNMENT, -(-end // ROW_ALIGNMENT)):
                size = num_bytes((ROW_ALIGNMENT, depth), x)
                x_bytes += cache.read(("x", eight, split), size)
            for i in range(num_matrices):
                key = i, expert, column, split
                w_bytes[i] += cache.read(key, num_bytes((depth, columns), w))
        for i in range(len(results)):
            cache.write(("y", i, row_tile, column, split), num_bytes(stored, x))
    once = [num_bytes(*each) for each in once]
    return [x_bytes, *w_bytes, *once], [y_bytes] * len(results)


def copied_bytes_of_gradient(group_sizes_E, *, walk: GradientWalk, num_rows: int, x, result):
    """`copied_bytes` of the weights' gradient."""
    tiling, cache = walk.tiling, Cache()
    begin_E, end_E = map(np.asarray, group_bounds(jnp.asarray(group_sizes_E), num_rows))
    first_E = begin_E // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps_E = np.where(end_E > begin_E, -(-(end_E - first_E) // tiling.tile_k), 0)
    total = walk.num_experts * math.prod(walk.tiles)
    places = jax.vmap(walk.place)(jnp.arange(total, dtype=jnp.int32))
    tile_d, read = tiling.tile_m * tiling.warpgroups, [0, 0]
    for expert, *tile in zip(*map(np.asarray, places), strict=True):
        for i, width in enumerate((tile_d, tiling.tile_n)):
            rows = min(int(steps_E[expert]) * tiling.tile_k, num_rows - int(first_E[expert]))
            read[i] += cache.read((i, expert, tile[i]), num_bytes((rows, width), x))
        block = num_bytes((tile_d, tiling.tile_n), result.dtype)
        cache.write(("dw", expert, *tile), block)
    return [*read, num_bytes((walk.num_experts + 1,), jnp.int32)], [
        num_bytes(result.shape, result.dtype)
    ]


def heights(tiling: Tiling) -> list[int]:
    """Numbers of rows to multiply a tile as, its own last: the fewest that hold its group's.

    The last tile of most groups holds few rows. With sums in parts all tiles are whole.
    """
    rows = tiling.tile_n
    cut = [height for height in CUT if height < rows] if tiling.splits == 1 else []
    return [*cut, rows]


def copied_rows(tiling: Tiling, end: int) -> int:
    """Rows of a tile that are copied: those that `for_rows` chooses."""
    return next(height for height in heights(tiling) if end <= height)


def for_rows(tiling: Tiling, end, run) -> None:
    """`run(rows)` with the fewest of a tile's `heights` that reach to `end`."""
    if len(options := heights(tiling)) == 1:
        run(*options)
        return
    at_least = 0
    for option in options:
        fits = (end > at_least) & (end <= option)
        pl.when(fits)(functools.partial(run, option))
        at_least = option
