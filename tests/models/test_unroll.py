# SPDX-License-Identifier: Apache-2.0
"""Layers cut from a scanned model and stacked again; `test_params.py` has their logits."""

import jax
import numpy as np
import pytest

from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.models.unroll import scanned_blocks, unrolled, unrolled_blocks
from tests.data.refusals import refused
from tests.layers.weights import numbers_like


def test_an_unrolled_model_stays_as_it_is():
    config = ModelConfig("decoder_only", 40, 16, 32, 2, 8, 2)
    params = numbers_like(abstract_params(config))
    assert unrolled(config, params) == (config, params)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_only"])
def test_cut_and_stacked_is_what_it_was(architecture):
    layers = 4 if architecture == "encoder_decoder" else 0
    config = ModelConfig(
        architecture, 40, 16, 32, 2, 8, 6, layers, switch=SwitchConfig(4), scan_layers=True
    )
    params = numbers_like(abstract_params(config))
    got_config, got = unrolled(config, params)
    shapes = jax.tree.map(lambda leaf: leaf.shape, got)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, abstract_params(got_config))
    again = scanned_blocks(unrolled_blocks(params), config.period)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_layers_that_cannot_be_stacked():
    def layers(*shapes):
        return {"blocks": {f"layer_{i}": {"w": np.ones(n)} for i, n in enumerate(shapes)}}

    assert scanned_blocks(layers(1, 2, 1, 2), 2)["blocks"]["layer_1"]["w"].shape == (2, 2)
    with refused("3 layers are not repeats of 2"):
        scanned_blocks(layers(1, 2, 1), 2)
    with refused("layer_3 is not like layer_1, so they cannot be stacked"):
        scanned_blocks(layers(1, 2, 1, 1), 2)
