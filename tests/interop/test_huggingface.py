# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face: names, there and back, and every difference refused at once."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from switchx.data.vocabulary_training import train_sentencepiece
from switchx.interop.families import FAMILIES
from switchx.interop.huggingface import read_checkpoint, write_checkpoint
from switchx.interop.tensor_folder import is_linear
from switchx.models.params import abstract_params
from switchx.models.unroll import unrolled
from switchx.tree import named_leaves
from tests.data.refusals import refused
from tests.data.words import sentences
from tests.interop.folders import (
    SWITCH,
    T5,
    T5_1_1,
    assert_same_params,
    change_config,
    change_tensors,
    huggingface_folder,
)
from tests.training.jobs import make_params

UMT5 = dataclasses.replace(T5_1_1, relative_bias_per_layer=True)


def test_names_of_tensors():
    for config, family in ((T5, "t5"), (T5_1_1, "mt5"), (SWITCH, "switch_transformers")):
        names = FAMILIES[family].tensor_names(config)
        assert names.keys() == named_leaves(abstract_params(config)).keys()
        tensors = [name for theirs in names.values() for name in theirs]
        assert len(tensors) == len(set(tensors))
    names = FAMILIES["t5"].tensor_names(T5_1_1)
    block = "decoder/blocks/layer_1"
    of_block = {ours: theirs for ours, (theirs,) in names.items() if block in ours}
    assert {ours.removeprefix(f"{block}/"): name for ours, name in of_block.items()} == {
        "self_attention_norm/scale_D": "decoder.block.1.layer.0.layer_norm.weight",
        "self_attention/w_query_DHK": "decoder.block.1.layer.0.SelfAttention.q.weight",
        "self_attention/w_key_DHK": "decoder.block.1.layer.0.SelfAttention.k.weight",
        "self_attention/w_value_DHK": "decoder.block.1.layer.0.SelfAttention.v.weight",
        "self_attention/w_out_HKD": "decoder.block.1.layer.0.SelfAttention.o.weight",
        "cross_attention_norm/scale_D": "decoder.block.1.layer.1.layer_norm.weight",
        "cross_attention/w_query_DHK": "decoder.block.1.layer.1.EncDecAttention.q.weight",
        "cross_attention/w_key_DHK": "decoder.block.1.layer.1.EncDecAttention.k.weight",
        "cross_attention/w_value_DHK": "decoder.block.1.layer.1.EncDecAttention.v.weight",
        "cross_attention/w_out_HKD": "decoder.block.1.layer.1.EncDecAttention.o.weight",
        "ffn_norm/scale_D": "decoder.block.1.layer.2.layer_norm.weight",
        "ffn/w_in_DF": "decoder.block.1.layer.2.DenseReluDense.wi_0.weight",
        "ffn/w_gate_DF": "decoder.block.1.layer.2.DenseReluDense.wi_1.weight",
        "ffn/w_out_FD": "decoder.block.1.layer.2.DenseReluDense.wo.weight",
    }  # fmt: skip
    assert names["embedding/w_logits_DV"] == ("lm_head.weight",)
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert names["encoder/relative_bias/bias_UH"] == (bias,)
    assert "embedding/w_logits_DV" not in FAMILIES["t5"].tensor_names(T5)
    names = FAMILIES["switch_transformers"].tensor_names(SWITCH)
    ffn = "encoder/blocks/layer_1/ffn"
    assert names[f"{ffn}/w_router_DE"] == (
        "encoder.block.1.layer.1.mlp.router.classifier.weight",
    )
    assert names[f"{ffn}/experts/w_out_EFD"] == tuple(
        f"encoder.block.1.layer.1.mlp.experts.expert_{e}.wo.weight" for e in range(4)
    )
    assert names["decoder/blocks/layer_3/ffn/w_in_DF"] == (
        "decoder.block.3.layer.2.mlp.wi.weight",
    )
    assert is_linear("a/w_query_DHK") and is_linear("a/w_router_DE")
    assert not any(map(is_linear, ("a/scale_D", "a/bias_UH", "embedding/embedding_VD")))


UNSCALED = dataclasses.replace(T5, scale_tied_logits=False)


@pytest.mark.parametrize("config", [T5, T5_1_1, SWITCH], ids=["t5", "t5_1_1", "switch"])
@pytest.mark.parametrize("most_shard_bytes", [10**9, 3000])
def test_there_and_back(tmp_path, config, most_shard_bytes):
    folder, params = huggingface_folder(tmp_path, config, most_shard_bytes=most_shard_bytes)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == config
    assert checkpoint.vocabulary is None
    assert_same_params(checkpoint.params, params)


