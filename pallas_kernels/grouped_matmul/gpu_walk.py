# SPDX-License-Identifier: Apache-2.0
"""The order in which blocks of a Hopper GPU take tiles of a product, and the bytes they copy.

Dims: R rows, D inputs, F outputs, E experts; P tiles of rows
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.tile_schedule import ROW_ALIGNMENT, RowTiles, row_tiles
from pallas_kernels.launches import Cache, num_bytes
from pallas_kernels.mosaic_gpu import turns_of
from pallas_kernels.tiling.gpu import Tiling

# Rows of the smallest part of a tile that has a product of its own.
SMALLEST = 64


@dataclasses.dataclass(frozen=True)
class Walk:
    """The order in which the blocks of the GPU take tiles."""

    tiling: Tiling
    features: int
    depth_steps: int
    num_experts: int

    @property
    def feature_tiles(self) -> int:
        return pl.cdiv(self.features, self.tiling.tile_m * self.tiling.warpgroups)

    def turns(self, tiles: RowTiles):
        total = tiles.count_1[0] * (self.feature_tiles * self.tiling.splits)
        return turns_of(total, self.tiling.num_sms)

    def tile(self, turn, tiles: RowTiles):
        """(tile of rows, tile of features, split) of a turn.

        Features go in panels: all rows of a panel before the next one, so that the weights
        of a panel and the rows are in the cache together.
        """
        index = lax.axis_index("sm") + turn * self.tiling.num_sms
        return self.place(index, tiles.count_1[0])

    def place(self, index, row_tiles):
        """(tile of rows, tile of features, split) of the index-th tile of all blocks."""
        split = jnp.int32(0)
        if self.tiling.splits > 1:
            split = lax.rem(index, self.tiling.splits)
            index = lax.div(index, self.tiling.splits)
        if self.tiling.panel >= self.feature_tiles:
            row_tile = lax.div(index, self.feature_tiles)
            return row_tile, index - row_tile * self.feature_tiles, split
        in_panel = row_tiles * self.tiling.panel
        which = lax.div(index, in_panel)
        rest = index - which * in_panel
        width = lax.min(self.tiling.panel, self.feature_tiles - which * self.tiling.panel)
        row_tile = lax.div(rest, width)
        return row_tile, which * self.tiling.panel + rest - row_tile * width, split

    def steps(self, expert):
        """Steps along D; none for the rows of no expert."""
        return lax.select(expert < self.num_experts, self.depth_steps, 0)


def copied_bytes(group_sizes_E, *, walk: Walk, num_rows: int, x, w, num_matrices: int, extras,
            results):  # fmt: skip
    """Bytes from and to memory of each operand and result, behind a cache (`launches.Cache`).

    Args:
        x, w: dtypes of the rows and the matrices.
        extras: shapes and dtypes of the epilogue's operands, which are counted once.
    """
    tiling, cache = walk.tiling, Cache()
    tiles = row_tiles(jnp.asarray(group_sizes_E, jnp.int32), num_rows, tiling.tile_n)
    expert_P, start_P, offset_P, size_P, count_1 = map(np.asarray, tiles.arrays())
    total = int(count_1[0]) * walk.feature_tiles * tiling.splits
    places = jax.vmap(walk.place, in_axes=(0, None))(
        jnp.arange(total, dtype=jnp.int32), jnp.int32(count_1[0])
    )
    depth = walk.depth_steps * tiling.tile_k
    features = tiling.tile_m * tiling.warpgroups
    x_bytes, w_bytes, y_bytes = 0, [0] * num_matrices, 0
    for row_tile, column, split in zip(*map(np.asarray, places), strict=True):
        expert, columns = expert_P[row_tile], min(features, walk.features - column * features)
        stored = size_P[row_tile]
        y_bytes += num_bytes((stored, columns), results[0].dtype)
        if expert < walk.num_experts:
            rows = copied_rows(tiling, offset_P[row_tile] + size_P[row_tile])
            first, end = start_P[row_tile], min(start_P[row_tile] + rows, num_rows)
            # Tiles begin at multiples of 8 rows and share some with their neighbours.
            for eight in range(first // ROW_ALIGNMENT, -(-end // ROW_ALIGNMENT)):
                size = num_bytes((ROW_ALIGNMENT, depth), x)
                x_bytes += cache.read(("x", eight, split), size)
            for i in range(num_matrices):
                key = i, expert, column, split
                w_bytes[i] += cache.read(key, num_bytes((depth, columns), w))
        for i in range(len(results)):
            cache.write(("y", i, row_tile, column, split), num_bytes((stored, columns), x))
    once = [num_bytes(each.shape, each.dtype) for each in tiles.arrays()]
    once += [num_bytes(*each) for each in extras]
    return [x_bytes, *w_bytes, *once], [y_bytes] * len(results)


def copied_rows(tiling: Tiling, end: int) -> int:
    """Rows that are copied of a tile: what `for_rows` chooses."""
    rows = tiling.tile_n
    if tiling.splits > 1:
        return rows
    parts = (4, 2) if rows >= 4 * SMALLEST else (2,) if rows >= 2 * SMALLEST else ()
    return next((rows // part for part in parts if end <= rows // part), rows)


def for_rows(tiling: Tiling, end, run) -> None:
    """`run(rows)` with the fewest rows of a tile that reach to `end`.

    A large tile that holds few rows of its group, the last of most groups, is multiplied as
    half or a quarter of one. With sums in parts all of it is.
    """
    rows = tiling.tile_n
    if rows < 2 * SMALLEST or tiling.splits > 1:
        run(rows)
        return
    options = [rows // 4, rows // 2, rows] if rows >= 4 * SMALLEST else [rows // 2, rows]
    at_least = 0
    for option in options:
        fits = (end > at_least) & (end <= option)
        pl.when(fits)(functools.partial(run, option))
        at_least = option
