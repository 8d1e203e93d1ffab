# SPDX-License-Identifier: Apache-2.0
"""The loop of decoding: when it hands back, what pruning leaves out, rows of a batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.config import DecodingConfig
from switchx.inference.decode import run_until, step_logits, take_rows
from switchx.models.params import bind
from tests.inference.tiny import model, start

DECODING = DecodingConfig(max_new_tokens=6)


def test_it_hands_back_as_soon_as_few_live():
    lengths = []
    for num_live in (3, 1, 0):
        state = run_until(model()[0], DECODING, model()[1], start(DECODING), num_live)
        assert int(jnp.sum(state.rows.is_live_B)) <= num_live
        lengths.append(int(state.step))
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] <= 6


def test_finished_sentences_are_seen_by_no_expert():
    """The others' logits stay as they are; those of the finished one lose their experts."""
    config, params = model()
    state = start(DECODING)
    rows = dataclasses.replace(state.rows, is_live_B=jnp.array([True, False, True, True]))
    state = dataclasses.replace(state, rows=rows)

    def logits(pruning):
        decoding = dataclasses.replace(DECODING, pruning=pruning)
        return jax.jit(
            lambda params, state: step_logits(bind(config, params), decoding, state, None)[0]
        )(params, state)

    whole_BLV, pruned_BLV = logits("none"), logits("experts")
    live = np.array([0, 2, 3])
    np.testing.assert_allclose(pruned_BLV[live], whole_BLV[live], rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(pruned_BLV[1] - whole_BLV[1])) > 1e-2


def test_rows_of_a_batch_go_on_as_in_it():
    state = start(DECODING)
    rows = jnp.array([2, 0])
    few = take_rows(state, rows)
    assert few.rows.sentence_B.tolist() == [2, 0] and int(few.step) == int(state.step)
    got = run_until(model()[0], DECODING, model()[1], few, 0).hypotheses.token_BT
    want = run_until(model()[0], DECODING, model()[1], state, 0).hypotheses.token_BT
    np.testing.assert_array_equal(got, want[np.array([2, 0])])
