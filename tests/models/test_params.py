# SPDX-License-Identifier: Apache-2.0
"""Whole models: what sees what, by gradient; scanned equals unrolled; remat; names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.axes import dims_of
from switchx.models.config import ModelConfig, Precision, SwitchConfig
from switchx.models.params import abstract_params, bind, forward, init_params
from tests.models.batches import make_batch

V = 40
SWITCH = SwitchConfig(4, every=2, capacity_factor=8.0, eval_capacity_factor=8.0, jitter=0.0)
T5 = ModelConfig("encoder_decoder", V, 16, 24, 2, 8, 4, 4, activation="relu", switch=SWITCH)
T5_DECODER = dataclasses.replace(
    T5, architecture="decoder_only", num_encoder_layers=0, activation="swiglu"
)
GPT = dataclasses.replace(
    T5_DECODER,
    norm="layer",
    positions="learned",
    max_length=16,
    use_bias=True,
    scale_attention=True,
    activation="gelu",
    scale_tied_logits=False,
)
UNTIED = dataclasses.replace(T5, tie_embeddings=False, activation="geglu")
CONFIGS = {"t5": T5, "t5_decoder": T5_DECODER, "gpt": GPT, "untied": UNTIED}


def batch_for(config):
    return make_batch(V, is_encoder_decoder=config.is_encoder_decoder)


def embedding_gradient(config, params, batch, row, position):
    """Norm of d logits[row, position] / d embedded token, for decoder and encoder tokens.

    Every token of the batch is given a row of its own in a widened table, so that the
    gradient by table row is the gradient by position.
    """
    batch = dict(batch)
    names = [n for n in ("encoder_input_tokens", "decoder_input_tokens") if n in batch]
    table, offsets = [], {}
    original = np.asarray(params["embedding"]["embedding_VD"])
    for name in names:
        offsets[name] = sum(map(len, table))
        tokens = batch[name].reshape(-1)
        table.append(original[tokens])
        batch[name] = (offsets[name] + np.arange(tokens.size)).reshape(batch[name].shape)
    table_VD = jnp.asarray(np.concatenate(table))

    def logit(table_VD):
        changed = params | {"embedding": params["embedding"] | {"embedding_VD": table_VD}}
        wide = dataclasses.replace(config, vocab_size=len(table_VD), tie_embeddings=False)
        changed["embedding"]["w_logits_DV"] = original.T
        model = bind(wide, changed)
        return jnp.sum(model(batch, is_training=False)[0][row, position] ** 2)

    norms = np.linalg.norm(jax.jit(jax.grad(logit))(table_VD), axis=-1)
    return {
        name: norms[offsets[name] :][: batch[name].size].reshape(batch[name].shape)
        for name in names
    }


@pytest.mark.parametrize("name", ["t5", "t5_decoder", "gpt"])
def test_causality_and_packing_isolation_by_gradient(name):
    config = CONFIGS[name]
    params = init_params(config, jax.random.key(0))
    batch = batch_for(config)
    segment_BL = batch["decoder_segment_ids"]
    for row, position in [(0, 2), (0, 5), (1, 3)]:
        norms = embedding_gradient(config, params, batch, row, position)
        sees_BL = norms["decoder_input_tokens"] > 1e-9
        expected_BL = np.zeros_like(sees_BL)
        same = segment_BL[row] == segment_BL[row, position]
        expected_BL[row] = same & (np.arange(len(same)) <= position)
        np.testing.assert_array_equal(sees_BL, expected_BL)
        if config.is_encoder_decoder:
            sees_BM = norms["encoder_input_tokens"] > 1e-9
            expected_BM = np.zeros_like(sees_BM)
            expected_BM[row] = batch["encoder_segment_ids"][row] == segment_BL[row, position]
            np.testing.assert_array_equal(sees_BM, expected_BM)


def test_a_prefix_is_seen_from_everywhere_in_its_example():
    params = init_params(T5_DECODER, jax.random.key(0))
    batch = batch_for(T5_DECODER)
    batch["decoder_prefix_mask"][1, :4] = 1
    norms = embedding_gradient(T5_DECODER, params, batch, 1, 0)["decoder_input_tokens"]
    np.testing.assert_array_equal(norms[1] > 1e-9, np.arange(len(norms[1])) < 4)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_examples_get_the_logits_they_get_alone(name):
    config = CONFIGS[name]
    params = init_params(config, jax.random.key(0))
    batch = batch_for(config)
    run = jax.jit(lambda b: forward(config, params, b, is_training=False)[0])
    packed_BLV = run(batch)
    alone = {}
    for key, value in batch.items():
        side = "encoder_segment_ids" if key.startswith("encoder") else "decoder_segment_ids"
        start = int(np.argmax(batch[side][0] == 2))
        size = int(np.sum(batch[side][0] == 2))
        alone[key] = np.zeros_like(value[:1])
        alone[key][0, :size] = value[0, start : start + size]
    start = int(np.argmax(batch["decoder_segment_ids"][0] == 2))
    for key in ("encoder_segment_ids", "decoder_segment_ids"):
        if key in alone:
            alone[key] = np.minimum(alone[key], 1)
    np.testing.assert_allclose(
        run(alone)[0, :3], packed_BLV[0, start : start + 3], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_scanned_equals_unrolled(name):
    config = CONFIGS[name]
    scanned = dataclasses.replace(config, scan_layers=True)
    params = init_params(scanned, jax.random.key(0))
    period = config.period

    def unroll(stack):
        repeats = jax.tree.leaves(stack["blocks"])[0].shape[0]
        blocks = {
            f"layer_{r * period + i}": jax.tree.map(
                lambda x, r=r: x[r], stack["blocks"][f"layer_{i}"]
            )
            for r in range(repeats)
            for i in range(period)
        }
        return stack | {"blocks": blocks}

    unrolled = {k: unroll(v) if "coder" in k else v for k, v in params.items()}
    batch = batch_for(config)
    want, want_stats = forward(config, unrolled, batch, is_training=True)
    got, got_stats = forward(scanned, params, batch, is_training=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got_stats.load_E, want_stats.load_E)


@pytest.mark.parametrize("remat", ["minimal", "full"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_changes_no_gradient(remat, scan_layers):
    config = dataclasses.replace(T5, scan_layers=scan_layers)
    params = init_params(config, jax.random.key(0))
    batch = batch_for(config)

    def loss(params, config):
        logits, stats = forward(config, params, batch, is_training=True, key=jax.random.key(1))
        return jnp.mean(logits**2) + jnp.sum(stats.balance_loss)

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    want, got = grad(params, config), grad(params, dataclasses.replace(config, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float32(dtype):
    config = dataclasses.replace(T5, precision=Precision(compute=dtype))
    params = init_params(T5, jax.random.key(0))
    batch = batch_for(T5)
    want, _ = forward(T5, params, batch, is_training=False)
    got, _ = forward(config, params, batch, is_training=False)
    assert got.dtype == jnp.float32
    assert float(jnp.std(got - want) / jnp.std(want)) < (0.05 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_parameter_is_named_by_its_dimensions(name, scan_layers):
    config = dataclasses.replace(CONFIGS[name], scan_layers=scan_layers)
    sizes = {"D": 16, "F": 24, "H": 2, "K": 8, "V": V, "E": 4, "U": 32, "L": 16, "N": 2}
    for path, leaf in tree.named_leaves(abstract_params(config)).items():
        dims = dims_of(path.rsplit("/", 1)[-1], len(leaf.shape))
        assert leaf.shape == tuple(sizes[letter] for letter in dims), path


def test_dropout_is_random_in_training_and_absent_without_a_key():
    config = dataclasses.replace(T5, dropout_rate=0.5)
    params = init_params(config, jax.random.key(0))
    batch = batch_for(config)
    run = jax.jit(lambda key: forward(config, params, batch, is_training=True, key=key)[0])
    same = np.asarray(run(jax.random.key(1)))
    np.testing.assert_array_equal(same, run(jax.random.key(1)))
    assert not np.allclose(same, run(jax.random.key(2)))
    plain = forward(T5, params, batch, is_training=False)[0]
    np.testing.assert_allclose(
        forward(config, params, batch, is_training=False)[0], plain, rtol=1e-6
    )
