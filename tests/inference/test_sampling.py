# SPDX-License-Identifier: Apache-2.0
"""Sampling: what is left to sample from, and that it is sampled as often as it is likely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.sampling import EXCLUDED, likely_logits, next_token

PROB_V = np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32)


def kept(top_k=None, top_p=None, prob_V=PROB_V):
    logits_BV = likely_logits(jnp.log(jnp.array(prob_V))[None], top_k, top_p)
    return np.flatnonzero(np.asarray(logits_BV[0]) > EXCLUDED / 2).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "want"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        (1, None, [1]),
        (3, None, [1, 3, 4]),
        (9, None, [0, 1, 2, 3, 4]),
        (None, 0.3, [1]),  # the first always stays
        (None, 0.41, [1, 3]),
        (None, 0.71, [1, 3, 4]),
        (None, 1.0, [0, 1, 2, 3, 4]),
        # p is of what k left: 0.4 / 0.7 is more than 0.5.
        (2, 0.5, [1]),
        (2, 0.6, [1, 3]),
    ],
)
def test_likely_tokens_stay(top_k, top_p, want):
    assert kept(top_k, top_p) == want


def test_the_likeliest_token_and_its_log_probability():
    token_B, log_prob_B = next_token(
        jnp.log(jnp.array(PROB_V))[None] + 5.0, None, DecodingConfig()
    )
    assert token_B.tolist() == [1] and token_B.dtype == jnp.int32
    assert float(log_prob_B[0]) == pytest.approx(np.log(0.4), rel=1e-5)


def test_samples_are_as_frequent_as_their_probabilities():
    """At temperature 0.5 probabilities are squared; log-probabilities are the model's own."""
    config = DecodingConfig(temperature=0.5, top_k=3)
    draws = 20_000
    key_B = jax.random.split(jax.random.key(0), draws)
    logits_BV = jnp.broadcast_to(jnp.log(jnp.array(PROB_V)), (draws, 5))
    token_B, log_prob_B = next_token(logits_BV, key_B, config)
    want_V = np.where(PROB_V > 0.1, PROB_V**2, 0)
    want_V /= want_V.sum()
    got_V = np.bincount(np.asarray(token_B), minlength=5) / draws
    np.testing.assert_allclose(got_V, want_V, atol=4 * np.sqrt(0.25 / draws))
    np.testing.assert_allclose(log_prob_B, np.log(PROB_V)[np.asarray(token_B)], rtol=1e-4)
