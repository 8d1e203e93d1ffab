# SPDX-License-Identifier: Apache-2.0
"""Truncated normals: their standard deviation and where they are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.dense import truncated_normal, weight
from switchx.models.config import ModelConfig, Precision


def truncated_stddev(cut: float) -> float:
    """Standard deviation of a standard normal cut at +-`cut`, by summing its density."""
    x = np.linspace(-cut, cut, 200_001)
    density = np.exp(-(x**2) / 2)
    return float(np.sqrt(np.sum(x**2 * density) / np.sum(density)))


@pytest.mark.parametrize(("fan_in", "scale"), [(64, 1.0), (64, 0.1), (1024, 0.1)])
def test_standard_deviation_is_that_of_the_paper(fan_in, scale, key):
    """Section 2.4: sqrt(s / n), of what is drawn and not of the normal before the cut."""
    n = 100_000
    w = np.asarray(truncated_normal(key, (n,), fan_in=fan_in, scale=scale, dtype=jnp.float32))
    stddev = np.sqrt(scale / fan_in)
    # The estimate's own deviation is below stddev / sqrt(2 n): a cut normal has thin tails.
    np.testing.assert_allclose(w.std(), stddev, rtol=5 / np.sqrt(2 * n))
    assert abs(w.mean()) < 5 * stddev / np.sqrt(n)


def test_cut_at_two_standard_deviations(key):
    w = np.asarray(truncated_normal(key, (100_000,), fan_in=1, scale=1.0, dtype=jnp.float32))
    # Two deviations of the normal before the cut, whose width is 1 / 0.8796.
    bound = 2 / truncated_stddev(2.0)
    assert np.abs(w).max() <= bound * (1 + 1e-6)
    # A normal has 0.1% of its mass between 1.99 and 2: the cut is there and not before.
    assert np.abs(w).max() > 0.995 * bound
    # Density at 0 over density at the cut is e^2 = 7.4; no clipping piles mass up there.
    at_cut = np.mean(np.abs(w) > 0.95 * bound)
    at_zero = np.mean(np.abs(w) < 0.05 * bound)
    assert 5.5 < at_zero / at_cut < 8.5


def test_fan_in_is_not_guessed_from_the_shape(key):
    shapes = [(4096, 2), (2, 4096), (8, 64, 16)]
    for shape in shapes:
        w = truncated_normal(key, shape, fan_in=16, scale=1.0, dtype=jnp.float32)
        np.testing.assert_allclose(np.asarray(w).std(), 0.25, rtol=0.05)


def test_shape_dtype_and_key(key):
    w = truncated_normal(key, (3, 5), fan_in=3, scale=1.0, dtype=jnp.bfloat16)
    assert (w.shape, w.dtype) == ((3, 5), jnp.bfloat16)
    other = truncated_normal(
        jax.random.fold_in(key, 1), (3, 5), fan_in=3, scale=1.0, dtype=jnp.bfloat16
    )
    assert np.any(np.asarray(w) != np.asarray(other))


def test_a_models_weight_takes_scale_and_dtype_from_its_config(key):
    config = ModelConfig(
        "decoder_only", 8, 8, 8, 1, 8, 1, init_scale=0.1, precision=Precision("bfloat16")
    )
    w = weight(config, key, (64, 64), fan_in=64)[...]
    assert w.dtype == jnp.bfloat16
    deviations = [
        np.asarray(w, np.float32).std(),
        np.asarray(weight(config, key, (64, 64), fan_in=64, scale=4.0)[...], np.float32).std(),
    ]
    np.testing.assert_allclose(deviations, [np.sqrt(0.1 / 64), np.sqrt(4.0 / 64)], rtol=0.05)