def test_scanned_layers_are_written_one_by_one(tmp_path):
    config = dataclasses.replace(T5, scan_layers=True)
    params = make_params(config)
    write_checkpoint(tmp_path, config, params)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.config == T5
    assert_same_params(checkpoint.params, unrolled(config, params)[1])


def test_logits_of_the_table_without_the_division_are_a_matrix_that_equals_it(tmp_path):
    folder, params = huggingface_folder(tmp_path, UNSCALED)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    checkpoint = read_checkpoint(folder)
    assert not checkpoint.config.tie_embeddings
    embedding = checkpoint.params["embedding"]
    np.testing.assert_array_equal(embedding["w_logits_DV"], embedding["embedding_VD"].T)
    np.testing.assert_array_equal(
        embedding["embedding_VD"], params["embedding"]["embedding_VD"]
    )


def test_the_vocabulary_comes_along(tmp_path):
    (tmp_path / "text.txt").write_text("".join(sentences(200)))
    train_sentencepiece([str(tmp_path / "text.txt")], 300, str(tmp_path))
    mine = tmp_path / "vocabulary.model"
    folder, _ = huggingface_folder(tmp_path / "a", vocabulary=mine)
    assert read_checkpoint(folder).vocabulary == folder / "spiece.model"
    assert (folder / "spiece.model").read_bytes() == mine.read_bytes()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert (tokenizer["tokenizer_class"], tokenizer["extra_ids"]) == ("T5Tokenizer", 100)


# Tensors that are there under further names, or under another one.


def table_under(*names):
    def change(tensors):
        table = tensors.pop("shared.weight")
        tensors |= {name: table.copy() for name in names}

    return change


@pytest.mark.parametrize(
    "names",
    [
        ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ("encoder.embed_tokens.weight",),
        ("shared.weight", "lm_head.weight"),
    ],
)
def test_a_tied_table_may_have_other_names(tmp_path, names):
    folder, params = huggingface_folder(tmp_path)
    change_tensors(folder, table_under(*names))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == T5
    assert_same_params(checkpoint.params, params)


def test_tensors_that_no_t5_reads_and_pickles_beside_are_passed_over(tmp_path):
    folder, params = huggingface_folder(tmp_path)
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: np.ones((32, 3), "f4")}))
    assert_same_params(read_checkpoint(folder).params, params)
    folder, params = huggingface_folder(tmp_path)
    opened = tmp_path / "opened"
    (folder / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {opened}'\ntR.".encode())
    assert_same_params(read_checkpoint(folder).params, params)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="pytorch_model.bin is no zip archive"):
        read_checkpoint(folder)
    assert not pathlib.Path(opened).exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [(T5_1_1, {"scale_decoder_outputs": False}), (UMT5, {})],
    ids=["t5", "umt5"],
)
def test_transformers_5_says_that_a_head_of_its_own_is_tied(tmp_path, config, said):
    folder, params = huggingface_folder(tmp_path, config)
    change_config(folder, tie_word_embeddings=True, **said)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == config
    assert_same_params(checkpoint.params, params)


@pytest.mark.parametrize(
    ("config", "said"),
    [(T5_1_1, {}), (UMT5, {"scale_decoder_outputs": True})],
    ids=["t5", "umt5"],
)
def test_a_head_of_its_own_that_is_said_to_be_tied(tmp_path, config, said):
    folder, _ = huggingface_folder(tmp_path, config)
    change_config(folder, tie_word_embeddings=True, **said)
    with refused(
        f"{folder}: shared.weight is not equal to lm_head.weight, which "
        "config.json says it is tied to"
    ):
        read_checkpoint(folder)


