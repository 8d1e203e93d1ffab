# SPDX-License-Identifier: Apache-2.0
"""Tile schedules cover every row once, with its expert; blocks of the GPU take every tile once.

Sizes are drawn so that they sum to less or to more than the rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.gpu_schedule import schedule
from pallas_kernels.grouped_matmul.gpu_walk import Walk
from pallas_kernels.grouped_matmul.tile_schedule import (
    max_row_tiles,
    row_tiles,
    tiles_by_block,
    tiles_by_expert,
)
from pallas_kernels.mosaic_gpu import Mosaic
from pallas_kernels.tiling.gpu import Tiling
from tests.kernels.loops import expert_of_rows

BLOCK, BLOCK_ROWS, ALIGNED_ROWS = 16, 73, 203
by_block = jax.jit(tiles_by_block, static_argnums=(1, 2))
by_expert = jax.jit(tiles_by_expert, static_argnums=(1, 2))
tiles_of = jax.jit(row_tiles, static_argnums=(1, 2))
six_group_sizes = st.lists(
    st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 20), st.just(BLOCK)),
    min_size=6,
    max_size=6,
)


def rows_of_tiles(tiles, num_experts: int) -> dict[tuple[int, int], list[int]]:
    """Rows by (expert, block) of the tiles that are used, in order."""
    expert_P, block_P, begin_P, end_P, count = (np.asarray(array) for array in tiles)
    found = {}
    for p in range(count[0]):
        assert 0 <= expert_P[p] < num_experts
        key = int(expert_P[p]), int(block_P[p])
        first = key[1] * BLOCK
        found.setdefault(key, []).extend(range(first + begin_P[p], first + end_P[p]))
    return found


def rows_by_loop(group_sizes) -> dict[tuple[int, int], list[int]]:
    found = {}
    for row, expert in enumerate(expert_of_rows(group_sizes, BLOCK_ROWS)):
        found.setdefault((int(expert), row // BLOCK), []).append(row)
    return found


@settings(max_examples=100)
@given(group_sizes=six_group_sizes)
def test_blocks_meet_exactly_the_experts_whose_rows_they_hold(group_sizes):
    tiles = by_block(np.array(group_sizes, np.int32), BLOCK_ROWS, BLOCK)
    expected, found = rows_by_loop(group_sizes), rows_of_tiles(tiles, len(group_sizes))
    assert {key: rows for key, rows in found.items() if rows} == expected
    count, with_rows = np.asarray(tiles.count)
    assert with_rows == len(expected)
    # Every block is there, also those of no expert: once each, after all others.
    block_P = np.asarray(tiles.block_P)[:count]
    assert sorted(set(block_P)) == list(range(-(-BLOCK_ROWS // BLOCK)))
    assert count - with_rows == len(set(block_P) - {block for _, block in expected})
    # A block's tiles follow each other: between them its result would be written out.
    assert (np.diff(block_P) >= 0).all()
    assert count <= tiles.block_P.size


@settings(max_examples=100)
@given(group_sizes=six_group_sizes)
def test_experts_meet_exactly_the_blocks_with_rows_of_them(group_sizes):
    tiles = by_expert(np.array(group_sizes, np.int32), BLOCK_ROWS, BLOCK)
    expected, found = rows_by_loop(group_sizes), rows_of_tiles(tiles, len(group_sizes))
    assert {key: rows for key, rows in found.items() if rows} == expected
    count = int(tiles.count[0])
    expert_P = np.asarray(tiles.expert_P)[:count]
    # Every expert in turn; one without rows once, so that its zeros are written.
    assert sorted(set(expert_P)) == list(range(len(group_sizes)))
    assert (np.diff(expert_P) >= 0).all()
    experts_with_rows = {expert for expert, _ in expected}
    assert count == len(expected) + len(group_sizes) - len(experts_with_rows)
    assert count <= tiles.block_P.size


def test_tile_without_rows_names_what_the_one_before_it_copied():
    # Rows 0 to 19 of experts 1 and 3; block 1 ends in rows of no expert, block 2 has no others.
    group_sizes = np.array([0, 17, 0, 3, 0], np.int32)
    blocks = by_block(group_sizes, 48, BLOCK)
    assert blocks.count.tolist() == [4, 3]
    assert blocks.expert_P[:4].tolist() == [1, 1, 3, 3]
    assert blocks.block_P[:4].tolist() == [0, 1, 1, 2]
    assert blocks.begin_P[:4].tolist() == [0, 0, 1, 0]
    assert blocks.end_P[:4].tolist() == [16, 1, 4, 0]
    experts = by_expert(group_sizes, 48, BLOCK)
    assert experts.count.tolist() == [6, 6]
    assert experts.expert_P[:6].tolist() == [0, 1, 1, 2, 3, 4]
    assert experts.block_P[:6].tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("schedule", [by_block, by_expert, tiles_of])
def test_schedule_is_computed_without_a_loop(schedule):
    program = schedule.lower(np.full(128, 8, np.int32), 1024, BLOCK)
    assert "while" not in program.as_text()


@given(
    sizes=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    block=st.sampled_from([8, 16, 64, 256]),
)
def test_aligned_tiles_cover_every_row_once_with_its_expert(sizes, block):
    tiles = tiles_of(jnp.asarray(sizes), ALIGNED_ROWS, block)
    expert, start, offset, size, count = map(np.asarray, tiles)
    assert count[0] <= max_row_tiles(ALIGNED_ROWS, len(sizes), block) == expert.shape[0]
    owner = np.full(ALIGNED_ROWS, -1)
    for p in range(count[0]):
        assert start[p] % 8 == 0
        assert size[p] > 0
        assert offset[p] + size[p] <= block
        first = start[p] + offset[p]
        assert first + size[p] <= ALIGNED_ROWS
        assert (owner[first : first + size[p]] == -1).all()
        owner[first : first + size[p]] = expert[p]
    want = np.full(ALIGNED_ROWS, len(sizes))
    experts = expert_of_rows(sizes, ALIGNED_ROWS)
    want[: len(experts)] = experts
    assert (owner == want).all()
    assert not size[count[0] :].any()


@pytest.mark.parametrize("block", [8, 64])
def test_the_gpus_kernel_makes_the_same_schedule(block):
    rng = np.random.default_rng(0)
    for R, sizes in (
        (21, [3, 0, 9, 1]),
        (21, [0, 21, 0, 0]),
        (21, [9, 30, 4, 7]),  # more than there are
        (21, [0] * 4),
        (777, rng.multinomial(700, np.ones(150) / 150)),  # more bounds than threads
    ):
        sizes = np.asarray(sizes, np.int32)
        want = tiles_of(sizes, R, block)
        got, bound_B = schedule(jnp.asarray(sizes), R, block, Mosaic(is_interpreted=True))
        count = int(want.count[0])
        assert got.count[0] == count
        for one, other in zip(got[:-1], want[:-1], strict=True):
            assert one[:count].tolist() == other[:count].tolist()
        bounds = np.minimum(np.append(0, np.cumsum(sizes)), R)
        assert bound_B[: len(bounds)].tolist() == bounds.tolist()


def taken_tiles(monkeypatch, walk, tiles, num_sms):
    """(row, feature, split) of every tile, block after block."""
    taken = []
    for sm in range(num_sms):
        monkeypatch.setattr(jax.lax, "axis_index", lambda name, sm=sm: jnp.int32(sm))
        run = walk.of_run(tiles)
        turns = range(int(run.turns(tiles)))
        taken.append([tuple(map(int, run.tile(turn, tiles))) for turn in turns])
    return taken


@pytest.mark.parametrize("panel", [1, 2, 3, 16])
def test_blocks_of_the_gpu_take_every_tile_once(monkeypatch, panel):
    tiling = Tiling(64, 16, 64, panel=panel, num_sms=4)
    walk = Walk(tiling=tiling, features=128 * 7 - 64, depth_steps=2, num_experts=3)
    tiles = tiles_of(jnp.asarray([20, 0, 40]), 64, 16)
    taken = taken_tiles(monkeypatch, walk, tiles, 4)
    count = int(tiles.count[0])
    want = [(r, f, 0) for r in range(count) for f in range(7)]
    assert sorted(sum(taken, [])) == want


@pytest.mark.parametrize("panel", [1, 16])
@pytest.mark.parametrize("active", [0, 1, 2, 3, 5, 8, 32])
def test_parts_of_the_sums_follow_the_number_of_tiles(monkeypatch, panel, active):
    """Of 12 steps, 7 tiles of features, 16 blocks: what a search in Python finds is taken."""
    tiling = Tiling(64, 16, 64, panel=panel, splits=6, num_sms=16)
    walk = Walk(tiling=tiling, features=128 * 7, depth_steps=12, num_experts=32)
    sizes = np.zeros(32, np.int32)
    sizes[-active:] = 8 if active else 0
    tiles = tiles_of(jnp.asarray(sizes), 300, 16)
    assert tiles.count[1] == active < tiles.count[0]
    steps = {p: -(-active * 7 * p // 16) * (12 // p + 1) for p in (1, 2, 3, 4, 6)}
    # From 64 tiles on, four waves, there is one part.
    parts = min(steps, key=lambda p: (steps[p], p)) if active * 7 < 64 else 1
    assert int(walk.of_run(tiles).parts) == parts
    taken = taken_tiles(monkeypatch, walk, tiles, 16)
    want = [(r, f, s) for r in range(active) for f in range(7) for s in range(parts)]
    assert sorted(sum(taken, [])) == want
    assert max(map(len, taken)) * (12 // parts + 1) == steps[parts]
