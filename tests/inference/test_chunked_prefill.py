# SPDX-License-Identifier: Apache-2.0
"""Long texts read in chunks: equal to whole passes, in memory that grows with their length."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.chunked_prefill import chunk_size, read_in_chunks
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import prefill
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.inference.score import Scorer, features, logits_of
from switchx.models.config import PREFILL_CHUNK as CHUNK
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params, bind, forward, init_params
from tests.cases import slow, slow_unless

V = 16
ROUTER = RouterConfig(num_selected=2, gate="normalized", overflow="dropless")
MIXTRAL = ModelConfig(
    "decoder_only", V, 16, 16, 4, 4, 2, positions="rotary", num_kv_heads=2,
    scale_attention=True, scan_layers=True, init_scale=4.0,
    switch=SwitchConfig(4, every=1, router=ROUTER),
)  # fmt: skip
DENSE = dataclasses.replace(MIXTRAL, switch=None, scan_layers=False)
OWN = dict(num_kv_heads=None, max_length=2 * CHUNK)
MODELS = {
    "mixtral": MIXTRAL,
    "relative": dataclasses.replace(DENSE, positions="relative", **OWN),
    "a bias a layer": dataclasses.replace(
        DENSE, positions="relative", relative_bias_per_layer=True, **OWN
    ),
    "tupe": dataclasses.replace(DENSE, positions="tupe_relative", **OWN),
    "learned": dataclasses.replace(DENSE, positions="learned", **OWN),
}


@pytest.mark.parametrize("name", [slow_unless(name == "mixtral", name) for name in MODELS])
def test_chunks_are_the_whole_pass(name):
    """Outputs of every token, with padding on the left; 7 of 17 places a chunk, so the last one
    reads some again."""
    config, P = for_decoding(MODELS[name]), 17
    params = init_params(config, jax.random.key(1))
    model = bind(config, params)
    token_BP = np.random.default_rng(0).integers(2, V, (2, P), dtype=np.int32)
    num_padding_B = np.array([0, 5])
    is_text_BP = np.arange(P)[None] >= num_padding_B[:, None]
    position_BP = np.maximum(np.arange(P)[None] - num_padding_B[:, None], 0)

    def read(size):
        def keep(y_BPD, first, y_BQD, stats):
            return jax.lax.dynamic_update_slice_in_dim(y_BPD, y_BQD, first, axis=1)

        texts = token_BP, position_BP, is_text_BP
        texts, y_BPD = tuple(map(jnp.asarray, texts)), jnp.zeros((2, P, config.d_model))
        cache = model.decoder.new_cache(2, P)
        return read_in_chunks(model, texts, cache, y_BPD, keep, size=size)[1]

    y_BPD = jax.jit(read, static_argnums=0)(7)
    for row, first in enumerate(num_padding_B):
        own_1P = jnp.asarray(token_BP[row : row + 1, first:])
        batch = features("decoder", own_1P, np.ones(own_1P.shape, bool))
        batch["decoder_prefix_mask"] = jnp.zeros_like(own_1P)
        want_PD, _ = jax.jit(functools.partial(model.activations, is_training=False))(batch)
        np.testing.assert_allclose(y_BPD[row, first:], want_PD[0], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def long_texts():
    """The model, texts of which one is read in two chunks, and the logits of whole passes."""
    config = for_decoding(MIXTRAL)
    params = init_params(config, jax.random.key(1))
    rng = np.random.default_rng(1)
    texts = [rng.integers(2, V, length).tolist() for length in (CHUNK + 100, 40)]
    logits = []
    for text in texts:
        read_1L = jnp.asarray([[0, *text]])
        logits.append(logits_of(config, params, read_1L, jnp.ones_like(read_1L, bool))[0])
    return config, params, texts, logits


def test_log_likelihoods_of_long_texts(long_texts):
    """A long and a short text, their likeliest tokens too, against a NumPy softmax of whole
    logits."""
    config, params, texts, logits = long_texts
    scorer = Scorer(config, params, logprobs=2, batch_size=2)
    assert chunk_size(config, params, 768, is_bidirectional=False) == CHUNK
    pairs = [(text[:10], text[10:]) for text in texts]
    for number, score in scorer(pairs):
        x_LV = np.float64(logits[number])[10:-1]
        x_LV -= np.log(np.sum(np.exp(x_LV), axis=1, keepdims=True))
        want_L = x_LV[np.arange(len(x_LV)), texts[number][10:]]
        np.testing.assert_allclose(score.token_logprobs, want_L, atol=2e-4)
        np.testing.assert_allclose(score.log_likelihood, want_L.sum(), rtol=1e-5)
        assert [next(iter(top)) for top in score.top_logprobs] == x_LV.argmax(1).tolist()


def test_greedy_tokens_after_long_prompts(long_texts):
    """Each token is the likeliest of a whole pass, without a cache, over all before it; the
    ring of a step's keys goes on where the prompt's end."""
    config, params, texts, _ = long_texts
    decoding = DecodingConfig(16, eos_id=-1)
    for number, (said, *_) in Generator(config, params, decoding)(texts):
        text_1L = jnp.asarray([[*texts[number], *said.tokens]])
        batch = features("decoder", text_1L, np.ones(text_1L.shape, bool))
        batch["decoder_prefix_mask"] = jnp.zeros_like(text_1L)
        logits_1LV, _ = jax.jit(forward, static_argnames=("config", "is_training"))(
            config, params, batch, is_training=False
        )
        want = logits_1LV[0, len(texts[number]) - 1 : -1].argmax(axis=1)
        assert said.tokens == want.tolist()


@pytest.mark.parametrize("is_bidirectional", [False, slow(True)])
def test_temporaries_grow_with_the_prompt(is_bidirectional):
    """By the compiler's account: twice the prompt takes twice the memory at most, where a whole
    pass takes four times (a bidirectional prompt has one)."""
    config, decoding = for_decoding(MIXTRAL), DecodingConfig(16)
    decoding = dataclasses.replace(decoding, is_prompt_bidirectional=is_bidirectional)
    rows = Rows(jnp.arange(1), jnp.ones(1, bool), jnp.full(1, 16), RowSettings.of([decoding]))

    def temporaries(P):
        compiled = prefill.lower(
            config,
            decoding.program,
            abstract_params(config),
            prompt_BP=jax.ShapeDtypeStruct((1, P), jnp.int32),
            is_prompt_BP=jax.ShapeDtypeStruct((1, P), bool),
            rows=rows,
        ).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ratio = temporaries(16 * CHUNK) / temporaries(8 * CHUNK)
    assert ratio > 3.5 if is_bidirectional else ratio < 2.1
