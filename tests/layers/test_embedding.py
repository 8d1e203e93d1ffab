# SPDX-License-Identifier: Apache-2.0
"""Embeddings and logits against NumPy, in each form: T5's, T5 1.1's and GPT's."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.embedding import Embedding
from switchx.models.config import ModelConfig, Precision
from tests.layers.weights import with_params

V, D, MAX_LENGTH = 11, 6, 7
T5 = ModelConfig("decoder_only", V, D, 8, 2, 3, 1)
UNTIED = dataclasses.replace(T5, tie_embeddings=False)
GPT = dataclasses.replace(
    T5, positions="learned", max_length=MAX_LENGTH, scale_tied_logits=False
)

TOKENS_BL = np.array([[3, 10, 0, 3], [1, 2, 9, 5]])
# Two packed examples in the first row: positions start again.
POSITIONS_BL = np.array([[0, 1, 0, 1], [0, 1, 2, 3]])


def table(module, name):
    return np.asarray(getattr(module, name)[...])


def hidden():
    return np.random.default_rng(0).normal(size=(2, 4, D)).astype(np.float32)


def test_tokens_are_rows_of_the_table(key):
    embedding = Embedding(T5, key=key)
    x_BLD = embedding.embed(TOKENS_BL, POSITIONS_BL)
    for b in range(2):
        for i in range(4):
            expected = table(embedding, "embedding_VD")[TOKENS_BL[b, i]]
            np.testing.assert_array_equal(x_BLD[b, i], expected)
    assert not hasattr(embedding, "positions_LD")


def test_learned_positions_are_added_by_position_and_not_by_place(key):
    embedding = Embedding(GPT, key=key)
    x_BLD = embedding.embed(TOKENS_BL, POSITIONS_BL)
    assert table(embedding, "positions_LD").shape == (MAX_LENGTH, D)
    for b in range(2):
        for i in range(4):
            expected = (
                table(embedding, "embedding_VD")[TOKENS_BL[b, i]]
                + table(embedding, "positions_LD")[POSITIONS_BL[b, i]]
            )
            np.testing.assert_allclose(x_BLD[b, i], expected, rtol=1e-6)


def test_padding_may_lie_beyond_the_table(key):
    embedding = Embedding(GPT, key=key)
    x_BLD = embedding.embed(TOKENS_BL, np.full_like(POSITIONS_BL, MAX_LENGTH + 3))
    assert np.all(np.isfinite(x_BLD))


@pytest.mark.parametrize(
    ("config", "name", "divisor"),
    [
        (T5, "embedding_VD", math.sqrt(D)),  # T5 divides tied logits by sqrt(D)
        (GPT, "embedding_VD", 1.0),
        (UNTIED, "w_logits_DV", 1.0),  # T5 1.1 has a matrix of its own
    ],
    ids=["t5", "gpt", "untied"],
)
def test_logits(config, name, divisor, key):
    embedding, x_BLD = Embedding(config, key=key), hidden()
    assert hasattr(embedding, "w_logits_DV") == (name == "w_logits_DV")
    w = table(embedding, name)
    w_VD = w if name == "embedding_VD" else w.T
    expected = np.zeros((2, 4, V))
    for b, i, v in np.ndindex(2, 4, V):
        expected[b, i, v] = np.dot(x_BLD[b, i].astype(np.float64), w_VD[v]) / divisor
    logits_BLV = embedding.logits(jnp.asarray(x_BLD))
    np.testing.assert_allclose(logits_BLV, expected, rtol=1e-5, atol=1e-5)


def test_a_tied_table_gets_the_gradient_of_both_its_uses(key):
    """Against the derivative by hand: rows that were looked up, plus the logits' outer sum."""
    embedding = Embedding(T5, key=key)
    direction = np.random.default_rng(1).normal(size=(2, 4, D)).astype(np.float32)
    target = np.random.default_rng(2).normal(size=(2, 4, V)).astype(np.float32)

    def loss(table_VD):
        changed = with_params(embedding, {"embedding_VD": table_VD})
        x_BLD = changed.embed(TOKENS_BL, POSITIONS_BL)
        return jnp.sum(x_BLD * direction) + jnp.sum(changed.logits(hidden()) * target)

    grad = jax.grad(loss)(embedding.embedding_VD[...])
    expected = np.einsum("BLV,BLD->VD", target, hidden()) / math.sqrt(D)
    for b, i in np.ndindex(2, 4):
        expected[TOKENS_BL[b, i]] += direction[b, i]
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "stddev"), [(T5, 1.0), (UNTIED, 1.0), (GPT, 0.02)], ids=["t5", "untied", "gpt"]
)
def test_initial_deviations(config, stddev, key):
    config = dataclasses.replace(config, vocab_size=1000, d_model=40, init_scale=0.1)
    embedding = Embedding(dataclasses.replace(config, max_length=500), key=key)
    np.testing.assert_allclose(table(embedding, "embedding_VD").std(), stddev, rtol=0.03)
    if not config.tie_embeddings:
        deviation = table(embedding, "w_logits_DV").std()
        np.testing.assert_allclose(deviation, math.sqrt(0.1 / 40), rtol=0.03)
    if config.positions == "learned":
        np.testing.assert_allclose(table(embedding, "positions_LD").std(), 0.02, rtol=0.03)


def test_precision_of_embeddings_and_logits(key):
    embedding = Embedding(
        dataclasses.replace(GPT, precision=Precision(compute="bfloat16")), key=key
    )
    x_BLD = embedding.embed(TOKENS_BL, POSITIONS_BL)
    assert x_BLD.dtype == jnp.bfloat16
    # The sum of token and position is rounded once: they are added in float32.
    exact = table(embedding, "embedding_VD")[TOKENS_BL]
    exact = exact + table(embedding, "positions_LD")[POSITIONS_BL]
    np.testing.assert_array_equal(x_BLD, exact.astype(jnp.bfloat16))
    assert embedding.logits(x_BLD).dtype == jnp.float32
    half = dataclasses.replace(T5, precision=Precision(logits="bfloat16", params="bfloat16"))
    embedding = Embedding(half, key=key)
    assert embedding.logits(jnp.asarray(hidden())).dtype == jnp.bfloat16
    assert embedding.embedding_VD[...].dtype == jnp.bfloat16
