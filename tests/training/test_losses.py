# SPDX-License-Identifier: Apache-2.0
"""The training loss against a float64 NumPy loop over tokens, and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.stats import RoutingStats
from switchx.training.losses import (
    LossConfig,
    LossDenominators,
    TokenSums,
    cross_entropy,
    loss_denominators,
    loss_terms,
)
from tests.compare import slopes
from tests.training.jobs import DENSE, SPARSE, make_batch, with_padded_rows, with_switch

B, L, V = 2, 5, 7
PLAIN = LossConfig(layer_reduction="mean", z_loss=0.0)
CONFIGS = {
    "plain": PLAIN,
    "z-loss": dataclasses.replace(PLAIN, z_loss=0.3),
    "smoothing": dataclasses.replace(PLAIN, label_smoothing=0.2),
    "both": dataclasses.replace(PLAIN, z_loss=0.3, label_smoothing=0.2),
}


def inputs():
    rng = np.random.default_rng(0)
    logits_BLV = rng.normal(size=(B, L, V)) * 2
    weights_BL = np.array([[1, 1, 1, 0, 0], [1, 0.5, 2, 1, 0]])
    return logits_BLV, rng.integers(0, V, (B, L)), weights_BL


def loop(logits_BLV, targets_BL, weights_BL, z_loss, smoothing) -> dict[str, float]:
    """Kullback-Leibler divergence from the smoothed target, one token after another."""
    sums = dict.fromkeys(("loss", "nll", "correct", "tokens"), 0.0)
    for b in range(B):
        for t in range(L):
            logits_V, target, weight = logits_BLV[b, t], targets_BL[b, t], weights_BL[b, t]
            z = np.sum(np.exp(logits_V))
            loss = z_loss * np.log(z) ** 2
            for v in range(V):
                wanted = 1 - smoothing if v == target else smoothing / (V - 1)
                if wanted > 0:
                    loss += wanted * (np.log(wanted) - np.log(np.exp(logits_V[v]) / z))
            sums["loss"] += weight * loss
            sums["nll"] -= weight * np.log(np.exp(logits_V[target]) / z)
            sums["correct"] += weight * (np.argmax(logits_V) == target)
            sums["tokens"] += weight
    return sums


@pytest.mark.parametrize("name", CONFIGS)
def test_cross_entropy_equals_a_loop_over_tokens(name):
    config = CONFIGS[name]
    logits_BLV, targets_BL, weights_BL = inputs()
    logits_BLV[1, 0, targets_BL[1, 0]] = 9.0  # one that is right
    want = loop(logits_BLV, targets_BL, weights_BL, config.z_loss, config.label_smoothing)
    assert want["correct"] > 0
    got = cross_entropy(
        jnp.asarray(logits_BLV, jnp.float32),
        jnp.asarray(targets_BL),
        jnp.asarray(weights_BL, jnp.float32),
        config,
    )
    assert got.soft_loss is None
    for name in want:
        np.testing.assert_allclose(getattr(got, name), want[name], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_equals_finite_differences(name):
    config = CONFIGS[name]
    logits_BLV, targets_BL, weights_BL = inputs()
    got_BLV = jax.grad(
        lambda x: (
            cross_entropy(
                x, jnp.asarray(targets_BL), jnp.asarray(weights_BL, jnp.float32), config
            ).loss
        )
    )(jnp.asarray(logits_BLV, jnp.float32))
    fixed = targets_BL, weights_BL, config.z_loss, config.label_smoothing
    want_BLV = slopes(lambda x_BLV: loop(x_BLV, *fixed)["loss"], logits_BLV)
    np.testing.assert_allclose(got_BLV, want_BLV, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got_BLV[0, 3:], 0)  # no weight, no gradient


def test_of_equal_logits_the_first_is_predicted():
    """As by `numpy.argmax`, also among some of the tokens; a NaN predicts nothing right."""
    rng = np.random.default_rng(0)
    targets_BL = rng.integers(0, V, (B, 200)).astype(np.int32)
    weights_BL = np.ones_like(targets_BL)
    for logits_BLV in (np.zeros((B, 200, V)), rng.integers(0, 3, (B, 200, V))):
        sums = cross_entropy(jnp.asarray(logits_BLV), targets_BL, weights_BL, PLAIN)
        assert sums.correct == np.sum(np.argmax(logits_BLV, axis=-1) == targets_BL)
    sums = cross_entropy(jnp.full((B, 200, V), jnp.nan), targets_BL, weights_BL, PLAIN)
    assert sums.correct == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_logits_stay_finite_and_sums_are_float32(dtype):
    logits_BLV = jnp.asarray([[[3e4, -3e4, 0.0]]], dtype)
    config = dataclasses.replace(PLAIN, label_smoothing=0.1)
    sums = cross_entropy(logits_BLV, jnp.asarray([[0]]), jnp.ones((1, 1)), config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(sums))
    gaps = float(logits_BLV[0, 0, 0] - logits_BLV[0, 0, 1].astype(jnp.float32)), 3e4
    entropy = -0.9 * np.log(0.9) - 0.1 * np.log(0.05)
    np.testing.assert_allclose(sums.loss, 0.05 * sum(gaps) - entropy, rtol=5e-3)
    assert float(sums.nll) == 0 and float(sums.correct) == 1


MODEL = dataclasses.replace(with_switch(SPARSE, every=1), num_decoder_layers=4)


def routing() -> tuple[RoutingStats, LossDenominators]:
    """Of four layers: balance 2 * 1, .., 4 over 2 groups, z 5 * 1, .., 16 over 5 tokens."""
    values_N = jnp.arange(1.0, 5.0)
    stats = RoutingStats(
        **dict.fromkeys(("tokens", "groups", "dropped", "entropy", "gate"), values_N),
        balance=2 * values_N,
        router_z=5 * values_N**2,
        load_E=jnp.ones((4, 4)),
    )
    counts = {"decoder": jnp.float32(5)}, {"decoder": jnp.float32(2)}
    return stats, LossDenominators(jnp.float32(10), *counts)


def test_auxiliary_losses_of_four_layers_by_hand():
    stats, denominators = routing()
    # balance 1 + 2 + 3 + 4 = 10, z 1 + 4 + 9 + 16 = 30
    config = LossConfig(layer_reduction="sum", balance_weight=0.01, router_z_weight=0.001)
    total = loss_terms(config, MODEL, denominators, None, stats)
    np.testing.assert_allclose(total, 0.1 + 0.03, rtol=1e-6)
    mean = dataclasses.replace(config, layer_reduction="mean")
    np.testing.assert_allclose(
        loss_terms(mean, MODEL, denominators, None, stats), total / 4, rtol=1e-6
    )
    parts = [jax.tree.map(lambda leaf, n=n: leaf[n : n + 2], stats) for n in (0, 2)]
    for each in (config, mean):
        apart = [loss_terms(each, MODEL, denominators, None, p, stack="decoder") for p in parts]
        np.testing.assert_allclose(
            sum(apart), loss_terms(each, MODEL, denominators, None, stats), rtol=1e-6
        )


def test_a_dense_model_has_no_auxiliary_loss():
    sums = TokenSums(*map(jnp.float32, (20.0, 19.0, 1.0, 10.0)))
    config = LossConfig(layer_reduction="mean", balance_weight=1.0)
    assert loss_terms(config, DENSE, routing()[1], sums, None) == 2.0


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("padding", "groups"), [("ignored", 3), ("counted", 6)])
def test_denominators_count_groups_that_have_tokens_by_hand(num_microbatches, padding, groups):
    """Rows of 8 tokens in groups of 8; three of six rows are padding."""
    router = dataclasses.replace(SPARSE.switch.router, padding=padding)
    config = with_switch(SPARSE, router=router)
    batch = with_padded_rows(make_batch(config, 6), 0, 1, 5)
    found = loss_denominators(config, batch, num_microbatches)
    assert found.groups == {"decoder": groups}
    real = np.count_nonzero(batch["decoder_segment_ids"])
    assert found.tokens == {"decoder": real if padding == "ignored" else 48}
    assert found.target_tokens == batch["decoder_loss_weights"].sum()
