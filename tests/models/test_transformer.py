# SPDX-License-Identifier: Apache-2.0
"""Whole models of both architectures against float64 NumPy: logits, statistics, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params, bind, forward
from switchx.models.unroll import unrolled
from tests.absent_devices import compute_cudnn_by_xla
from tests.compare import assert_slope
from tests.layers.weights import numbers_like
from tests.models import oracle
from tests.models.batches import GPT_STYLE, make_batch

V = 17
# Some tokens are dropped in training, of either stack.
SWITCH = SwitchConfig(
    3, every=2, capacity_factor=0.8, eval_capacity_factor=8.0, min_capacity=1,
    router=RouterConfig(jitter=0.0),
)  # fmt: skip
T5 = ModelConfig("encoder_decoder", V, 8, 12, 2, 4, 2, 2, activation="relu", switch=SWITCH)
UNTIED = dataclasses.replace(T5, activation="geglu", switch=None, tie_embeddings=False)
TUPE = dataclasses.replace(T5, positions="tupe", max_length=11, scale_attention=True)
DECODER = dataclasses.replace(T5, architecture="decoder_only", num_encoder_layers=0)
GPT = dataclasses.replace(DECODER, switch=None, max_length=8, **GPT_STYLE)
CASES = {
    "switch": T5,
    "untied": UNTIED,
    "tupe": TUPE,
    "decoder": dataclasses.replace(DECODER, switch=None, activation="swiglu"),
    "switch decoder": DECODER,
    "gpt": GPT,
}
for name in ("switch", "tupe"):
    CASES[f"{name} cudnn"] = dataclasses.replace(CASES[name], training_attention="cudnn")


def batch_of(config) -> dict:
    """Packed rows; in a decoder alone, the first example of row 0 has a prefix of two."""
    batch = make_batch(V, is_encoder_decoder=config.is_encoder_decoder)
    if not config.is_encoder_decoder:
        batch["decoder_prefix_mask"][0, :2] = 1
    return batch


def assert_same_logits(got_BLV, want_BLV, batch) -> None:
    """Those of tokens; padding may have any."""
    is_token_BL = batch["decoder_segment_ids"] > 0
    got, want = (x_BLV[is_token_BL] for x_BLV in (got_BLV, want_BLV))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_float64(name, monkeypatch):
    calls = compute_cudnn_by_xla(monkeypatch)
    config = CASES[name]
    batch, params = batch_of(config), numbers_like(abstract_params(config), scale=0.4)
    is_token_BL = batch["decoder_segment_ids"] > 0
    shape = (*is_token_BL.shape, V)
    target_BLV = np.random.default_rng(1).normal(size=shape) * is_token_BL[..., None]
    weights = np.array([3.0, 5.0])[: config.num_sparse_layers]

    def loss(params):
        model = bind(config, params)
        assert model.has_encoder == config.is_encoder_decoder
        logits_BLV, stats = model(batch, is_training=True)
        balance = 0.0 if stats is None else jnp.sum(stats.balance_loss * weights)
        return jnp.sum(logits_BLV * target_BLV) + balance, (logits_BLV, stats)

    grads, (logits_BLV, stats) = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert calls == ["cudnn"] * (6 if name.endswith("cudnn") else 0)  # 2 + 2 * 2 attentions

    want_BLV, losses = oracle.model(config, params, batch, is_training=True)
    assert_same_logits(logits_BLV, want_BLV, batch)
    if config.switch:
        # The encoder's statistics come first; all stacks dropped something.
        np.testing.assert_allclose(stats.balance_loss, losses, rtol=1e-5)
        stacks = ("encoder", "decoder") if config.is_encoder_decoder else ("decoder",)
        tokens = [(batch[f"{stack}_segment_ids"] > 0).sum() for stack in stacks]
        assert stats.tokens.tolist() == tokens and len({*tokens}) == len(stacks)
        assert np.all(stats.dropped > 0)
    else:
        assert stats is None

    def by_oracle(changed):
        logits_BLV, losses = oracle.model(config, changed, batch, is_training=True)
        return np.sum(logits_BLV * target_BLV) + np.dot(losses, weights)

    assert_slope(by_oracle, params, grads, rtol=1e-3)


def test_cudnn_is_asked_in_training_alone():
    config = CASES["switch cudnn"]

    def run(is_training):
        model = functools.partial(forward, config, is_training=is_training)
        return jax.eval_shape(model, abstract_params(config), batch_of(config))

    run(is_training=False)
    with pytest.raises(ValueError, match="training_attention='cudnn': JAX runs on cpu"):
        run(is_training=True)


def test_evaluation_has_its_own_capacity():
    batch, params = batch_of(T5), numbers_like(abstract_params(T5), scale=0.4)
    logits_BLV, stats = jax.jit(lambda p: bind(T5, p)(batch, is_training=False))(params)
    assert not np.any(stats.dropped)
    want_BLV, _ = oracle.model(T5, params, batch, is_training=False)
    assert_same_logits(logits_BLV, want_BLV, batch)


def test_only_a_gpt_has_learned_positions_and_stacks_of_t5_have_a_bias_each():
    gpt, t5 = abstract_params(GPT), abstract_params(UNTIED)
    assert set(gpt) == {"embedding", "decoder"} and set(t5) == {*gpt, "encoder"}
    assert gpt["embedding"]["positions_LD"].shape == (8, 8)
    assert "relative_bias" not in gpt["decoder"]
    assert set(t5["embedding"]) == {"embedding_VD", "w_logits_DV"}
    for stack in ("encoder", "decoder"):
        assert t5[stack]["relative_bias"]["bias_UH"].shape == (32, 2)
    for model, stack, has_memory in (
        (gpt, "decoder", False), (t5, "encoder", False), (t5, "decoder", True),
    ):  # fmt: skip
        assert ("cross_attention" in model[stack]["blocks"]["layer_0"]) == has_memory


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
    batch = batch_of(config)
    got_BLV, _ = jax.jit(lambda p: bind(config, p)(batch, is_training=False))(scanned)
    want_BLV, _ = oracle.model(*unrolled(config, scanned), batch)
    assert_same_logits(got_BLV, want_BLV, batch)
