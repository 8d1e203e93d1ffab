# SPDX-License-Identifier: Apache-2.0
"""Gradients of expert weights as factors: which weights are tapped, and what comes back.

Dims: E R D F
"""

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.models.config import ModelConfig
from switchx.moe.capacity import rows_per_expert
from switchx.moe.dispatchers import EQUAL_BLOCKS
from switchx.moe.expert_matmul import TappedWeight
from switchx.training.outer_product import OuterProductGradient


def tap_expert_weights(config: ModelConfig, params, batch: dict):
    """Parameters in which every expert weight that profits is a `TappedWeight`.

    It profits when the products of the factors' Gram matrices, which Adafactor then works
    from, cost less than forming the gradient: 2 R (D + F) <= D F. The factors are blocks
    of R rows, so a dispatcher that has none leaves every weight as it is.
    """
    if config.switch is None or config.switch.dispatcher not in EQUAL_BLOCKS:
        return params

    def tap(name, weight):
        if "/experts/w_" not in name:
            return weight
        stack = "encoder" if name.startswith("encoder/") else "decoder"
        rows = rows_per_expert(
            config.switch, *batch[f"{stack}_input_tokens"].shape, is_training=True
        )
        *stacked, fan_in, fan_out = weight.shape
        if 2 * rows * (fan_in + fan_out) > fan_in * fan_out:
            return weight
        dtype = config.precision.compute_dtype
        return TappedWeight(
            weight,
            jnp.zeros((*stacked, rows, fan_in), dtype),
            jnp.zeros((*stacked, rows, fan_out), dtype),
        )

    return tree.map_named(tap, params)


def factored_gradients(grads):
    """Gradients of tapped parameters, each `TappedWeight` as its `OuterProductGradient`."""

    def is_tapped(leaf):
        return isinstance(leaf, TappedWeight)

    return jax.tree.map(
        lambda leaf: OuterProductGradient(leaf.x_ERD, leaf.dy_ERF) if is_tapped(leaf) else leaf,
        grads,
        is_leaf=is_tapped,
    )
