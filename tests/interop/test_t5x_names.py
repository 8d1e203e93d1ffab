# SPDX-License-Identifier: Apache-2.0
"""Names of T5X, against the tree of Switch-Base that its developers published."""

import dataclasses

import numpy as np

from switchx.interop.t5x import (
    Place,
    bias_names,
    places,
    take,
    their_shapes,
)
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.tree import named_leaves
from tests.interop.folders import T5_1_1

BASE = ModelConfig(
    "encoder_decoder", 32128, 768, 3072, 12, 64, 12, 12, activation="relu",
    switch=SwitchConfig(128),
)  # fmt: skip


def test_switch_base_by_layers():
    """Names and shapes of jax.eval_shape over T5X's switch_base.gin: 269 arrays."""
    got = places(BASE, ())
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


def test_gated_and_untied():
    names = {place.name for place in places(T5_1_1, ()).values()}
    assert {f"target/encoder/layers_0/mlp/{m}/kernel" for m in ("wi_0", "wi_1", "wo")} <= names
    assert "target/decoder/logits_dense/kernel" in names


def test_scanned_names_tell_the_layout():
    found = {f"target/encoder/encoder/subblock_{i}/pre_mlp_layer_norm/scale" for i in (0, 1)}
    got = places(dataclasses.replace(BASE, switch=None), found)
    assert got["encoder/blocks/layer_5/ffn_norm/scale_D"] == Place(
        "target/encoder/encoder/subblock_1/pre_mlp_layer_norm/scale", 2
    )
    # Each stack has its own.
    assert got["decoder/blocks/layer_5/ffn_norm/scale_D"] == Place(
        "target/decoder/layers_5/pre_mlp_layer_norm/scale"
    )
    got = places(BASE, {"target/decoder/decoder/pre_mlp_layer_norm/scale"})
    assert got["decoder/blocks/layer_5/ffn_norm/scale_D"] == Place(
        "target/decoder/decoder/pre_mlp_layer_norm/scale", 5
    )


def test_a_bias_of_the_stack_or_of_its_blocks():
    shared, own = (
        f"target/encoder/{each}relpos_bias/rel_embedding" for each in ("", "encoder/")
    )
    assert bias_names("encoder", {shared, own}) == [shared]
    assert bias_names("encoder", {own}) == [own]
    assert bias_names("encoder", set()) == [shared]


def test_a_block_out_of_a_stacked_array():
    stacked = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(take(stacked, Place("x", 2)), stacked[:, 2])
    assert take(stacked, Place("x")) is stacked
    assert their_shapes("a/scale_D", BASE, 6) == [(768, 6)]
    assert their_shapes("a/w_query_DHK", BASE, 6) == [(768, 6, 768), (768, 6, 12, 64)]
