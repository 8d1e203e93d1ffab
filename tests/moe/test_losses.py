# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses against loops over groups, tokens and experts, and gradients by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import RouterConfig
from switchx.moe.balance_loss import balance_sums
from switchx.moe.routing_plan import make_plan
from switchx.moe.stats import measure_routing
from tests.moe.oracle import softmax
from tests.moe.plans import top1_plan

G, T, E = 4, 9, 5


@functools.partial(jax.jit, static_argnames="scope")
def balance_loss(*arrays, scope="group"):
    balance, groups = balance_sums(*arrays, scope=scope)
    return balance / jnp.maximum(groups, 1)


@jax.jit
def router_z_loss(logits_GTE, is_token_GT):
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    plan = top1_plan(prob_GTE, is_token_GT, logits_GTE.shape[1])
    return measure_routing(logits_GTE, prob_GTE, plan, is_token_GT).router_z_loss


def inputs():
    """Four groups: full, with padding inside, with one token, empty."""
    rng = np.random.default_rng(0)
    logits_GTE = rng.normal(size=(G, T, E)) * 2
    is_token_GT = np.ones((G, T), bool)
    is_token_GT[1, [0, 3, 8]] = False
    is_token_GT[2] = np.arange(T) == 5
    is_token_GT[3] = False
    prob_GTE = softmax(logits_GTE)
    count_GE = np.zeros((G, E), np.int32)
    for g, t in np.argwhere(is_token_GT):
        count_GE[g, np.argmax(prob_GTE[g, t])] += 1
    return logits_GTE, prob_GTE, count_GE, is_token_GT


def run_balance(prob_GTE, count_GE, is_token_GT):
    return balance_loss(
        jnp.asarray(prob_GTE, jnp.float32), jnp.asarray(count_GE), jnp.asarray(is_token_GT)
    )


def balance_loop(prob_GTE, is_token_GT):
    """Eq. 4-6, counting the choices themselves; a group without tokens does not count."""
    losses = []
    for prob_TE, is_token_T in zip(prob_GTE, is_token_GT, strict=True):
        tokens = [
            prob_E for prob_E, is_token in zip(prob_TE, is_token_T, strict=True) if is_token
        ]
        if not tokens:
            continue
        loss = 0.0
        for e in range(E):
            f = sum(np.argmax(prob_E) == e for prob_E in tokens) / len(tokens)
            p = sum(prob_E[e] for prob_E in tokens) / len(tokens)
            loss += f * p
        losses.append(E * loss)
    return sum(losses) / len(losses)


