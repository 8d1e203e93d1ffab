# SPDX-License-Identifier: Apache-2.0
"""`config.json` of others: what it says in our words, and every value that is refused."""

import pytest

from switchx.interop.huggingface_config import read_config
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from tests.data.refusals import refused

# What google/t5-v1_1-small and google/switch-base-8 say, in parts, with smaller sizes.
T5 = {
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
SWITCH = T5 | {
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


def read(values, **changes):
    values = {name: v for name, v in (values | changes).items() if v is not None}
    return read_config(values, "config.json")[0]


def test_t5():
    assert read_config(T5, "config.json") == (
        ModelConfig(
            "encoder_decoder", 99, 16, 24, 6, 4, num_encoder_layers=2, num_decoder_layers=3,
            activation="geglu", tie_embeddings=False, scale_tied_logits=False, dropout_rate=0.1,
        ),
        "t5",
    )  # fmt: skip
    # What is left out is transformers' default.
    first = read(T5, feed_forward_proj=None, tie_word_embeddings=None, num_decoder_layers=None)
    assert (first.activation, first.tie_embeddings, first.scale_tied_logits) == (
        "relu", True, True,
    )  # fmt: skip
    assert first.num_decoder_layers == 2
    assert read(T5, model_type="mt5", feed_forward_proj=None).activation == "geglu"


def test_switch_transformers():
    assert read(SWITCH).switch == SwitchConfig(
        8,
        every=2,
        expert_capacity=64,
        router=RouterConfig(jitter=0.02, padding="counted"),
    )
    assert read(SWITCH, num_sparse_decoder_layers=1).switch.decoder_layers == (1,)
    assert read(SWITCH, num_sparse_encoder_layers=9, num_sparse_decoder_layers=9).switch is None
    dropless, _ = read_config(SWITCH, "config.json", overflow="dropless")
    assert dropless.switch.router.overflow == "dropless"


@pytest.mark.parametrize(
    "changes, is_scaled",
    [
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        # What transformers 5 writes: T5 always tied, the division apart from it.
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
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
    assert read(T5, **changes).scale_tied_logits == is_scaled


@pytest.mark.parametrize(
    "name, activation",
    [
        ("relu", "relu"),
        ("gelu_new", "gelu"),
        ("gated-gelu", "geglu"),
        ("gated-silu", "swiglu"),
    ],
)
def test_activations(name, activation):
    plain = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    is_gated = "gated" in name
    config = read(T5, feed_forward_proj=name, dense_act_fn=plain, is_gated_act=is_gated)
    assert config.activation == activation


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (T5, {"model_type": "bert"}, "model_type='bert' cannot be converted; expected one"),
        (T5, {"model_type": None}, "model_type='' cannot be converted"),
        (T5, {"model_type": ["t5"]}, "model_type=['t5']; expected a text"),
        (T5, {"is_encoder_decoder": False}, "is_encoder_decoder=False cannot be converted"),
        (T5, {"pad_token_id": 1}, "pad_token_id=1 cannot be converted: padding is 0 in every"),
        (T5, {"eos_token_id": [1, 2]}, "eos_token_id=[1, 2] cannot be converted"),
        (T5, {"decoder_start_token_id": 2}, "decoder_start_token_id=2 cannot be converted"),
        (T5, {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon=1e-05 cannot be converted"),
        (T5, {"vocab_size": None}, "vocab_size=None; expected a whole number from 1 to 2147"),
        (T5, {"d_model": "16"}, "d_model='16'; expected a whole number"),
        (T5, {"d_model": True}, "d_model=True; expected a whole number"),
        (T5, {"d_model": 16.0}, "d_model=16.0; expected a whole number"),
        (T5, {"d_model": 10**30}, f"d_model={10**30}; expected a whole number from 1 to"),
        (T5, {"d_ff": -1}, "d_ff=-1; expected a whole number"),
        (T5, {"num_layers": 10**9}, "num_layers=1000000000; expected a whole number from 1 to"),
        (T5, {"dropout_rate": float("nan")}, "dropout_rate=nan; expected a number"),
        (T5, {"dropout_rate": "x" * 200}, f"dropout_rate='{'x' * 79}...; expected a number"),
        (T5, {"tie_word_embeddings": 1}, "tie_word_embeddings=1; expected true or false"),
        (T5, {"feed_forward_proj": "gelu"}, "the activation 'gelu' cannot be converted"),
        (T5, {"feed_forward_proj": "gated-relu"}, "the activation 'gated-relu' cannot be"),
        (T5, {"dense_act_fn": "relu"}, "dense_act_fn='relu' cannot be converted: feed_"),
        (SWITCH, {"dense_act_fn": "gated-gelu"}, "a gated Switch Transformer (dense_act_fn="),
        (SWITCH, {"feed_forward_proj": "gated-gelu"}, "transformers has no code for its"),
        (SWITCH, {"is_gated_act": True}, "convert the T5X checkpoint with --from=t5x"),
        (SWITCH, {"router_bias": True}, "router_bias=true cannot be converted"),
        (SWITCH, {"router_dtype": "bfloat16"}, "router_dtype='bfloat16' cannot be converted"),
        (SWITCH, {"expert_capacity": 0}, "expert_capacity=0; expected a whole number"),
        (SWITCH, {"num_experts": 10**6}, "num_experts=1000000; expected a whole number"),
        (
            SWITCH,
            {"num_layers": 1000, "num_sparse_encoder_layers": 1000, "num_experts": 60000},
            "num_experts=60000 in each of 1002 blocks; expected 262144 in all at most",
        ),
        (SWITCH, {"num_sparse_encoder_layers": -1}, "num_sparse_encoder_layers=-1; expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused(values, changes, message):
    with refused(f"config.json: <any>{message}<any>"):
        read(values, **changes)


def test_a_model_that_cannot_be_is_refused_by_the_model():
    with refused("relative_buckets=2 with <any>"):
        read(T5, relative_attention_num_buckets=2)
