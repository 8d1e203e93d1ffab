# SPDX-License-Identifier: Apache-2.0
"""The Switch layer: router, dispatcher and experts in place of a dense FFN.

Fedus et al. 2021 (arXiv:2101.03961), section 2, Figure 2. Dims: B L D G T E
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.layers.dropout import split_key
from switchx.moe.capacity import group_shape, layer_capacity
from switchx.moe.dispatch import sort_dispatch
from switchx.moe.dispatch_einsum import einsum_dispatch
from switchx.moe.experts import Experts
from switchx.moe.router import route_top1, router_logits
from switchx.moe.stats import Choices, measure_routing
from switchx.partitioning.constrain import constrain

DISPATCHERS = {"sort": sort_dispatch, "einsum": einsum_dispatch}


class SwitchFFN(nnx.Module):
    """A sparse FFN: `y_BLD, stats = switch_ffn(x_BLD, is_token_BL, is_training=...)`."""

    def __init__(self, config, *, key):
        self.config = config
        key_router, key_experts = jax.random.split(key)
        D, E = config.d_model, config.switch.num_experts
        self.w_router_DE = initializers.weight(
            config, key_router, (D, E), fan_in=D, scale=config.switch.router_init_scale
        )
        self.experts = Experts(config, key=key_experts)

    def __call__(self, x_BLD, is_token_BL, *, is_training: bool, key=None):
        switch = self.config.switch
        key_jitter, key_dropout = split_key(key, 2)
        B, L, D = x_BLD.shape
        G, T = group_shape(B * L, switch.group_size)
        x_GTD = constrain(_into_groups(x_BLD.reshape(B * L, D), G, T), "GTD")
        is_token_GT = _into_groups(is_token_BL.reshape(B * L), G, T)

        logits_GTE = router_logits(
            x_GTD,
            self.w_router_DE[...],
            dtype=self.config.precision.router,
            jitter=switch.jitter,
            key=key_jitter if is_training else None,
        )
        prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
        capacity = layer_capacity(switch, T, is_training=is_training)
        plan = route_top1(prob_GTE, is_token_GT, capacity)

        def run_experts(x_ERD):
            y_ERD = self.experts(constrain(x_ERD, "ERD"), key=key_dropout)
            return constrain(y_ERD, "ERD")

        y_GTD = constrain(DISPATCHERS[switch.dispatcher](x_GTD, plan, run_experts), "GTD")
        stats = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT)
        gate_BLS = _out_of_groups(jax.lax.stop_gradient(plan.gate_GTS), B, L)
        choices = Choices(_out_of_groups(plan.expert_GTS, B, L), gate_BLS)
        return _out_of_groups(y_GTD, B, L), dataclasses.replace(stats, choices=(choices,))


def _into_groups(x, num_groups: int, group_size: int):
    """`[tokens, ...]` -> `[G, T, ...]`, zero-padded at the end."""
    padding = num_groups * group_size - x.shape[0]
    x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(num_groups, group_size, *x.shape[1:])


def _out_of_groups(x_GT, B: int, L: int):
    """`[G, T, ...]` -> `[B, L, ...]`, without the padding of `_into_groups`."""
    return x_GT.reshape(-1, *x_GT.shape[2:])[: B * L].reshape(B, L, *x_GT.shape[2:])
