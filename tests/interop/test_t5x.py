# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of T5X in both layouts: names, arrays, and models that T5X has not."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from switchx.interop.t5x import Origin, bias_names, origins, read_checkpoint, their_shapes
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.tree import named_leaves
from tests.data.refusals import refused
from tests.interop.folders import T5, T5_1_1, assert_same_params
from tests.interop.t5x_files import SWITCH, by_layers, scanned, write_t5x
from tests.training.jobs import make_params

BASE = ModelConfig(
    "encoder_decoder", 32128, 768, 3072, 12, 64, 12, 12, activation="relu",
    switch=SwitchConfig(128),
)  # fmt: skip


def test_switch_base_by_layers():
    """Names and shapes of jax.eval_shape over T5X's switch_base.gin: 269 arrays."""
    got = origins(BASE, ())
    assert got.keys() == named_leaves(abstract_params(BASE)).keys()
    shapes = {place.name: their_shapes(ours, BASE, None)[0] for ours, place in got.items()}
    assert len(shapes) == 269
    assert shapes["target/token_embedder/embedding"] == (32128, 768)
    assert shapes["target/encoder/relpos_bias/rel_embedding"] == (12, 32)
    assert shapes["target/encoder/layers_0/attention/query/kernel"] == (768, 768)
    assert shapes["target/encoder/layers_0/mlp/wi/kernel"] == (768, 3072)
    assert shapes["target/encoder/layers_1/mlp/router/router_weights/w/kernel"] == (768, 128)
    assert shapes["target/encoder/layers_1/mlp/expert/wi/kernel"] == (128, 768, 3072)
    assert shapes["target/encoder/layers_1/mlp/expert/wo/kernel"] == (128, 3072, 768)
    block = "target/decoder/layers_11"
    assert {name.removeprefix(f"{block}/") for name in shapes if block in name} == {
        *(
            f"{attention}/{part}/kernel"
            for attention in ("self_attention", "encoder_decoder_attention")
            for part in ("query", "key", "value", "out")
        ),
        "pre_self_attention_layer_norm/scale", "pre_cross_attention_layer_norm/scale",
        "pre_mlp_layer_norm/scale",
        "mlp/router/router_weights/w/kernel", "mlp/expert/wi/kernel", "mlp/expert/wo/kernel",
    }  # fmt: skip


def test_gated_names_biases_and_joined_heads():
    names = {place.name for place in origins(T5_1_1, ()).values()}
    assert {f"target/encoder/layers_0/mlp/{m}/kernel" for m in ("wi_0", "wi_1", "wo")} <= names
    assert "target/decoder/logits_dense/kernel" in names
    shared, own = (
        f"target/encoder/{each}relpos_bias/rel_embedding" for each in ("", "encoder/")
    )
    assert bias_names("encoder", {shared, own}) == [shared]
    assert bias_names("encoder", {own}) == [own]
    assert bias_names("encoder", set()) == [shared]
    assert their_shapes("a/scale_D", BASE, 6) == [(768, 6)]
    assert their_shapes("a/w_query_DHK", BASE, 6) == [(768, 6, 768), (768, 6, 12, 64)]


def test_scanned_names_tell_the_layout():
    found = {f"target/encoder/encoder/subblock_{i}/pre_mlp_layer_norm/scale" for i in (0, 1)}
    got = origins(dataclasses.replace(BASE, switch=None), found)
    assert got["encoder/blocks/layer_5/ffn_norm/scale_D"] == Origin(
        "target/encoder/encoder/subblock_1/pre_mlp_layer_norm/scale", 2
    )
    # Each stack has its own.
    assert got["decoder/blocks/layer_5/ffn_norm/scale_D"] == Origin(
        "target/decoder/layers_5/pre_mlp_layer_norm/scale"
    )
    got = origins(BASE, {"target/decoder/decoder/pre_mlp_layer_norm/scale"})
    assert got["decoder/blocks/layer_5/ffn_norm/scale_D"] == Origin(
        "target/decoder/decoder/pre_mlp_layer_norm/scale", 5
    )


XXL = dataclasses.replace(SWITCH, activation="geglu", tie_embeddings=False)


