# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of T5X, written by hand in both layouts, against the parameters in them."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from switchx.interop.t5x import read_checkpoint
from switchx.models.config import RouterConfig, SwitchConfig
from tests.data.refusals import refused
from tests.interop.folders import T5, T5_1_1, assert_same_params
from tests.interop.t5x_files import by_layers, scanned, write_t5x
from tests.training.jobs import make_params

SWITCH = dataclasses.replace(
    T5, num_encoder_layers=4, num_decoder_layers=2, switch=SwitchConfig(3, every=2)
)
XXL = dataclasses.replace(SWITCH, activation="geglu", tie_embeddings=False)


@pytest.mark.parametrize("heads_apart", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("config", [T5, T5_1_1, SWITCH, XXL], ids=["t5", "1_1", "moe", "xxl"])
def test_by_layers(tmp_path, config, heads_apart):
    params = make_params(config)
    tree = by_layers(config, params, heads_apart=heads_apart)
    got_config, got = read_checkpoint(write_t5x(tmp_path / "checkpoint_7", tree), config)
    assert got_config == config
    assert_same_params(got, params)


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


def test_blocks_with_relative_biases_of_their_own(tmp_path):
    tree = scanned(by_layers(SWITCH, make_params(SWITCH)), 2, own_bias=True)
    tree["target/encoder/encoder/subblock_1/relpos_bias/rel_embedding"][0, 1, 0] += 1
    folder = write_t5x(tmp_path / "checkpoint_7", tree)
    with refused(
        f"{folder}: the blocks of the encoder have relative biases of their own (<any>); "
        "switchx has one a stack, as T5 has, so this model cannot be converted"
    ):
        read_checkpoint(folder, SWITCH)


def test_models_that_t5x_has_not(tmp_path):
    config = dataclasses.replace(
        T5, norm="layer", switch=SwitchConfig(3, every=2, shared_d_ff=4)
    )
    with refused(
        "the gin file describes no model of T5X's: norm='layer' (expected 'rms')<any>"
        "SwitchConfig.shared_d_ff=4 (expected None); <any>"
    ):
        read_checkpoint(tmp_path, config)
    tupe = dataclasses.replace(T5, positions="tupe", max_length=9, scale_attention=True)
    with refused("the gin file describes no model of T5X's: positions='tupe' <any>"):
        read_checkpoint(tmp_path, tupe)
    hashed = SwitchConfig(3, every=2, router=RouterConfig("hash", exploration="none"))
    with refused("<any>T5X's: RouterConfig.kind='hash'; <any>"):
        read_checkpoint(tmp_path, dataclasses.replace(T5, switch=hashed))
