# SPDX-License-Identifier: Apache-2.0
"""Initial weights, dropout, norms, broadcasting: against NumPy, loops and numbers by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.dense import along_last, split_key, weight
from switchx.layers.dropout import dropout
from switchx.layers.norm import Norm, layer_norm, rms_norm
from switchx.models.config import ModelConfig, Precision
from tests.compare import assert_slope

D = 12
CONFIG = ModelConfig("decoder_only", 8, D, 8, 1, 8, 1)


def truncated_stddev(cut: float) -> float:
    """Standard deviation of a standard normal cut at +-`cut`, by summing its density."""
    x = np.linspace(-cut, cut, 200_001)
    density = np.exp(-(x**2) / 2)
    return float(np.sqrt(np.sum(x**2 * density) / np.sum(density)))


@pytest.mark.parametrize(("fan_in", "scale"), [(64, 1.0), (64, 0.1), (1024, 0.1)])
def test_standard_deviation_is_that_of_the_paper(fan_in, scale, key):
    """Section 2.4: sqrt(s / n), of what is drawn and not of the normal before the cut."""
    n = 100_000
    w = np.asarray(weight(CONFIG, key, (n,), fan_in=fan_in, scale=scale)[...])
    stddev = np.sqrt(scale / fan_in)
    # The estimate's own deviation is below stddev / sqrt(2 n): a cut normal has thin tails.
    np.testing.assert_allclose(w.std(), stddev, rtol=5 / np.sqrt(2 * n))
    assert abs(w.mean()) < 5 * stddev / np.sqrt(n)


def test_cut_at_two_standard_deviations(key):
    w = np.asarray(weight(CONFIG, key, (100_000,), fan_in=1)[...])
    # Two deviations of the normal before the cut, whose width is 1 / 0.8796.
    bound = 2 / truncated_stddev(2.0)
    assert np.abs(w).max() <= bound * (1 + 1e-6)
    # A normal has 0.1% of its mass between 1.99 and 2: the cut is there and not before.
    assert np.abs(w).max() > 0.995 * bound
    # Density at 0 over density at the cut is e^2 = 7.4; no clipping piles mass up there.
    at_cut = np.mean(np.abs(w) > 0.95 * bound)
    at_zero = np.mean(np.abs(w) < 0.05 * bound)
    assert 5.5 < at_zero / at_cut < 8.5


def test_scale_dtype_and_key_decide(key):
    config = dataclasses.replace(CONFIG, init_scale=0.1, precision=Precision("bfloat16"))
    w = weight(config, key, (64, 64), fan_in=64)[...]
    assert (w.shape, w.dtype) == ((64, 64), jnp.bfloat16)
    assert len(np.unique(np.asarray(w, np.float32))) > 500  # JAX draws 128 in bfloat16
    other = weight(config, jax.random.fold_in(key, 1), (64, 64), fan_in=64)[...]
    assert np.any(np.asarray(w) != np.asarray(other))
    deviations = [
        np.asarray(w, np.float32).std(),
        np.asarray(weight(config, key, (64, 64), fan_in=64, scale=4.0)[...], np.float32).std(),
    ]
    np.testing.assert_allclose(deviations, [np.sqrt(0.1 / 64), np.sqrt(4.0 / 64)], rtol=0.05)


@pytest.mark.parametrize("rate", [0.1, 0.75])
def test_entries_are_zero_or_scaled_and_the_mean_stays(rate, key):
    n = 40_000
    x = np.linspace(1.0, 2.0, n).astype(np.float32)
    y = np.asarray(dropout(jnp.asarray(x), rate, key=key))
    is_kept = y != 0
    np.testing.assert_allclose(y[is_kept], x[is_kept] / (1 - rate), rtol=1e-6)
    # Kept entries are binomial: five standard deviations of their share.
    share_deviation = np.sqrt(rate * (1 - rate) / n)
    assert abs(is_kept.mean() - (1 - rate)) < 5 * share_deviation
    # So the mean of y is that of x, within five of its own: each entry has variance
    # x^2 rate / (1 - rate).
    mean_deviation = np.sqrt((x**2).mean() * rate / (1 - rate) / n)
    assert abs(y.mean() - x.mean()) < 5 * mean_deviation


def test_nothing_is_random_without_a_key_or_a_rate(key):
    x = jnp.ones((3, 4))
    assert dropout(x, 0.5, key=None) is x
    assert dropout(x, 0.0, key=key) is x


@pytest.mark.parametrize("shared_dims", [(1,), (0, 2)])
def test_shared_dimensions_share_one_mask(shared_dims, key):
    y = np.asarray(dropout(jnp.ones((8, 16, 12)), 0.5, key=key, shared_dims=shared_dims))
    for dim in range(3):
        is_constant = np.ptp(y, axis=dim).max() == 0
        assert is_constant == (dim in shared_dims)
    assert set(np.unique(y)) == {0.0, 2.0}


def test_the_gradient_is_the_mask(key):
    x = jnp.linspace(-1.0, 1.0, 64)
    grad = jax.grad(lambda x: jnp.sum(dropout(x, 0.25, key=key)))(x)
    np.testing.assert_array_equal(grad, dropout(jnp.ones(64), 0.25, key=key))


def test_a_dropped_nan_is_gone(key):
    """Zeroed, not multiplied by zero."""
    y = np.asarray(dropout(jnp.full(100, jnp.nan), 0.5, key=key))
    assert 0 < np.isnan(y).sum() < 100
    assert np.all(np.isnan(y) | (y == 0))


def test_splitting_a_key_and_none(key):
    assert split_key(None, 3) == [None, None, None]
    keys = split_key(key, 3)
    data = {tuple(np.asarray(jax.random.key_data(k))) for k in [key, *keys]}
    assert len(keys) == 3
    assert len(data) == 4


def rms_oracle(x, scale_D, bias_D=None):
    del bias_D
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale_D


def layer_oracle(x, scale_D, bias_D):
    variance = np.var(x, axis=-1, keepdims=True)
    return (x - np.mean(x, axis=-1, keepdims=True)) / np.sqrt(
        variance + 1e-6
    ) * scale_D + bias_D


def rms(x, scale_D, bias_D):
    del bias_D
    return rms_norm(x, scale_D)


BOTH = pytest.mark.parametrize(
    ("norm", "oracle"), [(rms, rms_oracle), (layer_norm, layer_oracle)], ids=["rms", "layer"]
)


def inputs():
    rng = np.random.default_rng(0)
    x_BLD = rng.normal(size=(2, 5, D)) * rng.uniform(0.01, 100, (2, 5, 1)) + 0.3
    return x_BLD, rng.normal(size=D), rng.normal(size=D)


@BOTH
def test_against_float64(norm, oracle):
    arguments = inputs()
    got = norm(*(jnp.asarray(a, jnp.float32) for a in arguments))
    np.testing.assert_allclose(got, oracle(*arguments), rtol=2e-5, atol=2e-5)


@BOTH
def test_gradients_equal_finite_differences(norm, oracle):
    arguments = inputs()
    target = np.random.default_rng(1).normal(size=arguments[0].shape)

    def loss(*arguments):
        return jnp.sum(norm(*arguments) * target)

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(
        *(jnp.asarray(a, jnp.float32) for a in arguments)
    )
    for i, grad in enumerate(grads):

        def by_oracle(changed, i=i):
            return np.sum(oracle(*arguments[:i], changed, *arguments[i + 1 :]) * target)

        assert_slope(by_oracle, arguments[i], grad, rtol=1e-3, atol=1e-6)


@BOTH
def test_float16_keeps_its_statistics_in_float32(norm, oracle):
    # 300^2 = 90000 is beyond float16's 65504: squares taken in float16 would be infinite.
    x = np.array([[300.0, -300.0, 150.0, 0.0]])
    parameters = np.ones(4), np.zeros(4)
    got = norm(*(jnp.asarray(a, jnp.float16) for a in (x, *parameters)))
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(got, np.float64), oracle(x, *parameters), rtol=2e-3)


@BOTH
def test_a_constant_row_stays_finite(norm, oracle):
    for value in (0.0, 7.0):
        x = np.full((1, D), value)
        arguments = x, np.ones(D), np.zeros(D)
        out, grad = jax.jit(jax.value_and_grad(lambda x, *a: jnp.sum(norm(x, *a))))(
            *(jnp.asarray(a, jnp.float32) for a in arguments)
        )
        np.testing.assert_allclose(out, np.sum(oracle(*arguments)), rtol=1e-5, atol=1e-5)
        assert np.all(np.isfinite(grad))


def test_the_module_starts_as_the_plain_norm():
    x = jnp.asarray(inputs()[0], jnp.float32)
    module = Norm(CONFIG)
    assert not hasattr(module, "bias_D")
    np.testing.assert_array_equal(module(x), rms_norm(x, jnp.ones(D)))
    config = dataclasses.replace(CONFIG, norm="layer", precision=Precision("bfloat16"))
    module = Norm(config)
    np.testing.assert_array_equal(module(x), layer_norm(x, jnp.ones(D), jnp.zeros(D)))
    assert module.scale_D[...].dtype == jnp.bfloat16


def test_the_activation_decides_the_dtype():
    x = jnp.zeros((2, 3), jnp.bfloat16)
    assert along_last(jnp.ones(3, jnp.float32), x).dtype == jnp.bfloat16
