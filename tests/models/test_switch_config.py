# SPDX-License-Identifier: Apache-2.0
"""Sparse blocks by number, capacity by row, and every refusal's message in full."""

import dataclasses

import jax
import numpy as np
import pytest

from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.moe.dispatcher_traits import DISPATCHERS
from tests.data.refusals import refused

NAMED = SwitchConfig(2, encoder_layers=(1, 5), decoder_layers=(1,))
MODEL = ModelConfig("encoder_decoder", 20, 4, 6, 1, 4, 3, 6, activation="relu", switch=NAMED)


def test_blocks_by_number():
    assert [MODEL.is_sparse(i, "encoder") for i in range(6)] == [
        False, True, False, False, False, True,
    ]  # fmt: skip
    assert [MODEL.is_sparse(i, "decoder") for i in range(3)] == [False, True, False]
    assert MODEL.num_sparse_layers == 3
    assert (MODEL.num_sparse_layers_of("encoder"), MODEL.num_sparse_layers_of("decoder")) == (
        2, 1,
    )  # fmt: skip
    assert MODEL.sparse_layer_names == ["encoder 1", "encoder 5", "decoder 1"]
    params = abstract_params(MODEL)
    for stack, layers in (("encoder", {1, 5}), ("decoder", {1})):
        blocks = params[stack]["blocks"]
        assert {i for i in range(len(blocks)) if "experts" in blocks[f"layer_{i}"]["ffn"]} == (
            layers
        )


def test_a_list_of_blocks_is_a_key_too():
    listed = SwitchConfig(2, encoder_layers=[1, 5], decoder_layers=[1])
    assert listed == NAMED and hash(listed) == hash(NAMED)


def test_parts_of_exchanges_follow_the_dispatcher():
    pod = SwitchConfig(8, dispatcher="all_to_all", exchange_parts=2)
    named = {name: pod.with_dispatcher(name) for name in DISPATCHERS}
    assert {name: switch.dispatcher for name, switch in named.items()} == {
        name: name for name in DISPATCHERS
    }
    assert {name for name, switch in named.items() if switch.exchange_parts == 2} == {
        "all_to_all", "hierarchical",
    }  # fmt: skip


def test_a_stack_without_sparse_blocks():
    none = dataclasses.replace(NAMED, decoder_layers=())
    model = dataclasses.replace(MODEL, switch=none)
    assert model.sparse_layer_names == ["encoder 1", "encoder 5"]
    chosen = dataclasses.replace(none, router=RouterConfig("expert_choice"))
    assert dataclasses.replace(MODEL, switch=chosen).num_sparse_layers == 2
    with pytest.raises(ValueError, match="expert_choice' in a causal decoder"):
        dataclasses.replace(
            MODEL, switch=dataclasses.replace(NAMED, router=RouterConfig("expert_choice"))
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder_layers": None},
            "SwitchConfig.encoder_layers=(1, 5) with decoder_layers=None",
        ),
        ({"encoder_layers": (5, 1)}, "SwitchConfig.encoder_layers=(5, 1)"),
        ({"encoder_layers": (-1, 1)}, "SwitchConfig.encoder_layers=(-1, 1)"),
        (
            {"encoder_layers": (), "decoder_layers": ()},
            "SwitchConfig.encoder_layers=() with decoder_layers=()",
        ),
        ({"stacks": "encoder"}, "SwitchConfig.stacks='encoder' with encoder_layers=(1, 5)"),
    ],
)
def test_layers_that_cannot_be_are_refused(changes, message):
    with refused(message):
        dataclasses.replace(NAMED, **changes)


def test_an_identity_is_for_experts_that_are_ffns():
    with refused(
        "RouterConfig.overflow='identity' with sublayers='both': only a "
        "feed-forward expert has an output like its input"
    ):
        SwitchConfig(2, sublayers="both", router=RouterConfig(overflow="identity"))


def test_choices_are_given_to_ffns_alone():
    router = RouterConfig(overflow="dropless", replay=True)
    assert SwitchConfig(2, router=router).router.replay
    with refused("RouterConfig.replay=True with sublayers='attention'"):
        SwitchConfig(2, sublayers="attention", router=router)


def test_blocks_that_the_model_has_not():
    with refused("SwitchConfig.encoder_layers=(1, 5) with num_encoder_layers=4"):
        dataclasses.replace(MODEL, num_encoder_layers=4)
    with refused(
        "scan_layers=True with SwitchConfig.encoder_layers=(1, 5): what is scanned "
        "repeats one pattern"
    ):
        dataclasses.replace(MODEL, scan_layers=True)


def test_each_row_has_its_own_slots(key):
    """The result of a row does not depend on the other rows of its batch."""
    from switchx.moe.layer import SwitchFFN

    layer = SwitchFFN(
        dataclasses.replace(MODEL, switch=dataclasses.replace(NAMED, expert_capacity=2)),
        key=key,
    )
    x_BLD = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    is_token_BL = np.ones((3, 5), bool)
    run = jax.jit(lambda x_BLD, is_token_BL: layer(x_BLD, is_token_BL, is_training=False)[0])
    y_BLD = run(x_BLD, is_token_BL)
    alone_BLD = run(x_BLD[1:2], is_token_BL[1:2])
    np.testing.assert_allclose(y_BLD[1], alone_BLD[0], rtol=1e-6)
    kept = np.asarray(jax.numpy.any(y_BLD != 0, axis=-1)).sum(axis=1)
    assert (kept <= 4).all() and (kept < 5).any()  # two slots of two experts, five tokens
