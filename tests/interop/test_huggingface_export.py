# SPDX-License-Identifier: Apache-2.0
"""Our configuration in transformers' words, and models that it has no words for."""

import dataclasses

import pytest

from switchx.interop.huggingface import describe
from switchx.interop.huggingface_config import read_config
from switchx.models.config import (
    ModelConfig,
    Precision,
    RouterConfig,
    SwitchConfig,
)
from tests.data.refusals import refused
from tests.interop.folders import SWITCH, T5, T5_1_1

EVERY_SECOND = dataclasses.replace(SWITCH, switch=SwitchConfig(4))


@pytest.mark.parametrize("config", [T5, SWITCH])
def test_what_is_described_is_read_back(config):
    values, notes = describe(config)
    assert notes == []
    assert read_config(values, "config.json")[0] == config


def test_t5_1_1():
    values, _ = describe(T5_1_1)
    assert (values["model_type"], values["feed_forward_proj"]) == ("t5", "gated-gelu")
    assert values["tie_word_embeddings"] is False
    assert values["torch_dtype"] == "float32"
    half = dataclasses.replace(T5_1_1, precision=Precision(params="bfloat16"))
    assert describe(half)[0]["torch_dtype"] == "bfloat16"


def test_a_capacity_by_factor_is_none_there_and_said_so():
    values, notes = describe(EVERY_SECOND)
    assert values["expert_capacity"] == 2**31 - 1
    assert (values["num_sparse_encoder_layers"], values["num_sparse_decoder_layers"]) == (2, 2)
    assert notes == [
        "transformers counts an expert's slots for each sequence, switchx here by a capacity "
        "factor (2.0 in evaluation) in groups of up to 8192 tokens: the export drops nothing. "
        "Set expert_capacity in its config.json for a limit"
    ]
    dropless = dataclasses.replace(
        EVERY_SECOND, switch=SwitchConfig(4, router=RouterConfig(overflow="dropless"))
    )
    assert describe(dropless)[0]["expert_capacity"] == 2**31 - 1
    assert describe(dropless)[1] == []
    kept = dataclasses.replace(SWITCH.switch, router=RouterConfig(overflow="identity"))
    values, (note,) = describe(dataclasses.replace(SWITCH, switch=kept))
    assert values["expert_capacity"] == 3
    assert note == (
        "a token whose expert is full keeps its input here, as in transformers up to 4.51; "
        "later releases drop it"
    )


def test_a_model_that_transformers_has_not_with_all_reasons():
    gpt = ModelConfig(
        "decoder_only", 50, 12, 20, 3, 4, 2, activation="gelu", norm="layer",
        positions="learned", max_length=9, use_bias=True, scale_attention=True,
    )  # fmt: skip
    with refused(
        "this model cannot be written for transformers: architecture='decoder_only' (expected "
        "'encoder_decoder'); norm='layer' (expected 'rms'); positions='learned' (expected "
        "'relative'); use_bias=True (expected False); scale_attention=True (expected False); "
        "there are T5, and Switch Transformers with top-1 routing, to write for"
    ):
        describe(gpt)
    tupe = dataclasses.replace(SWITCH, positions="tupe", max_length=9, scale_attention=True)
    with refused(
        "this model cannot be written for transformers: positions='tupe' (expected "
        "'relative'); scale_attention=True (expected False); <any>"
    ):
        describe(tupe)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"router": RouterConfig(num_selected=2)}, "RouterConfig.num_selected=2 (expected 1)"),
        (
            {"router": RouterConfig("hash", exploration="none")},
            "RouterConfig.kind='hash' (expected 'top_k')",
        ),
        (
            {"router": RouterConfig(bias_update_rate=0.1)},
            "RouterConfig.bias_update_rate=0.1 (expected None)",
        ),
        (
            {"router": RouterConfig(overflow="reroute")},
            "RouterConfig.overflow='reroute' (expected 'drop' or 'dropless')",
        ),
        ({"shared_d_ff": 3}, "SwitchConfig.shared_d_ff=3 (expected None)"),
        ({"d_ff": 3}, "SwitchConfig.d_ff=3 (expected 20)"),
        ({"expert_bias": True}, "SwitchConfig.expert_bias=True (expected False)"),
        ({"sublayers": "both"}, "SwitchConfig.sublayers='both' (expected 'ffn')"),
        (
            {"every": 4},
            "the sparse blocks 3 of the 4 of the encoder (expected 1 and every n-th after it, "
            "all or none)",
        ),
    ],
)
def test_experts_that_transformers_has_not(changes, reason):
    switch = dataclasses.replace(EVERY_SECOND.switch, **changes)
    with refused(f"this model cannot be written for transformers: <any>{reason}<any>"):
        describe(dataclasses.replace(EVERY_SECOND, switch=switch))


def test_gated_experts_are_refused():
    with refused(
        "<any>activation='geglu' with experts (its experts have one input matrix<any>"
    ):
        describe(dataclasses.replace(EVERY_SECOND, activation="geglu"))
