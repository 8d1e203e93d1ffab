# SPDX-License-Identifier: Apache-2.0
"""Dropout: what it keeps, how often, by how much it scales, what shares a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.dense import dropout, split_key


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


@pytest.mark.parametrize("shared_dims", [(1,), (0, 2), (-1,)])
def test_shared_dimensions_share_one_mask(shared_dims, key):
    y = np.asarray(dropout(jnp.ones((8, 16, 12)), 0.5, key=key, shared_dims=shared_dims))
    for dim in range(3):
        is_constant = np.ptp(y, axis=dim).max() == 0
        assert is_constant == (dim in shared_dims or dim - 3 in shared_dims)
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


def test_the_dtype_stays(key):
    assert dropout(jnp.ones(8, jnp.bfloat16), 0.1, key=key).dtype == jnp.bfloat16


def test_one_key_one_mask(key):
    x = jnp.ones(256)
    np.testing.assert_array_equal(dropout(x, 0.5, key=key), dropout(x, 0.5, key=key))
    other = dropout(x, 0.5, key=jax.random.fold_in(key, 1))
    assert np.any(dropout(x, 0.5, key=key) != other)


def test_splitting_a_key_and_none(key):
    assert split_key(None, 3) == [None, None, None]
    keys = split_key(key, 3)
    data = {tuple(np.asarray(jax.random.key_data(k))) for k in [key, *keys]}
    assert len(keys) == 3
    assert len(data) == 4
