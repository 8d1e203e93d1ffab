# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows cover every row once, each with rows of one expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.gpu_schedule import max_row_tiles, row_tiles, summed_splits
from tests.kernels.loops import expert_of_rows

# Sizes may sum to more.
NUM_ROWS = 200
tiles_of = jax.jit(row_tiles, static_argnums=(1, 2))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    block=st.sampled_from([8, 16, 64, 256]),
)
def test_every_row_is_covered_once_by_its_expert(sizes, block):
    num_rows = NUM_ROWS
    tiles = tiles_of(jnp.asarray(sizes), num_rows, block)
    expert, start, offset, size, count = map(np.asarray, tiles.arrays())
    assert count[0] <= max_row_tiles(num_rows, len(sizes), block) == expert.shape[0]
    owner = np.full(num_rows, -1)
    for p in range(count[0]):
        assert start[p] % 8 == 0
        assert size[p] > 0
        assert offset[p] + size[p] <= block
        first = start[p] + offset[p]
        assert (owner[first : first + size[p]] == -1).all()
        owner[first : first + size[p]] = expert[p]
    want = np.full(num_rows, len(sizes))
    experts = expert_of_rows(sizes, num_rows)
    want[: len(experts)] = experts
    assert (owner == want).all()
    assert not size[count[0] :].any()


def test_experts_without_rows_have_no_tile():
    tiles = row_tiles(jnp.asarray([0, 5, 0, 3, 0]), 8, 16)
    used = np.asarray(tiles.expert_P)[: int(tiles.count_1[0])]
    assert used.tolist() == [1, 3]


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_are_summed_for_the_rows_of_experts(splits):
    sizes, block = jnp.asarray([3, 0, 20]), 16
    tiles = row_tiles(sizes, 32, block)
    parts = np.random.default_rng(0).standard_normal(
        (splits, tiles.expert_P.shape[0], 4, block)
    )
    y = np.asarray(summed_splits(jnp.asarray(parts, jnp.float32), tiles, sizes, 30))
    expert, start, offset, size, count = map(np.asarray, tiles.arrays())
    want = np.zeros((30, 4))
    for p in range(count[0]):
        if expert[p] < 3:
            for row in range(start[p] + offset[p], start[p] + offset[p] + size[p]):
                want[row] = parts[:, p, :, row - start[p]].sum(0)
    np.testing.assert_allclose(y, want, atol=1e-6)
