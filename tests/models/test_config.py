# SPDX-License-Identifier: Apache-2.0
"""Model descriptions: derived sizes by hand, and every refusal's message in full."""

import dataclasses

import jax.numpy as jnp
import pytest

from switchx.fields import describe
from switchx.models.config import (
    ModelConfig,
    Precision,
    RouterConfig,
    SwitchConfig,
    model_from_description,
)
from tests.data.refusals import refused

SWITCH = SwitchConfig(8)
T5 = ModelConfig("encoder_decoder", 100, 16, 32, 2, 8, 4, 6)
SPARSE = dataclasses.replace(T5, switch=SWITCH)
DECODER = dataclasses.replace(T5, architecture="decoder_only", num_encoder_layers=0)


def test_pattern_of_sparse_blocks():
    # The last block of each run of `every` is sparse.
    assert [SPARSE.is_sparse(i) for i in range(6)] == [False, True] * 3
    every_third = dataclasses.replace(
        SPARSE, switch=SwitchConfig(8, every=3), num_decoder_layers=3
    )
    assert [every_third.is_sparse(i) for i in range(6)] == [False, False, True] * 2
    all_sparse = dataclasses.replace(SPARSE, switch=SwitchConfig(8, every=1))
    assert all(all_sparse.is_sparse(i) for i in range(6))
    assert not any(T5.is_sparse(i) for i in range(6))


def test_the_loss_takes_parts_of_equal_size_with_tokens_enough():
    small = dataclasses.replace(T5, d_model=64)
    assert small.num_logit_parts(8192) == 16
    assert small.num_logit_parts(6 * 512 + 6) == 6
    assert [small.num_logit_parts(tokens) for tokens in (0, 1, 1023, 1031)] == [1, 1, 1, 1]
    large = dataclasses.replace(T5, d_model=768)
    assert [large.num_logit_parts(tokens) for tokens in (2048, 8192)] == [1, 4]


def test_derived_sizes():
    assert (T5.period, SPARSE.period) == (1, 2)
    # 6 encoder and 4 decoder blocks, every other one.
    assert (T5.num_sparse_layers, SPARSE.num_sparse_layers) == (0, 5)
    assert T5.is_encoder_decoder and not DECODER.is_encoder_decoder
    gated = {
        activation: dataclasses.replace(T5, activation=activation).is_gated
        for activation in ("relu", "gelu", "geglu", "swiglu")
    }
    assert gated == {"relu": False, "gelu": False, "geglu": True, "swiglu": True}


def test_stacks_and_sublayers_that_are_sparse():
    encoder = dataclasses.replace(SPARSE, switch=SwitchConfig(8, stacks="encoder"))
    assert encoder.num_sparse_layers == 3
    assert [encoder.is_sparse(i, "encoder") for i in range(4)] == [False, True] * 2
    assert not any(encoder.is_sparse(i, "decoder") for i in range(4))
    assert [SPARSE.is_sparse(i, "decoder") for i in range(4)] == [False, True] * 2
    has = {
        name: (switch.has_attention, switch.has_ffn)
        for name in ("ffn", "attention", "both")
        for switch in [SwitchConfig(8, sublayers=name)]
    }
    assert has == {"ffn": (False, True), "attention": (True, False), "both": (True, True)}


EXPERT_CHOICE = RouterConfig(kind="expert_choice")


@pytest.mark.parametrize(
    ("model", "switch", "message"),
    [
        (
            T5,
            SwitchConfig(8, router=EXPERT_CHOICE),
            "RouterConfig.kind='expert_choice' in a causal decoder: whether an expert "
            "takes a token would depend on the tokens after it, which are not known "
            "when text is written",
        ),
        (
            DECODER,
            SwitchConfig(8, router=EXPERT_CHOICE),
            "RouterConfig.kind='expert_choice' in a causal decoder: whether an expert "
            "takes a token would depend on the tokens after it, which are not known "
            "when text is written",
        ),
        (
            DECODER,
            SwitchConfig(8, stacks="encoder"),
            "SwitchConfig.stacks='encoder' in a decoder_only model, which has no encoder",
        ),
    ],
)
def test_switch_layers_that_do_not_fit_a_model_are_refused(model, switch, message):
    with refused(message):
        dataclasses.replace(model, switch=switch)


