# SPDX-License-Identifier: Apache-2.0
"""Attention over the cache against a NumPy loop, by both of its forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.cached_attention import FEW_QUERIES, KeysValues, read

B, M, H, K = 2, 5, 3, 4


def loop(query, key, value, mask, bias):
    out = np.zeros(query.shape)
    for b, i, h in np.ndindex(query.shape[:3]):
        scores = key[b, h] @ query[b, i, h] + bias[h, i]
        weights = np.where(mask[b, i], np.exp(scores - scores.max()), 0)
        out[b, i, h] = weights / weights.sum() @ value[b, h]
    return out


@pytest.mark.parametrize("L", [1, 3, FEW_QUERIES + 1])
def test_equals_a_loop(L):
    rng = np.random.default_rng(L)
    query, key, value, bias = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((B, L, H, K), (B, H, M, K), (B, H, M, K), (H, L, M))
    )
    mask = rng.random((B, L, M)) < 0.6
    mask[..., 0] = True
    got = read(
        jnp.array(query),
        KeysValues(jnp.array(key), jnp.array(value)),
        mask_BLM=jnp.array(mask),
        bias_HLM=jnp.array(bias),
    )
    np.testing.assert_allclose(got, loop(query, key, value, mask, bias), rtol=1e-5, atol=1e-6)


def test_entries_go_where_they_are_put():
    kept = KeysValues.empty((1, 1, 4, 2), jnp.float32)
    ones_BLHK = jnp.ones((1, 2, 1, 2))
    kept = kept.written(jnp.int32(1), ones_BLHK, 2 * ones_BLHK)
    assert kept.key_BHMK[0, 0, :, 0].tolist() == [0, 1, 1, 0]
    assert kept.value_BHMK[0, 0, :, 0].tolist() == [0, 2, 2, 0]
    assert kept.first(2).value_BHMK[0, 0, :, 0].tolist() == [0, 2]
