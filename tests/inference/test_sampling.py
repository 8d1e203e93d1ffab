# SPDX-License-Identifier: Apache-2.0
"""The next token: top-k, what is sampled and how often, greedy hypotheses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.sampling import (
    BLOCK,
    EXCLUDED,
    Greedy,
    Rows,
    likely_logits,
    next_token,
    top_k,
)

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


def numbers(kind: str, V: int) -> np.ndarray:
    rng = np.random.default_rng(V)
    if kind == "ties":
        return rng.integers(0, 4, (6, V)).astype(np.float32)
    if kind == "equal":
        return np.zeros((6, V), np.float32)
    if kind == "in one block":
        x_BV = rng.normal(size=(6, V)).astype(np.float32)
        x_BV[:, -BLOCK:] += 100
        return x_BV
    return rng.normal(size=(6, V)).astype(np.float32)


@pytest.mark.parametrize("V", [24 * BLOCK, 300])
@pytest.mark.parametrize("kind", ["random", "ties", "in one block"])
def test_finds_what_numpy_and_jax_find(kind, V):
    x_BV = numbers(kind, V)
    for k in (1, 8):
        for ours, theirs in zip(
            top_k(jnp.array(x_BV), k), jax.lax.top_k(jnp.array(x_BV), k), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


CONFIG = DecodingConfig(max_new_tokens=3, eos_id=1, pad_id=0, length_penalty=0.5)


def logits(tokens, V=4):
    """Of which each token has probability 1/2 and the others share the rest."""
    prob_BV = np.full((len(tokens), V), 0.5 / (V - 1))
    prob_BV[np.arange(len(tokens)), tokens] = 0.5
    return jnp.log(jnp.array(prob_BV, jnp.float32))[:, None]


def advance_all(steps, config=CONFIG):
    hypotheses, live = Greedy.start(2, config), []
    is_live_B, room_B = jnp.ones(2, bool), jnp.array([3, 3])
    for step, tokens in enumerate(steps):
        hypotheses, token_BL, is_live_B = hypotheses.advance(
            logits(tokens), jnp.int32(step), Rows(jnp.arange(2), is_live_B, room_B), config
        )
        live.append(is_live_B.tolist())
    return hypotheses, token_BL, live


def test_a_text_ends_with_its_end_or_with_its_room():
    hypotheses, token_BL, live = advance_all([[2, 3], [1, 3], [3, 2]])
    assert live == [[True, True], [False, True], [False, False]]
    np.testing.assert_array_equal(hypotheses.token_BT, [[2, 1, 0], [3, 3, 2]])
    np.testing.assert_array_equal(token_BL, [[0], [2]])  # the ended one says nothing more
    np.testing.assert_array_equal(hypotheses.length_B, [2, 3])


def test_scores_are_log_probabilities_over_length_to_the_penalty():
    hypotheses, _, _ = advance_all([[2, 3], [1, 3], [3, 2]])
    rows = Rows(jnp.arange(2), jnp.zeros(2, bool), jnp.array([3, 3]))
    token_BLT, score_BL = hypotheses.results(CONFIG, rows)
    assert token_BLT.shape == (2, 1, 3)
    want = [[2 * np.log(0.5) / 2**0.5], [3 * np.log(0.5) / 3**0.5]]
    np.testing.assert_allclose(score_BL, want, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sample_is_its_sentences_own(seed):
    """Sentences in another order sample the same texts."""
    config = DecodingConfig(max_new_tokens=8, temperature=1.0, seed=seed, eos_id=99)

    def sampled(sentence_B):
        hypotheses, live = Greedy.start(2, config), jnp.ones(2, bool)
        room_B = jnp.array([8, 8])
        for step in range(8):
            hypotheses, _, _ = hypotheses.advance(
                jnp.zeros((2, 1, 4)), jnp.int32(step), Rows(sentence_B, live, room_B), config
            )
        return hypotheses.token_BT

    forward, backward = sampled(jnp.array([5, 9])), sampled(jnp.array([9, 5]))
    np.testing.assert_array_equal(forward, backward[::-1])
    assert np.any(forward[0] != forward[1])
