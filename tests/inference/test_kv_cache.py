# SPDX-License-Identifier: Apache-2.0
"""The cache: tokens one by one are tokens all at once; what is masked is not seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.cached_attention import KeysValues
from switchx.inference.kv_cache import blocks_of, extend, new_cache
from switchx.models.params import bind
from tests.inference.tiny import SOURCE_BM, V, model

T = 5
TOKEN_BT = jnp.array(np.random.default_rng(0).integers(2, V, (4, T)), jnp.int32)


def bound(params):
    return bind(model()[0], params)


def empty_cache(decoder_model, places):
    position_BM = jnp.broadcast_to(jnp.arange(4), SOURCE_BM.shape)
    is_source_BM = SOURCE_BM > 0
    memory_BMD, _ = decoder_model.encode(SOURCE_BM, is_source_BM.astype(jnp.int32), position_BM)
    return new_cache(decoder_model, 4, places, memory_BMD, is_source_BM)


def run(params, pieces, places=T):
    """Logits `[B, T, V]` of tokens that come in pieces of these lengths."""
    decoder_model = bound(params)
    cache, found, first = empty_cache(decoder_model, places), [], 0
    for length in pieces:
        rows = slice(first, first + length)
        logits_BLV, cache = extend(
            decoder_model,
            cache,
            TOKEN_BT[:, rows],
            jnp.broadcast_to(jnp.arange(T)[rows], (4, length)),
            first,
            mask_BLM=jnp.broadcast_to(
                jnp.tril(jnp.ones((places, places), bool))[rows], (4, length, places)
            ),
            bias_HLM=decoder_model.decoder.position_bias(length, places, first_query=first),
            is_live_BL=jnp.ones((4, length), bool),
        )
        found.append(logits_BLV)
        first += length
    return jnp.concatenate(found, axis=1), cache


def test_in_pieces_or_at_once_the_logits_are_the_same():
    params = model()[1]
    want_BTV, _ = jax.jit(lambda params: run(params, [T]))(params)
    got_BTV, cache = jax.jit(lambda params: run(params, [2, 1, 1, 1], places=T + 3))(params)
    np.testing.assert_allclose(got_BTV, want_BTV, rtol=1e-4, atol=1e-4)
    for each in cache.past:
        assert np.any(each.key_BHMK[:, :, :T]) and not np.any(each.key_BHMK[:, :, T:])


def test_the_memory_is_projected_once_for_each_block():
    decoder_model = bound(model()[1])
    cache = empty_cache(decoder_model, 1)
    assert len(cache.memory) == len(cache.past) == len(blocks_of(decoder_model.decoder)) == 2
    assert cache.memory[0].key_BHMK.shape == (4, 2, 4, 8)


@pytest.mark.parametrize("poisoned", [3, 4])
def test_what_is_masked_is_not_seen(poisoned):
    """Keys of places that no step has written yet."""
    params = model()[1]

    def last_logits(params, value):
        decoder_model = bound(params)
        cache = empty_cache(decoder_model, 5)
        past = [
            KeysValues(
                each.key_BHMK.at[:, :, poisoned].set(value),
                each.value_BHMK.at[:, :, poisoned].set(value),
            )
            for each in cache.past
        ]
        cache = type(cache)(tuple(past), cache.memory, cache.is_memory_BM)
        return extend(
            decoder_model, cache, TOKEN_BT[:, :2], jnp.zeros((4, 2), jnp.int32), 0,
            mask_BLM=jnp.ones((4, 2, 5), bool) & (jnp.arange(5) < 2)[None, None],
            bias_HLM=None, is_live_BL=jnp.ones((4, 2), bool),
        )[0]  # fmt: skip

    run_it = jax.jit(last_logits)
    np.testing.assert_array_equal(run_it(params, 0.0), run_it(params, 1e3))
