# SPDX-License-Identifier: Apache-2.0
"""Decoder-only models, T5's style and GPT's, against float64 NumPy: logits and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params, bind
from tests.compare import assert_slope
from tests.layers.weights import numbers_like
from tests.models import oracle
from tests.models.batches import make_batch

V = 17
SWITCH = SwitchConfig(
    3, every=2, capacity_factor=1.0, min_capacity=1, router=RouterConfig(jitter=0.0)
)
T5_STYLE = ModelConfig("decoder_only", V, 8, 12, 2, 4, 2, activation="swiglu")
SPARSE = dataclasses.replace(T5_STYLE, activation="relu", switch=SWITCH)
GPT = dataclasses.replace(
    T5_STYLE,
    activation="gelu",
    norm="layer",
    positions="learned",
    max_length=8,
    use_bias=True,
    scale_attention=True,
    scale_tied_logits=False,
)
CASES = {"t5_style": T5_STYLE, "switch": SPARSE, "gpt": GPT}


def packed_batch():
    """Packed rows; the first example of row 0 has a prefix of two."""
    batch = make_batch(V, is_encoder_decoder=False)
    batch["decoder_prefix_mask"][0, :2] = 1
    return batch


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_float64(name):
    config, batch = CASES[name], packed_batch()
    params = numbers_like(abstract_params(config), scale=0.4)
    is_token_BL = batch["decoder_segment_ids"] > 0
    shape = (*is_token_BL.shape, V)
    target_BLV = np.random.default_rng(1).normal(size=shape) * is_token_BL[..., None]

    def loss(params):
        model = bind(config, params)
        assert not model.has_encoder
        logits_BLV, stats = model(batch, is_training=True)
        balance = 0.0 if stats is None else jnp.sum(stats.balance_loss)
        return jnp.sum(logits_BLV * target_BLV) + 3.0 * balance, (logits_BLV, stats)

    grads, (logits_BLV, stats) = jax.jit(jax.grad(loss, has_aux=True))(params)
    want_BLV, losses = oracle.model(config, params, batch, is_training=True)
    np.testing.assert_allclose(
        logits_BLV[is_token_BL], want_BLV[is_token_BL], rtol=1e-4, atol=1e-4
    )
    if config.switch:
        np.testing.assert_allclose(stats.balance_loss, losses, rtol=1e-5)
        assert stats.tokens.tolist() == [is_token_BL.sum()]
    else:
        assert stats is None

    def by_oracle(changed):
        logits_BLV, losses = oracle.model(config, changed, batch, is_training=True)
        return np.sum(logits_BLV * target_BLV) + 3.0 * sum(losses)

    assert_slope(by_oracle, params, grads, rtol=1e-3)


def test_only_a_gpt_has_learned_positions_and_only_t5_a_relative_bias():
    gpt, t5 = abstract_params(GPT), abstract_params(T5_STYLE)
    assert gpt["embedding"]["positions_LD"].shape == (8, 8)
    assert "relative_bias" not in gpt["decoder"]
    assert "positions_LD" not in t5["embedding"]
    assert t5["decoder"]["relative_bias"]["bias_UH"].shape == (32, 2)
    assert set(gpt) == set(t5) == {"embedding", "decoder"}
    assert "cross_attention" not in gpt["decoder"]["blocks"]["layer_0"]
