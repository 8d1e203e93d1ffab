# SPDX-License-Identifier: Apache-2.0
"""The next token: settings, top-k, what is sampled and how often, greedy hypotheses."""

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


likely = jax.jit(likely_logits, static_argnums=(1, 2))
choose = jax.jit(next_token, static_argnames="config")
advance = jax.jit(Greedy.advance, static_argnames="config")


def kept(top_k=None, top_p=None):
    logits_BV = likely(np.log(PROB_V)[None], top_k, top_p)
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
    logits_BV = np.log(PROB_V)[None] + 5.0
    token_B, log_prob_B = choose(logits_BV, None, config=DecodingConfig())
    assert token_B.tolist() == [1] and token_B.dtype == jnp.int32
    assert float(log_prob_B[0]) == pytest.approx(np.log(0.4), rel=1e-5)


def test_samples_are_as_frequent_as_their_probabilities():
    """At temperature 0.5 probabilities are squared; log-probabilities are the model's own."""
    config = DecodingConfig(temperature=0.5, top_k=3)
    draws = 20_000
    key_B = jax.random.split(jax.random.key(0), draws)
    logits_BV = np.broadcast_to(np.log(PROB_V), (draws, 5))
    token_B, log_prob_B = choose(logits_BV, key_B, config=config)
    want_V = np.where(PROB_V > 0.1, PROB_V**2, 0)
    want_V /= want_V.sum()
    got_V = np.bincount(np.asarray(token_B), minlength=5) / draws
    np.testing.assert_allclose(got_V, want_V, atol=4 * np.sqrt(0.25 / draws))
    np.testing.assert_allclose(log_prob_B, np.log(PROB_V)[np.asarray(token_B)], rtol=1e-4)


def numbers(kind: str, V: int) -> np.ndarray:
    rng = np.random.default_rng(V)
    if kind == "ties":
        return rng.integers(0, 4, (6, V)).astype(np.float32)
    if kind == "in one block":
        x_BV = rng.normal(size=(6, V)).astype(np.float32)
        x_BV[:, -BLOCK:] += 100
        return x_BV
    return rng.normal(size=(6, V)).astype(np.float32)


blocked_top_k = jax.jit(top_k, static_argnums=1)


@pytest.mark.parametrize("V", [24 * BLOCK, 300])
@pytest.mark.parametrize("kind", ["random", "ties", "in one block"])
def test_finds_what_numpy_finds(kind, V):
    x_BV = numbers(kind, V)
    for k in (1, 8):
        # A stable sort: equal numbers in the order of places.
        place_BV = np.argsort(-x_BV, axis=1, kind="stable")[:, :k]
        value_BV, index_BV = blocked_top_k(x_BV, k)
        np.testing.assert_array_equal(index_BV, place_BV)
        np.testing.assert_array_equal(value_BV, np.take_along_axis(x_BV, place_BV, axis=1))


CONFIG = DecodingConfig(max_new_tokens=3, eos_id=1, pad_id=0, length_penalty=0.5)


def logits(tokens, V=4):
    """Of which each token has probability 1/2 and the others share the rest."""
    prob_BV = np.full((len(tokens), V), 0.5 / (V - 1), np.float32)
    prob_BV[np.arange(len(tokens)), tokens] = 0.5
    return np.log(prob_BV)[:, None]


def advance_all(steps, config=CONFIG):
    hypotheses, live = Greedy.start(2, config), []
    is_live_B, max_new_tokens_B = np.ones(2, bool), np.array([3, 3])
    for step, tokens in enumerate(steps):
        rows = Rows(np.arange(2), np.asarray(is_live_B), max_new_tokens_B)
        hypotheses, token_BL, is_live_B = advance(
            hypotheses, logits(tokens), np.int32(step), rows, config=config
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


def test_a_sample_is_its_sentences_own():
    """Sentences in another order sample the same texts."""
    config = DecodingConfig(max_new_tokens=8, temperature=1.0, seed=1, eos_id=99)

    def sampled(*sentences):
        hypotheses = Greedy.start(2, config)
        rows = Rows(np.array(sentences), np.ones(2, bool), np.array([8, 8]))
        for step in range(8):
            hypotheses, _, _ = advance(
                hypotheses, np.zeros((2, 1, 4), np.float32), np.int32(step), rows, config=config
            )
        return np.asarray(hypotheses.token_BT)

    forward, backward = sampled(5, 9), sampled(9, 5)
    np.testing.assert_array_equal(forward, backward[::-1])
    assert np.any(forward[0] != forward[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0; use 1 to 1048576"),
        ({"beam_size": 0}, "beam_size=0; use at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0; use 0 to 100"),
        ({"temperature": 0.001}, "temperature=0.001; use 0 for the likeliest token"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0; use 1 to "),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5; use 0 to 1"),
        ({"early_stopping": "soon"}, "use one of True, False, never"),
        ({"pruning": "all"}, "use one of none, experts, compact"),
        ({"temperature": 1.0, "beam_size": 2}, "beam_size=2; temperature=1.0 samples"),
        ({"top_k": 3}, "temperature=0 does not sample"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**settings)


def test_the_default_is_greedy():
    assert not DecodingConfig().is_sampling and DecodingConfig().beam_size == 1
