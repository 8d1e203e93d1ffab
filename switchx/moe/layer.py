# SPDX-License-Identifier: Apache-2.0
"""The Switch layer: router, dispatcher and experts in place of a dense FFN.

Fedus et al. 2021 (arXiv:2101.03961), section 2, Figure 2. Dims: B L D G T E
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.layers.dropout import split_key
from switchx.moe.capacity import group_shape, layer_capacity
from switchx.moe.dispatchers import choose_dispatcher
from switchx.moe.experts import Experts
from switchx.moe.router import route_top1, router_logits
from switchx.moe.stats import measure_routing
from switchx.partitioning.constrain import constrain


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

        dispatch = choose_dispatcher(switch, plan, is_training=is_training)
        y_GTD = dispatch(x_GTD, plan, self.experts.weights(key=key_dropout))
        y_GTD = constrain(y_GTD, "GTD")
        stats = measure_routing(logits_GTE, prob_GTE, plan, is_token_GT)
        return y_GTD.reshape(G * T, D)[: B * L].reshape(B, L, D), stats


def _into_groups(x, num_groups: int, group_size: int):
    """`[tokens, ...]` -> `[G, T, ...]`, zero-padded at the end."""
    padding = num_groups * group_size - x.shape[0]
    x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(num_groups, group_size, *x.shape[1:])
