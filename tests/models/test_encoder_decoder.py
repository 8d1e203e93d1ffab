# SPDX-License-Identifier: Apache-2.0
"""The encoder-decoder against float64 NumPy: logits, statistics, gradients, and its halves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params, bind
from switchx.models.unroll import unrolled
from tests.absent_devices import compute_cudnn_by_xla
from tests.compare import assert_slope
from tests.layers.weights import numbers_like
from tests.models import oracle
from tests.models.batches import make_batch

V = 17
SWITCH = SwitchConfig(
    3,
    every=2,
    capacity_factor=0.8,
    eval_capacity_factor=8.0,
    min_capacity=1,
    router=RouterConfig(jitter=0.0),
)
SPARSE = ModelConfig("encoder_decoder", V, 8, 12, 2, 4, 2, 2, activation="relu", switch=SWITCH)
UNTIED = dataclasses.replace(SPARSE, activation="geglu", switch=None, tie_embeddings=False)
TUPE = dataclasses.replace(SPARSE, positions="tupe", max_length=11, scale_attention=True)
CASES = {"switch": SPARSE, "untied": UNTIED, "tupe": TUPE}
for name in ("switch", "tupe"):
    CASES[f"{name} cudnn"] = dataclasses.replace(CASES[name], training_attention="cudnn")


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_float64(name, monkeypatch):
    calls = compute_cudnn_by_xla(monkeypatch)
    config, batch = CASES[name], make_batch(V, is_encoder_decoder=True)
    params = numbers_like(abstract_params(config), scale=0.4)
    is_token_BL = batch["decoder_segment_ids"] > 0
    shape = (*is_token_BL.shape, V)
    target_BLV = np.random.default_rng(1).normal(size=shape) * is_token_BL[..., None]

    def loss(params):
        model = bind(config, params)
        assert model.has_encoder
        logits_BLV, stats = model(batch, is_training=True)
        balance = 0.0 if stats is None else jnp.sum(stats.balance_loss * np.array([3.0, 5.0]))
        return jnp.sum(logits_BLV * target_BLV) + balance, (logits_BLV, stats)

    grads, (logits_BLV, stats) = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert calls == ["cudnn"] * (6 if name.endswith("cudnn") else 0)  # 2 + 2 * 2 attentions
    want_BLV, losses = oracle.model(config, params, batch, is_training=True)
    np.testing.assert_allclose(
        logits_BLV[is_token_BL], want_BLV[is_token_BL], rtol=1e-4, atol=1e-4
    )
    if config.switch:
        # The encoder's statistics come first; both stacks dropped something.
        np.testing.assert_allclose(stats.balance_loss, losses, rtol=1e-5)
        tokens = [(batch["encoder_segment_ids"] > 0).sum(), is_token_BL.sum()]
        assert stats.tokens.tolist() == tokens
        assert tokens[0] != tokens[1]
        assert np.all(stats.dropped > 0)
    else:
        assert stats is None

    def by_oracle(changed):
        logits_BLV, losses = oracle.model(config, changed, batch, is_training=True)
        return np.sum(logits_BLV * target_BLV) + np.dot(losses, [3.0, 5.0][: len(losses)])

    assert_slope(by_oracle, params, grads, rtol=1e-3)


def test_cudnn_is_asked_in_training_alone():
    config, batch = CASES["switch cudnn"], make_batch(V, is_encoder_decoder=True)
    model = bind(config, numbers_like(abstract_params(config)))
    model(batch, is_training=False)
    with pytest.raises(ValueError, match="training_attention='cudnn': JAX runs on cpu"):
        model(batch, is_training=True)


def test_evaluation_has_its_own_capacity():
    batch = make_batch(V, is_encoder_decoder=True)
    params = numbers_like(abstract_params(SPARSE), scale=0.4)
    logits_BLV, stats = jax.jit(lambda p: bind(SPARSE, p)(batch, is_training=False))(params)
    assert not np.any(stats.dropped)
    want_BLV, _ = oracle.model(SPARSE, params, batch, is_training=False)
    is_token_BL = batch["decoder_segment_ids"] > 0
    np.testing.assert_allclose(
        logits_BLV[is_token_BL], want_BLV[is_token_BL], rtol=1e-4, atol=1e-4
    )


def test_the_stacks_have_a_bias_each_and_share_the_embedding():
    params = abstract_params(UNTIED)
    assert set(params) == {"embedding", "encoder", "decoder"}
    assert set(params["embedding"]) == {"embedding_VD", "w_logits_DV"}
    for stack in ("encoder", "decoder"):
        assert params[stack]["relative_bias"]["bias_UH"].shape == (32, 2)
    assert "cross_attention" not in params["encoder"]["blocks"]["layer_0"]
    assert "cross_attention" in params["decoder"]["blocks"]["layer_0"]


def test_with_tupe_the_stacks_have_positions_each_and_scanned_layers_share_them():
    """The scanned model is the unrolled one, whose logits a loop has checked."""
    params = abstract_params(TUPE)
    for stack in ("encoder", "decoder"):
        assert "relative_bias" not in params[stack]
        shapes = {name: leaf.shape for name, leaf in params[stack]["untied_positions"].items()}
        projection = {"w_query_DHK": (8, 2, 4), "w_key_DHK": (8, 2, 4)}
        assert shapes == {"positions_LD": (11, 8)} | projection
    config = dataclasses.replace(
        TUPE, positions="tupe_relative", scan_layers=True, num_encoder_layers=4
    )
    scanned = numbers_like(abstract_params(config), scale=0.4)
    assert {"relative_bias", "untied_positions"} <= scanned["encoder"].keys()
    batch = make_batch(V, is_encoder_decoder=True)
    got_BLV, _ = jax.jit(lambda p: bind(config, p)(batch, is_training=False))(scanned)
    want_BLV, _ = oracle.model(*unrolled(config, scanned), batch)
    is_token_BL = batch["decoder_segment_ids"] > 0
    np.testing.assert_allclose(
        got_BLV[is_token_BL], want_BLV[is_token_BL], rtol=1e-4, atol=1e-4
    )
