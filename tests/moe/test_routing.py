# SPDX-License-Identifier: Apache-2.0
"""Plans: one by hand; by policy, against loops: what decides choice, gate and slot."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.models.config import RouterConfig
from switchx.moe.routing_plan import RoutingPlan, by_gate, route_by_experts
from tests.moe.oracle import softmax
from tests.moe.plans import plan_of, traced_plan

G, T, E = 2, 18, 5


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    logits_GTE = (rng.normal(size=(G, T, E)) * 2).astype(np.float32)
    return logits_GTE, rng.random((G, T)) < 0.8


@pytest.mark.parametrize(
    ("num_selected", "gate", "priority"),
    [
        (1, "softmax", "position"),
        (2, "softmax", "gate"),
        (E, "softmax", "position"),
        (3, "normalized", "position"),
    ],
)
def test_top_k_equals_a_loop(num_selected, gate, priority):
    """GShard, algorithm 1: second choices queue behind all the first ones.

    By the gate, the surest tokens are the first of each queue.
    """
    logits_GTE, is_token_GT = inputs()
    prob_GTE = softmax(np.asarray(logits_GTE, np.float64))
    router = RouterConfig(num_selected=num_selected, gate=gate, priority=priority)
    plan = plan_of(router, logits_GTE, is_token_GT)
    for g in range(G):
        queue, tokens = [0] * E, np.flatnonzero(is_token_GT[g])
        if priority == "gate":
            tokens = tokens[np.argsort(-prob_GTE[g, tokens].max(-1), kind="stable")]
        for s in range(num_selected):
            for t in tokens:
                best = np.argsort(-prob_GTE[g, t])[:num_selected]
                e = best[s]
                total = prob_GTE[g, t, best].sum() if gate == "normalized" else 1.0
                assert plan.expert_GTS[g, t, s] == e
                assert plan.slot_GTS[g, t, s] == queue[e]
                np.testing.assert_allclose(
                    plan.gate_GTS[g, t, s], prob_GTE[g, t, e] / total, rtol=1e-5
                )
                queue[e] += 1
        assert plan.count_GE[g].tolist() == queue
    assert np.any(plan.is_routed_GTS & ~plan.is_kept_GTS)


def test_of_rows_no_choice_is_lost():
    """Rows are longer than the groups whose capacity there was."""
    logits_GTE = np.zeros((4, 4, E), np.float32)  # all ask for the first expert
    router = RouterConfig(overflow="dropless", jitter=0.0)
    plan = traced_plan(router, logits_GTE, np.ones((4, 4), bool), 4)
    rows = plan.of_rows(2, 8)
    assert np.all(rows.is_routed_GTS) and rows.count_GE.tolist() == [[8, 0, 0, 0, 0]] * 2
    assert rows.capacity >= 8


def test_what_is_placed_comes_back_in_the_old_order():
    gate_GT = jnp.array([[0.2, 0.9, 0.2, 0.5]])
    seen = []

    def place(expert_GTS):
        seen.append(expert_GTS[0, :, 0].tolist())
        return expert_GTS * 10, jnp.arange(4)[None]

    tens_GTS, place_GT = by_gate(gate_GT, place)(jnp.arange(4)[None, :, None])
    assert seen == [[1, 3, 0, 2]]  # ties keep their order
    assert tens_GTS[0, :, 0].tolist() == [0, 10, 20, 30]
    assert place_GT[0].tolist() == [2, 0, 3, 1]


def test_no_gradient_reaches_the_bias():
    logits_GTE, is_token_GT = inputs()
    router = RouterConfig(bias_update_rate=0.001)
    grad_E = jax.grad(
        lambda bias_E: jnp.sum(
            traced_plan(router, logits_GTE, is_token_GT, bias_E=bias_E).gate_GTS ** 2
        )
    )(jnp.zeros(E))
    assert not np.any(grad_E)


def test_sampled_experts_follow_the_softmax_and_are_gated_by_it(key):
    """With T draws of one distribution; temperature flattens the draw and not the gate."""
    logits_E = np.array([1.0, 0.0, -1.0, 2.0, 0.5])
    num = 20_000
    logits_GTE = np.broadcast_to(logits_E.astype(np.float32), (1, num, E))
    router = RouterConfig(exploration="sample", temperature=2.0)
    is_token_GT = np.ones((1, num), bool)
    plan = plan_of(router, logits_GTE, is_token_GT, num, key=key)
    # Five deviations of at most sqrt(0.25 / 20000).
    np.testing.assert_allclose(plan.count_GE[0] / num, softmax(logits_E / 2), atol=0.018)
    gates_T = softmax(logits_E)[np.asarray(plan.expert_GTS[0, :, 0])]
    np.testing.assert_allclose(plan.gate_GTS[0, :, 0], gates_T, rtol=1e-5)
    greedy = plan_of(router, logits_GTE, is_token_GT, num)
    assert greedy.count_GE[0].tolist() == [0, 0, 0, num, 0]


POLICIES = {
    "top1": RouterConfig(),
    "top2": RouterConfig(num_selected=2, gate="normalized"),
    "prioritized": RouterConfig(num_selected=2, priority="gate"),
    "reroute": RouterConfig(overflow="reroute", max_rounds=3),
    "reroute_prioritized": RouterConfig(overflow="reroute", max_rounds=3, priority="gate"),
    "expert_choice": RouterConfig(kind="expert_choice"),
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_policy_makes_a_sound_plan(name, seed):
    """Slots are given once and without gaps, and relabelled experts give the same plan."""
    logits_GTE, is_token_GT = inputs(seed)
    plan = plan_of(POLICIES[name], logits_GTE, is_token_GT)
    is_kept_GTS = np.asarray(plan.is_kept_GTS)
    position_GTS = np.asarray(plan.position_GTS)
    for g in range(G):
        taken = position_GTS[g][is_kept_GTS[g]]
        assert len(set(taken.tolist())) == len(taken)
        kept_E = np.bincount(taken // plan.capacity, minlength=E)
        for e in range(E):
            slots = sorted(taken[taken // plan.capacity == e] % plan.capacity)
            assert slots == list(range(kept_E[e]))
        if plan.expert_GTS.shape[-1] < E and "reroute" not in name:
            np.testing.assert_array_equal(kept_E, np.minimum(plan.count_GE[g], plan.capacity))
    assert not np.any(plan.is_routed_GTS[~np.asarray(is_token_GT)])
    assert not np.any(np.asarray(plan.gate_GTS)[~np.asarray(is_token_GT)])

    order_E = np.random.default_rng(seed).permutation(E)
    other = plan_of(POLICIES[name], logits_GTE[..., order_E], is_token_GT)
    for g, t in np.argwhere(is_token_GT):
        want = {(order_E[e], slot): gate for (e, slot), gate in fates(other, g, t).items()}
        # Sums over experts are of another order in the relabelled softmax.
        assert fates(plan, g, t) == pytest.approx(want, rel=1e-4)


def fates(plan, g, t):
    """`{(expert, slot): gate}` of a token's kept choices."""
    return {
        (int(plan.expert_GTS[g, t, s]), int(plan.slot_GTS[g, t, s])): float(
            plan.gate_GTS[g, t, s]
        )
        for s in np.flatnonzero(plan.is_kept_GTS[g, t])
    }


