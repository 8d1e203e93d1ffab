# SPDX-License-Identifier: Apache-2.0
"""Decode steps: the cache against whole texts, the loop, rows of a batch, positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx.inference.config import DecodingConfig
from switchx.inference.decode import (
    Decoding,
    _biases_of_step,
    position_terms,
    run_until,
    step_logits,
    take_rows,
)
from switchx.layers.attention import KeysValues
from switchx.models.block import BlockInputs
from switchx.models.config import ModelConfig
from switchx.models.params import bind, init_params
from switchx.models.unroll import scanned_blocks
from tests.inference.tiny import SOURCE_BM, V, model, start

T = 5
TOKEN_BT = jnp.array(np.random.default_rng(0).integers(2, V, (4, T)), jnp.int32)


def scanned():
    """The model of `tiny` with its blocks stacked."""
    config, params = model()
    params = jax.tree.map(jnp.asarray, scanned_blocks(params, config.period))
    return dataclasses.replace(config, scan_layers=True), params


def empty_cache(decoder, places):
    position_BM = jnp.broadcast_to(jnp.arange(4), SOURCE_BM.shape)
    segment_BM = (SOURCE_BM > 0).astype(jnp.int32)
    memory_BMD, _ = decoder.encode(SOURCE_BM, segment_BM, position_BM)
    return decoder.decoder.new_cache(4, places, memory_BMD)


def extend(decoder, cache, rows: slice, mask_BLM, bias_HLM=None):
    """Logits `[B, L, V]` of some tokens of `TOKEN_BT`, and the cache with them."""
    token_BL = TOKEN_BT[:, rows]
    inputs = BlockInputs(
        is_token_BL=jnp.ones(token_BL.shape, bool),
        mask_BLM=jnp.broadcast_to(mask_BLM, (4, *mask_BLM.shape[-2:])),
        bias_HLM=bias_HLM,
        memory_mask_BLM=(SOURCE_BM > 0)[:, None],
        token_BL=token_BL,
        cache_index=jnp.int32(rows.start),
    )
    position_BL = jnp.broadcast_to(jnp.arange(T)[rows], token_BL.shape)
    x_BLD, _, cache = decoder.decoder.extend(
        decoder.embedding.embed(token_BL, position_BL), inputs, cache
    )
    return decoder.embedding.logits(x_BLD), cache


def test_the_memory_is_projected_once_for_each_block():
    config, params = model()
    cache = jax.eval_shape(lambda params: empty_cache(bind(config, params), 1), params)
    assert [block.memory.key_BHKM.shape for block in cache] == [(4, 4, 8, 4)]


def test_what_is_masked_is_not_seen():
    """Keys of places that no step has written yet."""

    @jax.jit
    def last_logits(params, poisoned, value):
        decoder = bind(model()[0], params)
        cache = tuple(
            dataclasses.replace(
                block,
                past=KeysValues(
                    block.past.key_BHKM.at[..., poisoned].set(value),
                    block.past.value_BHMK.at[:, :, poisoned].set(value),
                ),
            )
            for block in empty_cache(decoder, 5)
        )
        is_written_LM = jnp.broadcast_to(jnp.arange(5) < 2, (1, 2, 5))
        return extend(decoder, cache, slice(0, 2), is_written_LM)[0]

    params = model()[1]
    for poisoned in (3, 4):
        np.testing.assert_array_equal(
            last_logits(params, poisoned, 0.0), last_logits(params, poisoned, 1e3)
        )


def _step_logits(decoder, program, state):
    positions = position_terms(decoder, program, state.is_prompt_BP.shape[1])
    return step_logits(decoder, program, state, positions)[0]


DECODING = DecodingConfig(max_new_tokens=6)
PROGRAM = DECODING.program_of(6)


def test_it_hands_back_as_soon_as_few_live():
    lengths = []
    for num_live in (3, 1, 0):
        state = run_until(model()[0], PROGRAM, model()[1], start(DECODING), num_live, 6)
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
        program = dataclasses.replace(DECODING, pruning=pruning).program_of(6)
        return jax.jit(
            lambda params, state: _step_logits(bind(config, params), program, state)
        )(params, state)

    whole_BLV, pruned_BLV = logits("none"), logits("experts")
    live = np.array([0, 2, 3])
    np.testing.assert_allclose(pruned_BLV[live], whole_BLV[live], rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(pruned_BLV[1] - whole_BLV[1])) > 1e-2


def test_rows_of_a_batch_go_on_as_in_it():
    config, params = model()
    state = start(DECODING)
    rows = jnp.array([2, 0])
    few = take_rows(state, rows)
    assert few.rows.sentence_B.tolist() == [2, 0] and int(few.step) == int(state.step)
    got = run_until(config, PROGRAM, params, few, 0, 6).hypotheses.token_BT
    want = run_until(config, PROGRAM, params, state, 0, 6).hypotheses.token_BT
    np.testing.assert_array_equal(got, want[np.array([2, 0])])
    state = start(DECODING, scanned())
    few, rows = take_rows(state, jnp.array([2, 0])), np.array([2, 0])
    for got, want in zip(jax.tree.leaves(few.cache), jax.tree.leaves(state.cache), strict=True):
        np.testing.assert_array_equal(got, np.asarray(want)[:, rows])


TUPE = ModelConfig(
    "decoder_only", 9, 6, 8, 2, 4, 1, positions="tupe", max_length=7, scale_attention=True
)


def test_a_step_s_bias_of_untied_positions_is_a_row_of_the_whole():
    """Of prompts of 4 and of 2 tokens: 7 and 5 positions with the new ones.

    The prompts' last tokens are in the ring, of 4 places here, that the steps before began.
    """
    is_prompt_BP = jnp.array([[True] * 3 + [False], [False, False, True, False]])
    program = DecodingConfig(max_new_tokens=4, beam_size=2).program_of(4)
    position_1L = np.arange(7)[None]

    @jax.jit
    def both(params, step):
        decoder = bind(TUPE, params)
        positions = position_terms(decoder, program, 4)
        whole_HLM = decoder.decoder.row_bias(position_1L, position_1L)[0]
        state = Decoding((), step, jnp.array([2, 2]), None, None, None, is_prompt_BP, None)
        behind_T = (step % 4 - jnp.arange(4)) % 4
        bias_HLM, row_bias_BHLM = _biases_of_step(positions, state, behind_T, 2)
        assert bias_HLM is None
        return whole_HLM, row_bias_BHLM

    params = init_params(TUPE, jax.random.key(0))
    for step in range(2, 6):
        whole_HLM, got = map(np.asarray, both(params, step))
        assert got.shape == (2, 2, 1, 4 + 4 * 2)
        for row, before in ((0, 3), (1, 1)):
            bias_HM = whole_HLM[:, before + step - 2]
            np.testing.assert_allclose(
                got[row, :, 0, 3 - before : 3], bias_HM[:, :before], rtol=1e-5
            )
            for beam in (0, 1):
                for number in range(step - 1):  # of those that have been written
                    place = 4 + 2 * ((2 + number) % 4) + beam
                    want_H = bias_HM[:, before + number]
                    np.testing.assert_allclose(got[row, :, 0, place], want_H, rtol=1e-5)