def test_gated_experts_are_found_by_their_names(tmp_path):
    """As in switch-xxl-128, with GELU's exact form; transformers has no code for them."""
    folder, params = huggingface_folder(tmp_path, SWITCH)

    def change(tensors):
        for name in [name for name in tensors if name.endswith(".wi.weight")]:
            wi = tensors.pop(name)
            tensors[name.replace(".wi.", ".wi_0.")] = wi
            tensors[name.replace(".wi.", ".wi_1.")] = wi + 1

    change_tensors(folder, change)
    change_config(folder, dense_act_fn="gelu", feed_forward_proj="gated-gelu")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == dataclasses.replace(SWITCH, activation="geglu_exact")
    assert checkpoint.notes == ()
    experts = checkpoint.params["encoder"]["blocks"]["layer_1"]["ffn"]["experts"]
    want = params["encoder"]["blocks"]["layer_1"]["ffn"]["experts"]["w_in_EDF"]
    np.testing.assert_array_equal(experts["w_in_EDF"], want)
    np.testing.assert_array_equal(experts["w_gate_EDF"], want + np.float32(1))
    # Said to be gated, and not: as transformers, which ignores what is said.
    huggingface_folder(tmp_path, SWITCH)
    change_config(folder, dense_act_fn="gelu", feed_forward_proj="gated-gelu")
    assert read_checkpoint(folder).config.activation == "gelu_exact"


def test_two_tables(tmp_path):
    folder, _ = huggingface_folder(tmp_path)

    def change(tensors):
        tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"] + 1

    change_tensors(folder, change)
    with refused("shared.weight is not equal to decoder.embed_tokens.w"):
        read_checkpoint(folder)


# What is no good.


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path):
    folder, _ = huggingface_folder(tmp_path, SWITCH)
    experts = "encoder.block.1.layer.1.mlp.experts.expert"

    def change(tensors):
        del tensors[f"{experts}_2.wi.weight"]
        tensors[f"{experts}_4.wi.weight"] = tensors[f"{experts}_3.wi.weight"].copy()
        tensors["shared.weight"] = tensors["shared.weight"][:-1].copy()

    change_tensors(folder, change)
    with refused(
        f"{folder} does not hold the model that is described<any> tensors "
        f"differ:\n  {experts}_2.wi.weight: expected shape [20, 12], got "
        f"nothing\n  {experts}_4.wi.weight: expected nothing, got shape [20, "
        "12]\n  shared.weight: expected shape [50, 12], got shape [49, 12]\nuse "
        "the config.json that belongs to these files, and all of the files"
    ):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"d_model": 2**31},
        {"d_ff": 2**30, "d_kv": 2**30},
        {"vocab_size": 2**31},
        {"num_experts": 10_000},
        {"d_kv": 2**31},
    ],
)
def test_sizes_that_the_tensors_have_not_allocate_nothing(tmp_path, changes):
    folder, _ = huggingface_folder(tmp_path, SWITCH)
    change_config(folder, **changes)
    with pytest.raises(ValueError, match="does not hold the model that is described"):
        read_checkpoint(folder)


def test_an_adapter_beside_its_model_is_not_left_out(tmp_path):
    """transformers adds it where it opens the folder."""
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    with refused("has an adapter beside its model (adapter_config.json), <any>--from=peft"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with refused(
        f"{tmp_path} is an adapter (adapter_config.json) without a model; <any>--base"
    ):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "artifact.json"])
def test_a_folder_of_switchx_is_named(tmp_path, file):
    (tmp_path / file).write_text('{"model": {"type": "ModelConfig"}}')
    with refused(f"{tmp_path} is a folder of switchx, expected one of transformers; <any>"):
        read_checkpoint(tmp_path)


def test_a_model_without_a_head_is_named(tmp_path):
    folder, _ = huggingface_folder(tmp_path, dataclasses.replace(SWITCH, switch=None))
    change_config(folder, architectures=["T5EncoderModel"])
    read_checkpoint(folder)  # nothing is missing
    change_config(folder, num_decoder_layers=7)
    with refused("was saved as T5EncoderModel, without the lm head of a language model; save"):
        read_checkpoint(folder)


def test_a_folder_that_is_none_and_what_becomes_of_tokens_without_a_slot(tmp_path):
    with refused(f"{tmp_path / 'no'} is no folder"):
        read_checkpoint(tmp_path / "no")
    with refused(f"{tmp_path / 'config.json'} is not there; fetch it, or give a folder that"):
        read_checkpoint(tmp_path)
    folder, _ = huggingface_folder(tmp_path, SWITCH)
    for overflow in ("dropless", "identity"):
        config = read_checkpoint(folder, overflow=overflow).config
        assert config.switch.router.overflow == overflow
    with refused("overflow='keep' of a switch_transformers: expected drop or dropless or"):
        read_checkpoint(folder, overflow="keep")
    dense, _ = huggingface_folder(tmp_path / "dense", dataclasses.replace(SWITCH, switch=None))
    with refused("overflow='drop' of a t5: expected dropless, as transformers has it; leave"):
        read_checkpoint(dense, overflow="drop")