# Expert choice.

FEW = 15
route = jax.jit(route_by_experts, static_argnums=2)


def inputs_of_few():
    rng = np.random.default_rng(0)
    prob_GTE = softmax(rng.normal(size=(G, FEW, E)) * 2).astype(np.float32)
    is_token_GT = np.ones((G, FEW), bool)
    is_token_GT[1, 3:] = False  # three tokens, fewer than an expert has slots
    return prob_GTE, is_token_GT


def test_every_expert_takes_its_best_tokens():
    prob_GTE, is_token_GT = inputs_of_few()
    C = 4
    plan = jax.device_get(route(*inputs_of_few(), C))
    assert (plan.num_experts, plan.capacity) == (E, C)
    taken_GTE = np.zeros((G, FEW, E), bool)
    for g in range(G):
        tokens = np.flatnonzero(is_token_GT[g])
        for e in range(E):
            best = sorted(tokens, key=lambda t, g=g, e=e: -prob_GTE[g, t, e])[:C]
            taken_GTE[g, best, e] = True
            for slot, t in enumerate(best):
                assert plan.expert_GTS[g, t, e] == e
                assert plan.slot_GTS[g, t, e] == slot
                assert plan.gate_GTS[g, t, e] == prob_GTE[g, t, e]
            assert plan.count_GE[g, e] == len(best) == min(C, len(tokens))
    np.testing.assert_array_equal(plan.is_kept_GTS, taken_GTE)
    assert not np.any(np.asarray(plan.gate_GTS)[~taken_GTE])
    # Tokens of several experts and of none; the latter are asked for in the plan, once.
    assert taken_GTE[is_token_GT].sum(-1).max() > 1
    is_left_GT = is_token_GT & ~taken_GTE.any(-1)
    assert is_left_GT.any()
    is_dropped_GTS = np.asarray(plan.is_routed_GTS & ~plan.is_kept_GTS)
    np.testing.assert_array_equal(is_dropped_GTS.sum(-1), is_left_GT)
    for g, t, s in np.argwhere(is_dropped_GTS):
        assert s == np.argmax(prob_GTE[g, t])


def test_the_gradient_of_a_gate_is_that_of_its_probability():
    prob_GTE, is_token_GT = map(jnp.asarray, inputs_of_few())
    weight_GTE = np.random.default_rng(2).normal(size=prob_GTE.shape)

    def loss(prob_GTE):
        return jnp.sum(route(prob_GTE, is_token_GT, 4).gate_GTS * weight_GTE)

    is_kept_GTE = route(prob_GTE, is_token_GT, 4).is_kept_GTS
    want_GTE = np.where(is_kept_GTE, weight_GTE, 0)
    np.testing.assert_allclose(jax.grad(loss)(prob_GTE), want_GTE, rtol=1e-6)


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


def test_padding_and_places_beyond_the_capacity_have_no_slot_by_hand():
    plan = hand_plan()
    routed_TS = [[True, True]] * 4 + [[False, False]]
    np.testing.assert_array_equal(plan.is_routed_GTS[0], routed_TS)
    # Token 3's first choice is third in expert 0's queue, token 2's second one fourth.
    kept_TS = [[True, True], [True, True], [True, False], [False, True], [False, False]]
    np.testing.assert_array_equal(plan.is_kept_GTS[0], kept_TS)
    # expert * 2 + slot; 6, one past the last, for none.
    position_TS = [[0, 3], [1, 4], [2, 6], [6, 5], [6, 6]]
    np.testing.assert_array_equal(plan.position_GTS[0], position_TS)


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
    others_GTS = jnp.zeros_like(plan.expert_GTS)
    counted_GE = dataclasses.replace(plan, counted_GTS=others_GTS).counted_GE
    assert counted_GE.tolist() == [[others_GTS.size, 0, 0]]
