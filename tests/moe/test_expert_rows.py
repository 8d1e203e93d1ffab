# SPDX-License-Identifier: Apache-2.0
"""Choices in rows: each where its expert's rows are, once, in order, and nowhere else."""

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.expert_rows import FEW_CHOICES, block_size, num_rows, sort_into_rows

E = 5


def loads():
    rng = np.random.default_rng(0)
    yield "random", rng.integers(0, E + 1, 23)
    yield "one expert", np.full(23, 3)
    yield "none", np.full(23, E)
    yield "empty experts", rng.choice([1, 4], 23)
    yield "a choice an expert", np.arange(E)


@pytest.mark.parametrize("block", [1, 2, 8])
@pytest.mark.parametrize(("name", "expert_X"), list(loads()), ids=lambda value: str(value)[:12])
def test_equals_a_loop(name, expert_X, block):
    del name
    X = len(expert_X)
    R = num_rows(X, E, block)
    rows = sort_into_rows(jnp.asarray(expert_X, jnp.int32), E, block=block, rows=R)
    choice_R, row_X, count_E = np.full(R, X), np.full(X, R), []
    start = 0
    for e in range(E):
        for i, x in enumerate(np.flatnonzero(expert_X == e)):
            choice_R[start + i], row_X[x] = x, start + i
        count_E.append(-(-np.sum(expert_X == e) // block) * block)
        start += count_E[-1]
    assert start <= R and R % block == 0
    np.testing.assert_array_equal(rows.choice_R, choice_R)
    np.testing.assert_array_equal(rows.row_X, row_X)
    np.testing.assert_array_equal(rows.count_E, count_E)
    assert rows.block == block


def test_the_rows_are_enough_for_the_worst_load_and_no_more():
    """One choice in every expert but one, which has the rest, fills its blocks worst."""
    for num_choices, block in ((23, 8), (5, 8), (64, 16), (3, 4)):
        # n - 1 experts with one choice each, the rest on one more.
        worst = max(
            (n - 1) * block + -(-(num_choices - n + 1) // block) * block
            for n in range(1, min(E, num_choices) + 1)
        )
        assert num_rows(num_choices, E, block) == worst


def test_blocks_are_single_rows_for_a_few_choices_and_at_most_64():
    assert block_size(FEW_CHOICES, 128) == 1
    assert block_size(FEW_CHOICES + 1, 128) == 2
    assert block_size(2048, 32) == 32
    assert block_size(10**6, 8) == 64
