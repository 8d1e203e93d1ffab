# SPDX-License-Identifier: Apache-2.0
"""No-Token-Left-Behind against Mesh-TensorFlow's rule, written as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import RouterConfig
from switchx.moe.balance_loss import balance_sums
from switchx.moe.routing_plan import make_plan
from tests.moe.oracle import softmax
from tests.moe.plans import plan_of

G, T, E = 2, 24, 6


def ntlb_loop(prob_TE, is_token_T, rounds: int, capacity: int):
    """`_ntlb_gating` of Mesh-TensorFlow, one token after the other.

    Each round looks at the tokens that are not routed yet, in their order, and at their next
    best expert; a running count of each expert admits them up to its capacity. The gate is
    the probability of the expert reached, not normalized.

    Returns:
        (expert, place, gate) of each token, None for one that was left behind.
    """
    routed, count = [None] * len(prob_TE), [0] * prob_TE.shape[1]
    for i in range(rounds):
        for t in np.flatnonzero(is_token_T):
            if routed[t] is not None:
                continue
            e = int(np.argsort(-prob_TE[t], kind="stable")[i])
            if count[e] + 1 <= capacity:
                count[e] += 1
                routed[t] = e, count[e] - 1, prob_TE[t, e]
    return routed


def inputs(seed=0, slope=1.5):
    """Probabilities that favour the first experts, so that those overflow."""
    rng = np.random.default_rng(seed)
    logits_GTE = rng.normal(size=(G, T, E)) - slope * np.arange(E) / 2
    return logits_GTE.astype(np.float32), rng.random((G, T)) < 0.85


def rerouted_plan(logits_GTE, is_token_GT, rounds, capacity, **changes):
    router = RouterConfig(overflow="reroute", max_rounds=rounds, **changes)
    return plan_of(router, logits_GTE, is_token_GT, capacity)


@pytest.mark.parametrize("rounds", [1, 2, E])
@pytest.mark.parametrize("capacity", [1, 4])
def test_plan_equals_mesh_tensorflows_rule(rounds, capacity):
    logits_GTE, is_token_GT = inputs()
    prob_GTE = softmax(logits_GTE.astype(np.float64))
    plan = rerouted_plan(logits_GTE, is_token_GT, rounds, capacity)
    assert plan.expert_GTS.shape == (G, T, 1)
    rerouted = left = 0
    for g in range(G):
        routed = ntlb_loop(prob_GTE[g], is_token_GT[g], rounds, capacity)
        for t, want in enumerate(routed):
            first = int(np.argmax(prob_GTE[g, t]))
            if not is_token_GT[g, t]:
                assert plan.expert_GTS[g, t, 0] == E and plan.gate_GTS[g, t, 0] == 0
            elif want is None:
                # It asked for its first expert and was dropped.
                assert plan.expert_GTS[g, t, 0] == first and not plan.is_kept_GTS[g, t, 0]
                left += 1
            else:
                expert, place, gate = want
                assert plan.is_kept_GTS[g, t, 0]
                assert (plan.expert_GTS[g, t, 0], plan.slot_GTS[g, t, 0]) == (expert, place)
                np.testing.assert_allclose(plan.gate_GTS[g, t, 0], gate, rtol=1e-5)
                rerouted += expert != first
    assert rerouted == 0 if rounds == 1 else rerouted > 0 or capacity == 1
    # Six experts with four slots have room for all of at most 24 tokens.
    assert (left == 0) == (capacity == 4 and rounds == E)


@pytest.mark.parametrize("counts", ["first_choice", "all_rounds"])
def test_balance_loss_counts_first_choices_or_every_rounds(counts):
    """Mesh-TensorFlow averages the one-hots of all four; ours, by default, counts Switch's."""
    logits_GTE, is_token_GT = inputs()
    plan = rerouted_plan(logits_GTE, is_token_GT, 4, 3, balance_counts=counts)
    prob_GTE = softmax(logits_GTE.astype(np.float64))
    losses = []
    for g in range(G):
        tokens = np.flatnonzero(is_token_GT[g])
        rounds = 4 if counts == "all_rounds" else 1
        best_TS = np.argsort(-prob_GTE[g, tokens], axis=-1)[:, :rounds]
        density_E = np.mean([np.mean(best_TS == e, axis=0) for e in range(E)], axis=-1)
        losses.append(E * np.sum(density_E * prob_GTE[g, tokens].mean(0)))
        # Load is what was asked for first, whatever the loss counts.
        firsts = np.bincount(np.argmax(prob_GTE[g, tokens], axis=-1), minlength=E)
        assert plan.count_GE[g].tolist() == firsts.tolist()
    got, _ = balance_sums(
        jnp.asarray(prob_GTE, jnp.float32), plan.counted_GE, jnp.asarray(is_token_GT)
    )
    np.testing.assert_allclose(got, np.sum(losses), rtol=1e-5)


def test_the_surest_tokens_are_the_first_of_every_round():
    logits_GTE, is_token_GT = inputs(5)
    prob_GTE = softmax(logits_GTE.astype(np.float64))
    plan = rerouted_plan(logits_GTE, is_token_GT, 3, 2, priority="gate")
    for g in range(G):
        order = np.argsort(-prob_GTE[g].max(-1), kind="stable")
        routed = ntlb_loop(prob_GTE[g][order], is_token_GT[g][order], 3, 2)
        for t, want in zip(order, routed, strict=True):
            assert bool(plan.is_kept_GTS[g, t, 0]) == (want is not None)
            if want is not None:
                got = plan.expert_GTS[g, t, 0], plan.slot_GTS[g, t, 0]
                assert got == want[:2]


def test_gradient_of_a_rerouted_gate_is_that_of_the_expert_reached():
    logits_GTE = jnp.array([[[2.0, 1.0, 0.0], [2.0, 0.5, 1.0]]])

    def gate(logits_GTE):
        router = RouterConfig(overflow="reroute", max_rounds=2)
        prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
        plan = make_plan(router, logits_GTE, prob_GTE, jnp.ones((1, 2), bool), 1)
        return plan.gate_GTS[0, 1, 0]

    p_E = softmax(np.array([2.0, 0.5, 1.0]))
    grad_GTE = jax.jit(jax.grad(gate))(logits_GTE)
    np.testing.assert_allclose(grad_GTE[0, 1], p_E[2] * (np.eye(3)[2] - p_E), rtol=1e-5)
    assert not np.any(grad_GTE[0, 0])
