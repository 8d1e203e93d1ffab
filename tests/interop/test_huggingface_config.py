# SPDX-License-Identifier: Apache-2.0
"""`config.json` of others, both ways: what it says in our words, and all that is refused."""

import dataclasses

import pytest

from switchx.interop.families import family_of
from switchx.interop.huggingface import describe
from switchx.interop.huggingface_config import Fields, num_sparse, sparse_blocks, switch_layers
from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from tests.data.refusals import refused
from tests.interop.folders import SWITCH, T5, T5_1_1

# What google/t5-v1_1-small and google/switch-base-8 say, in parts, with smaller sizes.
DENSE = {
    "model_type": "t5",
    "vocab_size": 99,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "dropout_rate": 0.1,
    "relative_attention_num_buckets": 32,
    "transformers_version": "4.23.1",
}
SPARSE = DENSE | {
    "model_type": "switch_transformers",
    "num_layers": 4,
    "num_decoder_layers": 4,
    "feed_forward_proj": "relu",
    "dense_act_fn": "relu",
    "tie_word_embeddings": True,
    "num_experts": 8,
    "expert_capacity": 64,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "router_bias": False,
    "router_dtype": "float32",
    "router_jitter_noise": 0.02,
}


def read(values, overflow="drop", **changes):
    values = {name: v for name, v in (values | changes).items() if v is not None}
    fields = Fields(values, "config.json")
    return family_of(fields).read_config(fields, overflow=overflow)


def test_t5():
    assert read(DENSE) == ModelConfig(
        "encoder_decoder", 99, 16, 24, 6, 4, num_encoder_layers=2, num_decoder_layers=3,
        activation="geglu", tie_embeddings=False, scale_tied_logits=False, dropout_rate=0.1,
    )  # fmt: skip
    # What is left out is transformers' default.
    first = read(
        DENSE, feed_forward_proj=None, tie_word_embeddings=None, num_decoder_layers=None
    )
    assert (first.activation, first.tie_embeddings, first.scale_tied_logits) == (
        "relu", True, True,
    )  # fmt: skip
    assert first.num_decoder_layers == 2
    assert read(DENSE, model_type="mt5", feed_forward_proj=None).activation == "geglu"


def test_switch_transformers():
    assert read(SPARSE).switch == SwitchConfig(
        8, every=2, expert_capacity=64, router=RouterConfig(jitter=0.02, padding="counted")
    )
    assert read(SPARSE, num_sparse_decoder_layers=1).switch.decoder_layers == (1,)
    assert read(SPARSE, num_sparse_encoder_layers=9, num_sparse_decoder_layers=9).switch is None
    dropless = read(SPARSE, overflow="dropless")
    assert dropless.switch.router.overflow == "dropless"


@pytest.mark.parametrize(
    "changes, is_scaled",
    [
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        # What transformers 5 writes: DENSE always tied, the division apart from it.
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        (
            {"model_type": "umt5", "tie_word_embeddings": True, "scale_decoder_outputs": False},
            False,
        ),
        ({"model_type": "mt5", "tie_word_embeddings": True}, True),
        (
            {
                "model_type": "mt5",
                "tie_word_embeddings": True,
                "transformers_version": "5.23.0",
            },
            False,
        ),
    ],
)
def test_division_of_tied_logits(changes, is_scaled):
    assert read(DENSE, **changes).scale_tied_logits == is_scaled


