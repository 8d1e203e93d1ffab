# SPDX-License-Identifier: Apache-2.0
"""Which tile is whose turn, and the transforms of shared memory."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import gpu_swap_ab
from pallas_kernels.grouped_matmul.gpu_schedule import row_tiles
from pallas_kernels.grouped_matmul.gpu_tiling import Tiling


@pytest.mark.parametrize("panel", [1, 2, 3, 16])
@pytest.mark.parametrize("splits", [1, 2])
def test_blocks_take_every_tile_once(monkeypatch, panel, splits):
    tiling = Tiling(64, 16, 64, panel=panel, splits=splits, num_sms=4)
    walk = gpu_swap_ab._Walk(tiling=tiling, features=128 * 7 - 64, depth_steps=2, num_experts=3)
    tiles = row_tiles(jnp.asarray([20, 0, 40]), 64, 16)
    taken = []
    for sm in range(4):
        monkeypatch.setattr(jax.lax, "axis_index", lambda name, sm=sm: jnp.int32(sm))
        taken += [
            tuple(map(int, walk.tile(turn, tiles))) for turn in range(int(walk.turns(tiles)))
        ]
    count = int(tiles.count_1[0])
    assert sorted(taken) == [
        (r, f, s) for r in range(count) for f in range(7) for s in range(splits)
    ]


def test_swizzle_follows_the_row():
    def swizzle(columns, dtype):
        tile, swizzle = gpu_swap_ab.tiled(columns, dtype)
        return tile.tiling, swizzle.swizzle

    assert swizzle(64, jnp.bfloat16) == ((8, 64), 128)
    assert swizzle(128, jnp.bfloat16) == ((8, 64), 128)
    assert swizzle(256, jnp.int4) == ((8, 256), 128)
    assert swizzle(64, jnp.int4) == ((8, 64), 32)
    assert swizzle(16, jnp.float32) == ((8, 16), 64)
