# SPDX-License-Identifier: Apache-2.0
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.visits import visits_of_blocks, visits_of_experts
from tests.kernels.loops import expert_of_rows

BLOCK = 16


def rows_visited(visits, num_experts: int) -> dict[tuple[int, int], list[int]]:
    """Rows by (expert, block) of the visits that are made, in order."""
    expert_V, block_V, begin_V, end_V, count = (np.asarray(array) for array in visits)
    found = {}
    for v in range(count[0]):
        assert 0 <= expert_V[v] < num_experts
        key = int(expert_V[v]), int(block_V[v])
        first = key[1] * BLOCK
        found.setdefault(key, []).extend(range(first + begin_V[v], first + end_V[v]))
    return found


def rows_by_loop(group_sizes) -> dict[tuple[int, int], list[int]]:
    found = {}
    for row, expert in enumerate(expert_of_rows(group_sizes, R)):
        found.setdefault((int(expert), row // BLOCK), []).append(row)
    return found


# Of as many experts and rows each time, so that every operation is compiled once. Sizes may
# sum to more than R.
R = 73
six_group_sizes = st.lists(
    st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 20), st.just(BLOCK)),
    min_size=6,
    max_size=6,
)


@settings(deadline=None, max_examples=100)
@given(group_sizes=six_group_sizes)
def test_blocks_meet_exactly_the_experts_whose_rows_they_hold(group_sizes):
    visits = visits_of_blocks(np.array(group_sizes, np.int32), R, BLOCK)
    expected, found = rows_by_loop(group_sizes), rows_visited(visits, len(group_sizes))
    assert {key: rows for key, rows in found.items() if rows} == expected
    count, with_rows = np.asarray(visits.count)
    assert with_rows == len(expected)
    # Every block is visited, also those of nobody: once each, after all others.
    block_V = np.asarray(visits.block_V)[:count]
    assert sorted(set(block_V)) == list(range(-(-R // BLOCK)))
    assert count - with_rows == len(set(block_V) - {block for _, block in expected})
    # A block's visits follow each other: between them its result would be written out.
    assert (np.diff(block_V) >= 0).all()
    assert count <= visits.block_V.size


@settings(deadline=None, max_examples=100)
@given(group_sizes=six_group_sizes)
def test_experts_meet_exactly_the_blocks_with_rows_of_them(group_sizes):
    visits = visits_of_experts(np.array(group_sizes, np.int32), R, BLOCK)
    expected, found = rows_by_loop(group_sizes), rows_visited(visits, len(group_sizes))
    assert {key: rows for key, rows in found.items() if rows} == expected
    count = int(visits.count[0])
    expert_V = np.asarray(visits.expert_V)[:count]
    # Every expert in turn; one without rows once, so that its zeros are written.
    assert sorted(set(expert_V)) == list(range(len(group_sizes)))
    assert (np.diff(expert_V) >= 0).all()
    experts_with_rows = {expert for expert, _ in expected}
    assert count == len(expected) + len(group_sizes) - len(experts_with_rows)
    assert count <= visits.block_V.size


def test_visit_without_rows_names_what_the_one_before_it_fetched():
    # Rows 0 to 19 of experts 1 and 3; block 1 ends in rows of nobody, block 2 is one.
    group_sizes = np.array([0, 17, 0, 3, 0], np.int32)
    blocks = visits_of_blocks(group_sizes, 48, BLOCK)
    assert blocks.count.tolist() == [4, 3]
    assert blocks.expert_V[:4].tolist() == [1, 1, 3, 3]
    assert blocks.block_V[:4].tolist() == [0, 1, 1, 2]
    assert blocks.begin_V[:4].tolist() == [0, 0, 1, 0]
    assert blocks.end_V[:4].tolist() == [16, 1, 4, 0]
    experts = visits_of_experts(group_sizes, 48, BLOCK)
    assert experts.count.tolist() == [6, 6]
    assert experts.expert_V[:6].tolist() == [0, 1, 1, 2, 3, 4]
    assert experts.block_V[:6].tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("schedule", [visits_of_blocks, visits_of_experts])
def test_schedule_is_computed_without_a_loop(schedule):
    program = jax.jit(schedule, static_argnums=(1, 2)).lower(
        np.full(128, 8, np.int32), 1024, BLOCK
    )
    assert "while" not in program.as_text()