@pytest.mark.parametrize("heads_apart", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("config", [T5, T5_1_1, SWITCH, XXL], ids=["t5", "1_1", "moe", "xxl"])
def test_by_layers(tmp_path, config, heads_apart):
    params = make_params(config)
    tree = by_layers(config, params, heads_apart=heads_apart)
    folder, scratch = write_t5x(tmp_path / "checkpoint_7", tree), tmp_path / "scratch"
    scratch.mkdir()
    got_config, got = read_checkpoint(folder, config, scratch)
    assert got_config == config
    assert_same_params(got, params)
    # In files, and not in memory.
    assert len(list(scratch.iterdir())) == len(named_leaves(params))


@pytest.mark.parametrize("own_bias", [False, True])
@pytest.mark.parametrize("config", [T5_1_1, SWITCH], ids=["1_1", "moe"])
def test_scanned(tmp_path, config, own_bias):
    params = make_params(config)
    tree = scanned(by_layers(config, params), config.period, own_bias=own_bias)
    folder = write_t5x(tmp_path / "checkpoint_7", tree)
    got_config, got = read_checkpoint(folder, dataclasses.replace(config, scan_layers=True))
    assert got_config == config  # its layers are unrolled
    assert_same_params(got, params)


def test_scanned_arrays_are_stacked_along_axis_1():
    """The names and shapes that flaxformer's scanned modules give."""
    tree = scanned(by_layers(SWITCH, make_params(SWITCH)), 2)
    D, F, HK, E = 12, 20, 12, 3
    assert {
        name.removeprefix("target/encoder/encoder/subblock_1/"): array.shape
        for name, array in tree.items()
        if "encoder/encoder/subblock_1" in name
    } == {
        "attention/query/kernel": (D, 2, HK),
        "attention/key/kernel": (D, 2, HK),
        "attention/value/kernel": (D, 2, HK),
        "attention/out/kernel": (HK, 2, D),
        "pre_attention_layer_norm/scale": (D, 2),
        "pre_mlp_layer_norm/scale": (D, 2),
        "mlp/router/router_weights/w/kernel": (D, 2, E),
        "mlp/expert/wi/kernel": (E, 2, D, F),
        "mlp/expert/wo/kernel": (E, 2, F, D),
    }


def test_16_bits_compressed_and_said_to_be_in_a_bucket(tmp_path):
    params = make_params(T5)
    tree = by_layers(T5, params)
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in tree.items()}
    folder = write_t5x(tmp_path / "checkpoint_7", half, driver="gcs", compressor="gzip")
    _, got = read_checkpoint(folder, T5)
    table = tree["target/token_embedder/embedding"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got["embedding"]["embedding_VD"], table.astype(np.float32))


def test_arrays_that_the_model_has_not_are_all_named(tmp_path):
    tree = by_layers(SWITCH, make_params(SWITCH))
    del tree["target/decoder/layers_0/mlp/wi/kernel"]
    tree["target/encoder/layers_0/extra_mlp/wi_0/kernel"] = np.ones((12, 8), np.float32)
    folder = write_t5x(tmp_path / "checkpoint_7", tree)
    config = dataclasses.replace(SWITCH, switch=SwitchConfig(5, every=2))
    with pytest.raises(ValueError) as caught:
        read_checkpoint(folder, config)
    text = str(caught.value)
    for line in (
        f"{folder} does not hold the model that is described; 11 of ",
        "target/decoder/layers_0/mlp/wi/kernel: expected shape [12, 20], got nothing",
        "target/encoder/layers_0/extra_mlp/wi_0/kernel: expected nothing, got shape [12, 8]",
        "target/encoder/layers_3/mlp/expert/wi/kernel: expected shape [5, 12, 20], got shape "
        "[3, 12, 20]",
        "give the gin file of the model that this is",
    ):
        assert line in text, text


def test_models_and_biases_that_t5x_has_not_or_we_have_not(tmp_path):
    tree = scanned(by_layers(SWITCH, make_params(SWITCH)), 2, own_bias=True)
    tree["target/encoder/encoder/subblock_1/relpos_bias/rel_embedding"][0, 1, 0] += 1
    folder = write_t5x(tmp_path / "checkpoint_7", tree)
    with refused(
        f"{folder}: the blocks of the encoder have relative biases of their own (<any>)"
    ):
        read_checkpoint(folder, SWITCH)
    config = dataclasses.replace(
        T5, norm="layer", switch=SwitchConfig(3, every=2, shared_d_ff=4)
    )
    with refused(
        "the gin file describes no model of T5X's: norm='layer' (expected "
        "'rms')<any>SwitchConfig.shared_d_ff=4 (expected None)"
    ):
        read_checkpoint(tmp_path, config)
    tupe = dataclasses.replace(T5, positions="tupe", max_length=9, scale_attention=True)
    with refused("the gin file describes no model of T5X's: positions='tupe' "):
        read_checkpoint(tmp_path, tupe)
    hashed = SwitchConfig(3, every=2, router=RouterConfig("hash", exploration="none"))
    with refused("T5X's: RouterConfig.kind='hash'"):
        read_checkpoint(tmp_path, dataclasses.replace(T5, switch=hashed))
