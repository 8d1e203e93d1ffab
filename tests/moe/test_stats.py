# SPDX-License-Identifier: Apache-2.0
"""Routing statistics: entropies known in closed form, counts by a loop, sums that add up."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from switchx.models.config import RouterConfig
from switchx.moe.load_evenness import expected_drops
from switchx.moe.router import task_logits
from switchx.moe.routing_plan import choice_scores, make_plan
from switchx.moe.stats import Choices, join_stacks, measure_routing
from tests.compare import assert_close
from tests.moe.oracle import softmax
from tests.moe.plans import top1_plan

G, T, E, C = 2, 10, 4, 2
CHOOSING = RouterConfig(kind="expert_choice", exploration="none")


def inputs():
    rng = np.random.default_rng(0)
    logits_GTE = (rng.normal(size=(G, T, E)) * 2).astype(np.float32)
    is_token_GT = np.ones((G, T), bool)
    is_token_GT[1, 6:] = False
    return logits_GTE, is_token_GT


@jax.jit
def measure(logits_GTE, is_token_GT):
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    plan = top1_plan(prob_GTE, is_token_GT, C)
    return measure_routing(logits_GTE, prob_GTE, plan, is_token_GT)


def test_against_a_loop():
    logits_GTE, is_token_GT = inputs()
    entropy = gate = dropped = margin = 0.0
    load, prob = np.zeros(E), np.zeros(E)
    for g in range(G):
        queue = [0] * E
        for t in np.flatnonzero(is_token_GT[g]):
            p_E = softmax(logits_GTE[g, t].astype(np.float64))
            entropy -= sum(p * math.log(p) for p in p_E)
            gate += max(p_E)
            prob += p_E
            best, second = sorted(p_E)[:-3:-1]
            margin += best - second
            e = int(np.argmax(p_E))
            dropped += queue[e] >= C
            queue[e] += 1
        load += queue
    stats = measure(logits_GTE, is_token_GT)
    assert stats.tokens == 16
    np.testing.assert_array_equal(stats.load_E, load)
    assert stats.dropped == dropped > 0
    np.testing.assert_allclose(stats.entropy, entropy, rtol=1e-5)
    np.testing.assert_allclose(stats.gate, gate, rtol=1e-5)
    np.testing.assert_allclose(stats.mass, gate, rtol=1e-5)  # of one choice
    np.testing.assert_allclose(stats.margin, margin, rtol=1e-5)
    np.testing.assert_allclose(stats.prob_E, prob, rtol=1e-5)
    want = expected_drops(np.array([10, 6]), 1, E, C).sum()
    np.testing.assert_allclose(stats.expected_dropped, want, rtol=1e-6)
    assert stats.bias is None and stats.groups == G
    means = stats.means()
    np.testing.assert_allclose(means["load"], load / 16, rtol=1e-6)
    np.testing.assert_allclose(means["dropped"], dropped / 16, rtol=1e-6)
    np.testing.assert_allclose(means["entropy"], entropy / 16, rtol=1e-5)
    np.testing.assert_allclose(means["gate"], gate / 16, rtol=1e-5)
    told = scipy.stats.entropy(prob) - entropy / 16
    np.testing.assert_allclose(means["information"], told, rtol=1e-4)
    assert means["balance_loss"] == stats.balance / G
    assert means["router_z_loss"] == stats.router_z / 16


def test_two_choices_by_a_biased_score_against_a_loop():
    """Mass is of probabilities before they are normalized, margin of the biased scores."""
    logits_GTE, is_token_GT = inputs()
    bias_E = np.array([0.4, 0.0, -0.3, 0.1], np.float32)
    router = RouterConfig(
        num_selected=2, gate="normalized", bias_update_rate=0.1, exploration="none"
    )

    @jax.jit
    def measure(logits_GTE):
        prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
        arrays = logits_GTE, prob_GTE
        plan = make_plan(router, *arrays, is_token_GT, C, bias_E=bias_E)
        score_GTE = choice_scores(router, *arrays, bias_E=bias_E)
        options = {"score_GTE": score_GTE, "bias_E": bias_E}
        return measure_routing(*arrays, plan, is_token_GT, router, **options), plan

    stats, plan = measure(logits_GTE)
    mass = margin = 0.0
    for g, t in zip(*np.nonzero(is_token_GT), strict=True):
        p_E = softmax(logits_GTE[g, t].astype(np.float64))
        order = np.argsort(-(p_E + bias_E))
        assert set(order[:2]) == set(np.asarray(plan.expert_GTS[g, t]))
        mass += p_E[order[:2]].sum()
        margin += (p_E + bias_E)[order[1]] - (p_E + bias_E)[order[2]]
    np.testing.assert_allclose(stats.mass, mass, rtol=1e-5)
    np.testing.assert_allclose(stats.margin, margin, rtol=1e-5)
    means = stats.means()
    np.testing.assert_allclose(means["bias"], bias_E.mean(), rtol=1e-6)
    np.testing.assert_allclose(means["gate_mass"], mass / 16, rtol=1e-5)


def test_a_token_that_chooses_all_experts_has_no_margin():
    logits_GTE, is_token_GT = inputs()
    router = RouterConfig(num_selected=E, exploration="none")
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    plan = make_plan(router, logits_GTE, prob_GTE, is_token_GT, T)
    stats = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT, router)
    assert stats.margin == 0 and stats.expected_dropped == 0
    np.testing.assert_allclose(stats.mass, 16, rtol=1e-6)


@pytest.mark.parametrize("router", [RouterConfig(kind="hash", exploration="none"), CHOOSING])
def test_what_a_router_does_not_have_is_left_out(router):
    logits_GTE, is_token_GT = inputs()
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    plan = make_plan(router, logits_GTE, prob_GTE, is_token_GT, C)
    stats = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT, router)
    assert stats.mass is stats.margin is stats.bias is None
    assert (stats.expected_dropped is None) == (router.kind == "expert_choice")
    left_out = {"gate_mass", "margin", "bias"}
    left_out |= {"expected_dropped"} if router.kind == "expert_choice" else set()
    full = {"load", "dropped", "entropy", "gate", "information", "balance_loss"}
    assert not left_out & stats.means().keys() and full <= stats.means().keys()


def test_what_asked_of_experts_that_choose_by_a_loop():
    """Each takes its best tokens; whom none takes has asked one expert, and was dropped."""
    logits_GTE, is_token_GT = inputs()
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    plan = make_plan(CHOOSING, logits_GTE, prob_GTE, is_token_GT, C)
    stats = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT, CHOOSING)
    taken = refused = 0
    for g in range(G):
        places = np.flatnonzero(is_token_GT[g])
        found = [p for p_T in prob_GTE[g, places].T for p in places[np.argsort(-p_T)[:C]]]
        taken, refused = taken + len(found), refused + len({*places} - {*found})
    assert refused > 0 and (stats.asked, stats.dropped) == (taken + refused, refused)
    assert stats.load_E.sum() == taken and stats.means()["asked"] == (taken + refused) / 16
    assert measure(logits_GTE, is_token_GT).asked is None


@pytest.mark.parametrize("scale", [1e-6, 2.0])
def test_information_is_not_that_of_tasks(scale):
    router = RouterConfig(kind="task", num_tasks=2, exploration="none")
    logits_GTE, is_token_GT = inputs()
    task_GT = np.arange(G * T, dtype=np.int32).reshape(G, T) % 3 // 2
    logits_GTE = task_logits(jnp.asarray(logits_GTE * scale), task_GT, 2)
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    plan = make_plan(router, logits_GTE, prob_GTE, is_token_GT, C)
    stats = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT, router)
    want = 0.0
    for u in range(2):
        p_TW = np.asarray(prob_GTE, np.float64)[is_token_GT & (task_GT == u), 2 * u : 2 * u + 2]
        told = scipy.stats.entropy(p_TW.mean(axis=0)) - scipy.stats.entropy(p_TW.T).mean()
        want += told * len(p_TW) / 16
    np.testing.assert_allclose(stats.means()["information"], want, atol=1e-6)


def test_entropy_of_a_certain_router_is_zero():
    logits_GTE = np.zeros((1, T, E), np.float32)
    logits_GTE[..., 2] = 200.0  # the others' probabilities are 0 in float32
    stats = measure(logits_GTE, np.ones((1, T), bool))
    assert stats.entropy == stats.means()["information"] == 0.0
    np.testing.assert_allclose(stats.means()["gate"], 1.0)


def test_a_batch_of_padding_is_finite():
    logits_GTE, _ = inputs()
    stats = measure(logits_GTE, np.zeros((G, T), bool))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(stats.means()))


def test_sums_of_parts_are_the_sums_of_the_whole():
    """What lets microbatches, stages and devices be added up, the losses among them."""
    logits_GTE, is_token_GT = inputs()
    whole = measure(logits_GTE, is_token_GT)
    parts = [measure(logits_GTE[g : g + 1], is_token_GT[g : g + 1]) for g in range(G)]
    parts.append(measure(logits_GTE[:1], np.zeros((1, T), bool)))  # a group of padding
    total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    assert_close(total, whole, rtol=1e-6)
    np.testing.assert_allclose(total.balance_loss, whole.balance_loss, rtol=1e-6)
    np.testing.assert_allclose(total.router_z_loss, whole.router_z_loss, rtol=1e-6)


def test_only_the_losses_carry_gradients():
    gradients = jax.jit(jax.jacrev(measure))(*inputs())
    names = "entropy gate dropped tokens groups load_E prob_E mass margin expected_dropped"
    for name in names.split():
        assert not np.any(getattr(gradients, name)), name
    for name in ("balance", "router_z"):
        assert np.abs(getattr(gradients, name)).max() > 1e-3, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_statistics_are_float32(dtype):
    logits_GTE, is_token_GT = inputs()
    stats = measure(logits_GTE.astype(dtype), is_token_GT)
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype("float32")}


def test_means_of_stacked_layers():
    logits_GTE, is_token_GT = inputs()
    layers = [measure(logits_GTE, is_token_GT), measure(logits_GTE[:1], is_token_GT[:1])]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    means = stacked.means()
    assert means["load"].shape == (2, E)
    for n, layer in enumerate(layers):
        for name, mean in layer.means().items():
            np.testing.assert_allclose(means[name][n], mean, rtol=1e-6, err_msg=name)


def test_choices_are_joined_by_stack_and_not_summed():
    """Layers of an encoder and a decoder have other tokens: these cannot be concatenated."""
    logits_GTE, is_token_GT = inputs()
    layer = jax.tree.map(lambda leaf: leaf[None], measure(logits_GTE, is_token_GT))
    encoder, decoder = (
        dataclasses.replace(
            layer, choices=(Choices(jnp.full((1, 2, length, 1), e), *[None] * 5),)
        )
        for e, length in ((0, 5), (1, 3))
    )
    joined = join_stacks(encoder, decoder)
    assert joined.load_E.shape == (2, E) and joined.tokens.tolist() == [16, 16]
    assert [stack.expert_BLS.shape for stack in joined.choices] == [(1, 2, 5, 1), (1, 2, 3, 1)]
    assert joined.summed.choices == () and joined.summed.tokens.tolist() == [16, 16]
    assert join_stacks(None, None) is None and join_stacks(None, decoder) is decoder
