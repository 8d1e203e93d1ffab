# SPDX-License-Identifier: Apache-2.0
"""The router against loops, its gate against the softmax' derivative; exploration; the hash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import RouterConfig
from switchx.moe.balance_loss import balance_sums
from switchx.moe.router import (
    explored_inputs,
    hash_expert,
    hash_logits,
    router_logits,
    sampling_scores,
)
from switchx.moe.routing_plan import choose_experts, chosen_gates
from tests.moe.oracle import softmax
from tests.moe.plans import top1_plan

G, T, D, E = 2, 13, 5, 4


def inputs():
    rng = np.random.default_rng(0)
    x_GTD = rng.normal(size=(G, T, D)).astype(np.float32)
    w_router_DE = rng.normal(size=(D, E)).astype(np.float32)
    is_token_GT = np.ones((G, T), bool)
    is_token_GT[0, 4:7] = False
    return x_GTD, w_router_DE, is_token_GT


def test_logits_are_float32_products_of_bfloat16_activations():
    x_GTD, w_router_DE, _ = inputs()
    half_GTD = jnp.asarray(x_GTD, jnp.bfloat16)
    logits_GTE = router_logits(half_GTD, jnp.asarray(w_router_DE))
    assert logits_GTE.dtype == jnp.float32
    exact_GTE = np.asarray(half_GTD, np.float64) @ w_router_DE.astype(np.float64)
    # float32's precision, not bfloat16's 8e-3.
    np.testing.assert_allclose(logits_GTE, exact_GTE, rtol=1e-5, atol=1e-5)


def test_the_gate_is_the_probability_under_all_experts_and_has_its_gradient():
    """d p_e / d logit_j = p_e (1[e = j] - p_j): not zero, as a gate of 1 would have it."""
    logits_E = np.array([0.3, 1.2, -0.5, 0.9])

    def gate(logits_E):
        prob_GTE = jax.nn.softmax(logits_E)[None, None]
        return top1_plan(prob_GTE, jnp.ones((1, 1), bool), 1).gate_GTS[0, 0, 0]

    value, grad = jax.jit(jax.value_and_grad(gate))(jnp.asarray(logits_E, jnp.float32))
    p_E = softmax(logits_E)
    np.testing.assert_allclose(value, p_E[1], rtol=1e-6)
    np.testing.assert_allclose(grad, p_E[1] * (np.eye(4)[1] - p_E), rtol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_products_of_the_router_are_float32_everywhere(platform):
    """Forward and both gradients: accelerators multiply in bfloat16 or TF32 if not told."""

    def loss(x_GTD, w_router_DE):
        return jnp.sum(router_logits(x_GTD, w_router_DE) ** 2)

    x_GTD, w_router_DE, _ = map(jnp.asarray, inputs())
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x_GTD, w_router_DE)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all(line.count("HIGHEST") == 2 for line in products)


def test_the_balance_loss_has_no_product_that_an_accelerator_would_round():
    prob_GTE, is_token_GT = jnp.full((G, T, E), 1 / E), jnp.ones((G, T), bool)
    balance = jax.jit(
        jax.grad(lambda prob_GTE: balance_sums(prob_GTE, count_GE, is_token_GT)[0])
    )
    count_GE = jnp.ones((G, E))
    assert "dot_general" not in balance.lower(prob_GTE).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_routers_dtype_is_chosen(dtype):
    x_GTD, w_router_DE, _ = map(jnp.asarray, inputs())
    assert router_logits(x_GTD, w_router_DE, dtype=dtype).dtype == dtype


def test_ties_of_top_k_go_to_the_first_experts():
    prob_GTE = jnp.array([[[0.2, 0.4, 0.4], [1 / 3, 1 / 3, 1 / 3]]])
    assert choose_experts(prob_GTE, 2)[0].tolist() == [[1, 2], [0, 1]]


def test_gradients_of_normalized_gates_by_hand():
    """Of p_i / (p_i + p_j), the softmax over the two: g_i (1[i] - g_i) at i, 0 elsewhere."""
    logits_E = np.array([0.3, 1.2, -0.5, 0.9])

    def gates(logits_E):
        prob_GTE = jax.nn.softmax(logits_E)[None, None]
        return chosen_gates(prob_GTE, choose_experts(prob_GTE, 2), "normalized")[0, 0]

    logits_E = jnp.asarray(logits_E, jnp.float32)
    g_S = softmax(np.array([1.2, 0.9]))
    np.testing.assert_allclose(jax.jit(gates)(logits_E), g_S, rtol=1e-6)
    slope = g_S[0] * g_S[1]
    np.testing.assert_allclose(
        jax.jit(jax.jacrev(gates))(logits_E),
        [[0, slope, 0, -slope], [0, -slope, 0, slope]],
        atol=1e-7,
    )


def test_a_choice_of_no_expert_has_no_gate_and_no_gradient():
    prob_GTE = jnp.full((1, 1, E), 1 / E)
    nothing_GTS = jnp.full((1, 1, 2), E)
    for convention in ("softmax", "normalized"):
        value, grad = jax.jit(
            jax.value_and_grad(
                lambda prob_GTE, c=convention: jnp.sum(chosen_gates(prob_GTE, nothing_GTS, c))
            )
        )(prob_GTE)
        assert value == 0 and not np.any(grad)


def test_jitter_multiplies_within_its_bounds(key):
    x = np.linspace(0.5, 2.0, 20_000).astype(np.float32)
    factor = np.asarray(explored_inputs(RouterConfig(jitter=0.2), x, key=key)) / x
    assert factor.min() >= 0.8 - 1e-6 and factor.max() <= 1.2 + 1e-6
    # Uniform: deciles hold a tenth each, within five deviations of sqrt(0.09 / 20000).
    share, _ = np.histogram(factor, bins=10, range=(0.8, 1.2))
    np.testing.assert_allclose(share / x.size, 0.1, atol=5 * np.sqrt(0.09 / x.size))


def test_no_noise_without_a_key_or_a_width(key):
    x_GTD = jnp.ones((2, 3, 5))
    assert explored_inputs(RouterConfig(jitter=0.0), x_GTD, key=key) is x_GTD
    for exploration in ("none", "jitter", "sample", "dropout"):
        router = RouterConfig(exploration=exploration)
        assert explored_inputs(router, x_GTD, key=None) is x_GTD
    for exploration in ("none", "sample"):
        router = RouterConfig(exploration=exploration)
        assert explored_inputs(router, x_GTD, key=key) is x_GTD


def test_input_dropout_drops_its_rate_and_scales_the_rest(key):
    router = RouterConfig(exploration="dropout", input_dropout_rate=0.25)
    x_GTD = explored_inputs(router, jnp.ones((1, 100, 400)), key=key)
    values, counts = np.unique(x_GTD, return_counts=True)
    np.testing.assert_allclose(values, [0.0, 4 / 3], rtol=1e-6)
    # Five deviations of sqrt(0.25 * 0.75 / 40000).
    np.testing.assert_allclose(counts[0] / 40_000, 0.25, atol=0.011)


def test_the_two_largest_scores_are_draws_without_replacement(key):
    """P(i then j) = p_i p_j / (1 - p_i)."""
    logits_E = np.array([1.0, 0.0, -1.0])
    p_E = softmax(logits_E)
    scores_TE = sampling_scores(
        jnp.broadcast_to(jnp.asarray(logits_E), (20_000, 3)), 1.0, key=key
    )
    order_TS = np.argsort(-np.asarray(scores_TE), axis=-1)[:, :2]
    for i, j in ((0, 1), (1, 0), (2, 0), (1, 2)):
        share = np.mean((order_TS == [i, j]).all(-1))
        np.testing.assert_allclose(share, p_E[i] * p_E[j] / (1 - p_E[i]), atol=0.018)


def murmur3_finalizer(bits: int) -> int:
    """The 32-bit finalizer as Appleby published it, in whole numbers."""
    bits ^= bits >> 16
    bits = bits * 0x85EBCA6B % 2**32
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE35 % 2**32
    return bits ^ bits >> 16


@pytest.mark.parametrize("num_experts", [1, 7, 128])
def test_expert_is_the_hash_of_the_id(num_experts):
    tokens = np.array([0, 1, 2, 3, 1000, 32_127, 2**31 - 1], np.int32)
    want = [murmur3_finalizer(int(token)) % num_experts for token in tokens]
    assert hash_expert(jnp.asarray(tokens), num_experts).tolist() == want


def test_a_vocabulary_is_spread_evenly():
    """32,128 ids over 64 experts: 502 each, within five deviations of sqrt(502) = 22."""
    share = np.bincount(hash_expert(jnp.arange(32_128), 64), minlength=64)
    np.testing.assert_allclose(share, 502, atol=112)
    # So are the most frequent ones, which have the lowest ids.
    assert np.bincount(hash_expert(jnp.arange(256), 8), minlength=8).max() < 56


def test_probability_is_exactly_one():
    token_GT = jnp.array([[5, 9, 5]])
    logits_GTE = hash_logits(token_GT, 4)
    assert logits_GTE.dtype == jnp.float32
    want_GTE = np.eye(4)[np.asarray(hash_expert(token_GT, 4))]
    np.testing.assert_array_equal(jax.nn.softmax(logits_GTE, axis=-1), want_GTE)
    assert not np.any(jax.nn.logsumexp(logits_GTE, axis=-1))  # no z-loss
