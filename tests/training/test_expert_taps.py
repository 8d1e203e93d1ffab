# SPDX-License-Identifier: Apache-2.0
"""Factored gradients of a whole model, multiplied out, are its plain gradients."""

import dataclasses

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params
from switchx.moe.dispatchers import DISPATCHERS, EQUAL_BLOCKS
from switchx.moe.expert_matmul import TappedWeight
from switchx.training.expert_taps import tap_expert_weights
from switchx.training.losses import LossConfig
from switchx.training.outer_product import OuterProductGradient, is_outer_product
from switchx.training.step import StepConfig, gradients
from tests.models.batches import make_batch

SWITCH = SwitchConfig(8, every=2, capacity_factor=1.0, min_capacity=1)
CONFIG = ModelConfig(
    "encoder_decoder", 40, 16, 64, 2, 8, 2, 2, activation="geglu", switch=SWITCH
)
BATCH = make_batch(40, is_encoder_decoder=True)


def is_tapped(leaf):
    return isinstance(leaf, TappedWeight)


def switched(**changes):
    return dataclasses.replace(CONFIG, switch=dataclasses.replace(SWITCH, **changes))


def raw_gradients(config, params, key, *, factored):
    step = StepConfig(factor_expert_gradients=factored)
    loss = LossConfig(layer_reduction="sum")
    return jax.jit(lambda p: gradients(config, loss, step, p, BATCH, key=key)[0])(params)


@pytest.mark.parametrize(
    ("config", "num_factored"),
    [
        # In, gate and out of both stacks.
        (CONFIG, 6),
        (dataclasses.replace(CONFIG, scan_layers=True), 6),
        (switched(sublayers="both", attention_experts="linear"), 6),
        (switched(sublayers="attention", attention_experts="ffn"), 0),
        *(
            pytest.param(
                switched(dispatcher=name),
                6 * (name in EQUAL_BLOCKS),
                # One of each kind is enough for every day.
                marks=[] if name in ("dropless", "all_to_all") else pytest.mark.slow,
            )
            for name in DISPATCHERS
        ),
    ],
    ids=["layers", "scanned layers", "linear attention", "ffn attention", *DISPATCHERS],
)
def test_factors_multiply_out_to_the_plain_gradients(config, num_factored, key):
    params = init_params(config, key)
    plain = raw_gradients(config, params, key, factored=False)
    factored = raw_gradients(config, params, key, factored=True)
    leaves = jax.tree.leaves(factored, is_leaf=is_outer_product)
    assert sum(map(is_outer_product, leaves)) == num_factored
    dense = jax.tree.map(
        lambda leaf: leaf.dense() if is_outer_product(leaf) else leaf,
        factored,
        is_leaf=is_outer_product,
    )
    for name, want in tree.named_leaves(plain).items():
        got = tree.named_leaves(dense)[name]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6, err_msg=name)
    assert all(isinstance(leaf, OuterProductGradient) or leaf.ndim for leaf in leaves)


def test_only_weights_with_few_rows_are_tapped(key):
    """The rule 2 R (D + F) <= D F: 16 x 64 allows 6 rows, so 2 experts of 10 tokens do not."""
    params = init_params(CONFIG, key)
    tapped = jax.tree.leaves(tap_expert_weights(CONFIG, params, BATCH), is_leaf=is_tapped)
    assert sum(map(is_tapped, tapped)) == 6
    few = switched(num_experts=2)
    params = init_params(few, key)
    tapped = jax.tree.leaves(tap_expert_weights(few, params, BATCH), is_leaf=is_tapped)
    assert sum(map(is_tapped, tapped)) == 0


def test_a_dense_model_has_nothing_to_tap(key):
    dense = dataclasses.replace(CONFIG, switch=None)
    params = init_params(dense, key)
    assert tap_expert_weights(dense, params, BATCH) is params