def test_balance_loss_equals_a_loop():
    _, prob_GTE, count_GE, is_token_GT = inputs()
    for groups in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 4)):
        got = run_balance(prob_GTE[groups], count_GE[groups], is_token_GT[groups])
        expected = balance_loop(prob_GTE[groups], is_token_GT[groups])
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_balance_loss_of_experts_divided_among_tasks_by_hand():
    """Each task's own loss, weighted by its tokens; balanced tasks give 1, whoever is there."""
    half_E, sure_E = np.repeat([0.5, 0.0], 2), np.eye(4)[3]
    tokens_GT = np.ones((1, 4), bool)
    for prob_TE, count_E, expected in (
        ([half_E] * 4, [2, 2, 0, 0], 1.0),
        ([half_E] * 2 + [half_E[::-1]] * 2, [1, 1, 1, 1], 1.0),
        ([half_E] * 2 + [sure_E] * 2, [1, 1, 0, 2], 0.5 * 1.0 + 0.5 * 2.0),
        ([half_E] + [sure_E] * 3, [1, 0, 0, 3], 0.25 * 1.0 + 0.75 * 2.0),
    ):
        got, _ = balance_sums(
            jnp.asarray([prob_TE]), jnp.asarray([count_E]), tokens_GT, num_tasks=2
        )
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_all_scopes_weigh_tasks_alike():
    """A group of one sequence, and a batch of which each task has a part, in parts or whole."""
    rng = np.random.default_rng(0)
    task_B, (B, L, E, U) = np.array([0, 1, 1]), (3, 5, 4, 2)
    is_own_BE = np.repeat(np.eye(U)[task_B], E // U, axis=1) > 0
    prob_BLE = np.where(is_own_BE[:, None], rng.uniform(0.1, 1, (B, L, E)), 0)
    prob_BLE = jnp.float32(prob_BLE / prob_BLE.sum(-1, keepdims=True))
    router = {"num_tasks": U, "jitter": 0.0}
    every = jnp.ones((B, L), bool)

    def measured(rows=slice(None), load_E=None, segment_BL=None, **changes):
        prob, is_token = prob_BLE[rows], every[rows]
        own = RouterConfig("task", **router | changes)
        plan = make_plan(own, jnp.log(prob + 1e-9), prob, is_token, capacity=L)
        options = {"load_E": load_E, "segment_BL": segment_BL}
        return measure_routing(jnp.log(prob + 1e-9), prob, plan, is_token, own, **options)

    by_group = measured()
    by_sequence = measured(segment_BL=every.astype(int), balance_scope="sequence")
    assert by_sequence.balance_loss == pytest.approx(float(by_group.balance_loss), rel=1e-6)
    whole = measured(balance_scope="batch")
    share_E = whole.counted_E / jnp.sum(whole.counted_E)
    parts = [measured(slice(b, b + 1), balance_scope="batch") for b in range(B)]
    parts = [each.with_load(share_E, B * L).balance for each in parts]
    assert float(sum(parts)) == pytest.approx(float(whole.balance_loss), rel=1e-6)
    before = {"balance_scope": "batch", "balance_load": "previous_step"}
    same = measured(load_E=share_E, **before).balance_loss
    assert same == pytest.approx(float(whole.balance_loss), rel=1e-6)


def test_only_the_probabilities_of_tokens_have_a_gradient():
    """d loss / d p_gte = E f_ge / T_g / (groups with tokens), for tokens alone."""
    _, prob_GTE, count_GE, is_token_GT = inputs()
    grad_GTE = jax.jit(jax.grad(run_balance))(np.float32(prob_GTE), count_GE, is_token_GT)
    expected_GTE = np.zeros((G, T, E))
    for g, t in np.argwhere(is_token_GT):
        tokens = is_token_GT[g].sum()
        expected_GTE[g, t] = E * count_GE[g] / tokens / tokens / 3
    np.testing.assert_allclose(grad_GTE, expected_GTE, rtol=1e-5, atol=1e-8)
    grad_GE = jax.jit(jax.grad(run_balance, argnums=1))(
        np.float32(prob_GTE), np.float32(count_GE), is_token_GT
    )
    assert not np.any(grad_GE)


def test_z_loss_equals_a_loop():
    logits_GTE, _, _, is_token_GT = inputs()
    squares = [
        math.log(sum(math.exp(logit) for logit in logits_GTE[g, t])) ** 2
        for g, t in np.argwhere(is_token_GT)
    ]
    got = router_z_loss(jnp.asarray(logits_GTE, jnp.float32), jnp.asarray(is_token_GT))
    np.testing.assert_allclose(got, sum(squares) / len(squares), rtol=1e-5)


def test_z_loss_by_hand():
    # Four logits of ln 2: ln(4 * 2) = ln 8; squared 4.32408.
    logits_GTE = jnp.full((1, 3, 4), math.log(2.0))
    got = router_z_loss(logits_GTE, jnp.ones((1, 3), bool))
    np.testing.assert_allclose(got, math.log(8) ** 2, rtol=1e-6)
    # d z^2 / d logit = 2 z softmax / T = 2 ln 8 / 4 / 3.
    grad = jax.jit(jax.grad(router_z_loss))(logits_GTE, jnp.ones((1, 3), bool))
    np.testing.assert_allclose(grad, 2 * math.log(8) / 12, rtol=1e-5)


def test_z_loss_of_large_logits_is_finite():
    logits_GTE = jnp.array([[[300.0, -300.0, 0.0]]])
    got, grad = jax.jit(jax.value_and_grad(router_z_loss))(logits_GTE, jnp.ones((1, 1), bool))
    np.testing.assert_allclose(got, 90_000.0, rtol=1e-6)
    assert np.all(np.isfinite(grad))


@pytest.mark.parametrize("loss", ["balance", "z"])
def test_a_batch_of_nothing_but_padding_is_zero(loss):
    logits_GTE, prob_GTE, _, _ = inputs()
    is_token_GT = jnp.zeros((G, T), bool)

    def of(x_GTE):
        if loss == "z":
            return router_z_loss(x_GTE, is_token_GT)
        return balance_loss(x_GTE, jnp.zeros((G, E), jnp.int32), is_token_GT)

    x_GTE = jnp.asarray(logits_GTE if loss == "z" else prob_GTE, jnp.float32)
    value, grad = jax.jit(jax.value_and_grad(of))(x_GTE)
    assert value == 0.0
    assert not np.any(grad)


def test_balance_loss_of_the_batch_is_that_of_one_group():
    _, prob_GTE, count_GE, is_token_GT = inputs()
    prob_GTE, is_token_GT = jnp.asarray(prob_GTE, jnp.float32), jnp.asarray(is_token_GT)
    got = balance_loss(prob_GTE, jnp.asarray(count_GE), is_token_GT, scope="batch")
    whole = inputs()
    want = balance_loop(whole[1].reshape(1, -1, E), whole[3].reshape(1, -1))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    apart = run_balance(prob_GTE, count_GE, is_token_GT)
    assert abs(float(got) - float(apart)) > 0.05


def test_balance_loss_of_top_2_is_1_when_uniform():
    prob_GTE, is_token_GT = jnp.full((1, 6, 3), 1 / 3), jnp.ones((1, 6), bool)
    got = balance_loss(prob_GTE, jnp.array([[4, 4, 4]]), is_token_GT)
    np.testing.assert_allclose(got, 1.0, rtol=1e-6)
