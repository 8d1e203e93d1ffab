# SPDX-License-Identifier: Apache-2.0
"""Greedy hypotheses: what is written down, until the end and not after it."""

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.config import DecodingConfig
from switchx.inference.sampling import Greedy, Rows

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
