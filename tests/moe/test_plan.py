# SPDX-License-Identifier: Apache-2.0
"""A routing plan written down by hand: who is routed, who got a slot, and which."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx.moe.plan import RoutingPlan


def hand_plan() -> RoutingPlan:
    """One group, five tokens, two choices each, three experts with two slots each.

    Queues, first choices first: expert 0 gets tokens 0, 1, 3 (first) and 2 (second); expert
    1 gets token 2 (first) and 0 (second); expert 2 gets 1 and 3 (second). Token 4 is padding.
    """
    expert_TS = [[0, 1], [0, 2], [1, 0], [0, 2], [3, 3]]
    slot_TS = [[0, 1], [1, 0], [0, 3], [2, 1], [0, 0]]
    gate_TS = [[0.6, 0.3], [0.5, 0.4], [0.7, 0.2], [0.4, 0.4], [0.5, 0.5]]
    return RoutingPlan(
        expert_GTS=jnp.array([expert_TS], jnp.int32),
        gate_GTS=jnp.array([gate_TS], jnp.float32),
        slot_GTS=jnp.array([slot_TS], jnp.int32),
        count_GE=jnp.array([[4, 2, 2]], jnp.int32),
        num_experts=3,
        capacity=2,
    )


def test_padding_asks_for_no_expert():
    expected_TS = [[True, True]] * 4 + [[False, False]]
    np.testing.assert_array_equal(hand_plan().is_routed_GTS[0], expected_TS)


def test_a_place_beyond_the_capacity_is_dropped():
    # Token 3's first choice is third in expert 0's queue, token 2's second one fourth.
    expected_TS = [[True, True], [True, True], [True, False], [False, True], [False, False]]
    np.testing.assert_array_equal(hand_plan().is_kept_GTS[0], expected_TS)


def test_positions_in_the_buffers():
    # expert * 2 + slot; 6, one past the last, for none.
    expected_TS = [[0, 3], [1, 4], [2, 6], [6, 5], [6, 6]]
    np.testing.assert_array_equal(hand_plan().position_GTS[0], expected_TS)


def test_sizes_are_static_under_jit():
    plan = hand_plan()
    leaves, structure = jax.tree.flatten(plan)
    assert len(leaves) == 4

    @jax.jit
    def kept(plan):
        assert isinstance(plan.capacity, int) and isinstance(plan.num_experts, int)
        return plan.is_kept_GTS

    np.testing.assert_array_equal(kept(plan), plan.is_kept_GTS)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.num_experts, again.capacity) == (3, 2)


def test_the_balance_loss_counts_the_choices_unless_it_is_told_others():
    plan = hand_plan()
    assert plan.counted_GE is plan.count_GE
    rounds_GE = plan.count_GE * 2
    assert dataclasses.replace(plan, balance_GE=rounds_GE).counted_GE is rounds_GE
