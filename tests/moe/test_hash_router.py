# SPDX-License-Identifier: Apache-2.0
"""Hash routing: the hash in Python's integers, its spread, and the certainty of its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.router import hash_expert, hash_logits


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