def test_precision():
    assert Precision().compute_dtype == jnp.float32
    assert Precision(compute="bfloat16").compute_dtype == jnp.bfloat16
    # Selective precision: nothing else follows the compute dtype.
    assert Precision(compute="bfloat16").router == "float32"


def test_descriptions_are_frozen_and_can_be_keys():
    for description, field in ((T5, "d_model"), (SWITCH, "every"), (EXPERT_CHOICE, "kind")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(description, field, 8)
    assert hash(SPARSE) == hash(dataclasses.replace(SPARSE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_encoder_layers": 0},
            "num_encoder_layers=0 does not fit architecture='encoder_decoder'",
        ),
        (
            {"architecture": "decoder_only"},
            "num_encoder_layers=6 does not fit architecture='decoder_only'",
        ),
        (
            {"architecture": "decoder_only", "num_encoder_layers": -2},
            "num_encoder_layers=-2 does not fit architecture='decoder_only'",
        ),
        (
            {"positions": "learned"},
            "positions='learned' needs max_length, the rows of the position table",
        ),
        ({"positions": "learned", "max_length": 0}, "max_length=0"),
        (
            {"positions": "tupe", "scale_attention": True},
            "positions='tupe' needs max_length, the rows of the position table",
        ),
        (
            {"positions": "tupe_relative", "max_length": 9},
            "positions='tupe_relative' with scale_attention=False: TUPE divides its "
            "scores by sqrt(2 d_head)",
        ),
        ({"relative_buckets": 2}, "relative_buckets=2 with relative_max_distance=128"),
        ({"relative_max_distance": 16}, "relative_buckets=32 with relative_max_distance=16"),
        (
            {"switch": SWITCH, "num_decoder_layers": 5},
            "num_decoder_layers=5 is not divisible by switch.every=2",
        ),
        (
            {"switch": SWITCH, "num_encoder_layers": 1},
            "num_encoder_layers=1 is not divisible by switch.every=2",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes, message):
    with refused(message):
        dataclasses.replace(T5, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shared_d_ff": 8, "sublayers": "attention"},
            "SwitchConfig.shared_d_ff=8 with sublayers='attention'",
        ),
        (
            {"expert_bias": True, "d_ff": 9, "sublayers": "attention"},
            "SwitchConfig.expert_bias=True, d_ff=9 with sublayers='attention': experts of "
            "attention, linear, have no such thing",
        ),
        (
            {"dispatcher": "sliced", "sublayers": "attention"},
            "SwitchConfig.dispatcher='sliced' with sublayers='attention': experts in "
            "attention are dispatched by gather or einsum",
        ),
        (
            {"exchange_parts": 2},
            "SwitchConfig.exchange_parts=2 with dispatcher='gather', which exchanges no slots",
        ),
        (
            {"router": RouterConfig(num_selected=9)},
            "RouterConfig.num_selected=9 with num_experts=8: a token chooses an expert once",
        ),
        (
            {"router": RouterConfig(overflow="reroute", max_rounds=9)},
            "RouterConfig.max_rounds=9 with num_experts=8: a token chooses an expert once",
        ),
    ],
)
def test_switch_layers_that_cannot_be_are_refused(changes, message):
    with refused(message):
        dataclasses.replace(SWITCH, **changes)


@pytest.mark.parametrize(
    ("field", "value"), [("d_model", "16"), ("dropout_rate", True), ("num_heads", None)]
)
def test_a_written_value_of_another_type_is_named_with_its_file(field, value):
    description = describe(T5, "model") | {field: value}
    with pytest.raises(
        ValueError, match=rf"^run/config.json: ModelConfig.{field}={value!r} is"
    ):
        model_from_description(description, "run/config.json")