@pytest.mark.parametrize(
    "name, activation",
    [("relu", "relu"), ("gelu_new", "gelu"), ("gated-gelu", "geglu"), ("gated-silu", "swiglu")],
)
def test_activations(name, activation):
    plain = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    is_gated = "gated" in name
    config = read(DENSE, feed_forward_proj=name, dense_act_fn=plain, is_gated_act=is_gated)
    assert config.activation == activation


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (DENSE, {"model_type": "bert"}, "model_type='bert' cannot be converted"),
        (DENSE, {"model_type": None}, "model_type='' cannot be converted"),
        (DENSE, {"model_type": ["t5"]}, "model_type=['t5']"),
        (DENSE, {"is_encoder_decoder": False}, "is_encoder_decoder=False cannot be converted"),
        (DENSE, {"layer_norm_epsilon": "x"}, "layer_norm_epsilon='x'"),
        (DENSE, {"vocab_size": None}, "vocab_size=None"),
        (DENSE, {"d_model": "16"}, "d_model='16'"),
        (DENSE, {"d_model": True}, "d_model=True"),
        (DENSE, {"d_model": 16.0}, "d_model=16.0"),
        (DENSE, {"d_model": 10**30}, f"d_model={10**30}"),
        (DENSE, {"d_ff": -1}, "d_ff=-1"),
        (DENSE, {"num_layers": 10**9}, "num_layers=1000000000"),
        (DENSE, {"dropout_rate": float("nan")}, "dropout_rate=nan"),
        (DENSE, {"dropout_rate": "x" * 200}, f"dropout_rate='{'x' * 79}..."),
        (DENSE, {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        (DENSE, {"feed_forward_proj": "mish"}, "the activation 'mish' cannot be converted"),
        (DENSE, {"feed_forward_proj": "gated-relu"}, "the activation 'gated-relu' cannot be"),
        (DENSE, {"dense_act_fn": "relu"}, "dense_act_fn='relu' cannot be converted: feed_"),
        (SPARSE, {"dense_act_fn": "mish"}, "the activation 'mish' cannot be converted"),
        (SPARSE, {"is_gated_act": True}, "the activation 'gated-relu' cannot be converted"),
        (SPARSE, {"router_bias": 1}, "router_bias=1"),
        (SPARSE, {"router_dtype": "bfloat16"}, "router_dtype='bfloat16' cannot be converted"),
        (SPARSE, {"expert_capacity": 0}, "expert_capacity=0"),
        (SPARSE, {"num_experts": 10**6}, "num_experts=1000000"),
        (
            SPARSE,
            {"num_layers": 1000, "num_sparse_encoder_layers": 1000, "num_experts": 60000},
            "num_experts=60000 in each of 1002 blocks",
        ),
        (SPARSE, {"num_sparse_encoder_layers": -1}, "num_sparse_encoder_layers=-1"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused(values, changes, message):
    with refused(f"config.json: <any>{message}"):
        read(values, **changes)


def test_t5_1_1_is_described_and_what_cannot_be_is_refused():
    with refused("relative_buckets=2 with "):
        read(DENSE, relative_attention_num_buckets=2)
    assert num_sparse(12, (3, 7, 11)) is None
    assert num_sparse(4, (0,)) is None
    values, _ = describe(T5_1_1)
    assert (values["model_type"], values["feed_forward_proj"]) == ("t5", "gated-gelu")
    assert values["tie_word_embeddings"] is False
    assert values["torch_dtype"] == "float32"
    half = dataclasses.replace(T5_1_1, precision=Precision(params="bfloat16"))
    assert describe(half)[0]["torch_dtype"] == "bfloat16"


CASES = [
    (12, 6, (1, 3, 5, 7, 9, 11)),
    (12, 3, (1, 5, 9)),
    (12, 12, tuple(range(12))),
    (12, 5, (1, 3, 5, 7, 9, 11)),  # a step of 12 // 5
    (4, 0, (1,)),  # transformers means none, and makes one
    (1, 0, (0,)),
    (2, 3, ()),  # a step of 0
    (5, 2, (1, 3)),
]


@pytest.mark.parametrize("num_layers, count, blocks", CASES)
def test_sparse_blocks_and_a_count_for_them(num_layers, count, blocks):
    assert sparse_blocks(num_layers, count) == blocks
    assert sparse_blocks(num_layers, num_sparse(num_layers, blocks)) == blocks


@pytest.mark.parametrize(
    "layers, encoder, decoder, fields",
    [
        ((12, 12), sparse_blocks(12, 6), sparse_blocks(12, 6), {"every": 2, "stacks": "all"}),
        ((24, 12), sparse_blocks(24, 12), sparse_blocks(12, 6), {"every": 2, "stacks": "all"}),
        ((2, 3), (0, 1), (0, 1, 2), {"every": 1, "stacks": "all"}),
        ((4, 2), (1, 3), (), {"every": 2, "stacks": "encoder"}),
        ((12, 12), (1, 5, 9), (1, 5, 9), None),
        ((4, 3), (1, 3), (1,), None),
        ((4, 4), (), (1, 3), None),
    ],
)
def test_fields_give_these_blocks(layers, encoder, decoder, fields):
    config = dataclasses.replace(T5, num_encoder_layers=layers[0], num_decoder_layers=layers[1])
    got = switch_layers(config, encoder, decoder)
    assert got == (fields or {"encoder_layers": encoder, "decoder_layers": decoder})
    config = dataclasses.replace(config, switch=SwitchConfig(4, **got))
    for stack, blocks in (("encoder", encoder), ("decoder", decoder)):
        count = getattr(config, f"num_{stack}_layers")
        assert tuple(i for i in range(count) if config.is_sparse(i, stack)) == blocks


EVERY_SECOND = dataclasses.replace(SWITCH, switch=SwitchConfig(4))


@pytest.mark.parametrize("config", [T5, SWITCH])
def test_what_is_described_is_read_back(config):
    values, notes = describe(config)
    assert notes == []
    assert read(values) == config


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


def test_a_model_that_transformers_has_not():
    gpt = ModelConfig(
        "decoder_only", 50, 12, 20, 3, 4, 2, activation="gelu", norm="layer",
        positions="learned", max_length=9, use_bias=True, scale_attention=True,
    )  # fmt: skip
    with refused(
        "this model cannot be written for transformers: "
        "architecture='decoder_only' (expected 'encoder_decoder')"
    ):
        describe(gpt)
    tupe = dataclasses.replace(SWITCH, positions="tupe", max_length=9, scale_attention=True)
    with refused(
        "this model cannot be written for transformers: positions='tupe' (expected 'relative')"
    ):
        describe(tupe)
    with refused("activation='geglu' with experts (its experts have one input matrix"):
        describe(dataclasses.replace(EVERY_SECOND, activation="geglu"))


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
            {"router": RouterConfig(counts_merged=True)},
            "RouterConfig.counts_merged=True (expected False)",
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
    with refused(f"this model cannot be written for transformers: <any>{reason}"):
        describe(dataclasses.replace(EVERY_SECOND, switch=switch))
