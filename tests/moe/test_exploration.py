# SPDX-License-Identifier: Apache-2.0
"""Exploration: the noise' bounds and distributions, and where there is none."""

import jax.numpy as jnp
import numpy as np

from switchx.models.config import RouterConfig
from switchx.moe.router import explored_inputs, sampling_scores
from tests.moe.oracle import softmax


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


def test_largest_scores_are_draws_from_the_softmax_with_temperature(key):
    logits_E = np.array([1.0, 0.0, -1.0, 2.0])
    for temperature in (1.0, 3.0):
        scores_GTE = sampling_scores(
            jnp.broadcast_to(jnp.asarray(logits_E), (1, 20_000, 4)), temperature, key=key
        )
        share = np.bincount(np.argmax(scores_GTE[0], axis=-1), minlength=4) / 20_000
        # Five deviations of at most sqrt(0.25 / 20000).
        np.testing.assert_allclose(share, softmax(logits_E / temperature), atol=0.018)


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
