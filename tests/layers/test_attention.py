# SPDX-License-Identifier: Apache-2.0
"""Attention against a NumPy loop, forward and gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from switchx.layers.attention import attend
from tests.moe.oracle import softmax

B, L, M, H, K = 2, 5, 7, 3, 4


def inputs():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, H, K)).astype(np.float32) for n in (L, M, M))
    bias_HLM = rng.normal(size=(H, L, M)).astype(np.float32)
    mask_BLM = rng.random((B, L, M)) < 0.7
    mask_BLM[:, :, 0] = True
    return q, k, v, bias_HLM, mask_BLM


def loop(q, k, v, bias_HLM, mask_BLM):
    out = np.zeros((B, L, H, K))
    for b in range(B):
        for h in range(H):
            for i in range(L):
                scores = np.array(
                    [q[b, i, h] @ k[b, j, h] + bias_HLM[h, i, j] for j in range(M)]
                )
                scores[~mask_BLM[b, i]] = -np.inf
                out[b, i, h] = softmax(scores) @ v[b, :, h]
    return out


def test_attend_equals_a_loop():
    q, k, v, bias_HLM, mask_BLM = inputs()
    got = attend(q, k, v, bias_HLM=jnp.asarray(bias_HLM), mask_BLM=jnp.asarray(mask_BLM))
    np.testing.assert_allclose(got, loop(q, k, v, bias_HLM, mask_BLM), rtol=1e-5, atol=1e-6)


def test_gradients_equal_finite_differences():
    q, k, v, bias_HLM, mask_BLM = inputs()
    target = np.random.default_rng(1).normal(size=(B, L, H, K))
    arguments = (q, k, v, bias_HLM)

    def loss(q, k, v, bias_HLM):
        out = attend(q, k, v, bias_HLM=bias_HLM, mask_BLM=jnp.asarray(mask_BLM))
        return jnp.sum(out * target)

    grads = jax.grad(loss, (0, 1, 2, 3))(*map(jnp.asarray, arguments))
    rng = np.random.default_rng(2)
    for i, grad in enumerate(grads):
        direction = rng.normal(size=grad.shape)

        def moved(step, i=i, direction=direction):
            changed = [a.astype(np.float64) for a in arguments]
            changed[i] = changed[i] + step * direction
            return np.sum(loop(*changed, mask_BLM) * target)

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.vdot(grad, direction), slope, rtol=1e-3)


def test_a_query_that_may_look_at_nothing_stays_finite():
    q, k, v, bias_HLM, _ = inputs()
    mask_BLM = jnp.zeros((B, L, M), bool)
    out, grads = jax.value_and_grad(
        lambda q: jnp.sum(attend(q, k, v, bias_HLM=jnp.asarray(bias_HLM), mask_BLM=mask_BLM))
    )(jnp.asarray(q))
    assert np.isfinite(out) and np.all(np.isfinite(grads))


def test_bfloat16_keeps_the_softmax_in_float32():
    q, k, v, bias_HLM, mask_BLM = inputs()
    half = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)]
    out = attend(*half, bias_HLM=jnp.asarray(bias_HLM), mask_BLM=jnp.asarray(mask_BLM))
    assert out.dtype == jnp.bfloat16
    exact = loop(*(np.asarray(a, np.float32) for a in half), bias_HLM, mask_BLM)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=2e-2, atol=2e-2)
