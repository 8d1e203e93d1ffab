# SPDX-License-Identifier: Apache-2.0
"""What every Switch layer has: a router's parameters, and the way from tokens to a plan.

Dims: B L D G T E
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.moe.capacity import layer_capacity, layer_groups
from switchx.moe.exploration import explored_inputs
from switchx.moe.groups import into_groups, out_of_groups
from switchx.moe.hash_router import hash_logits
from switchx.moe.plan import RoutingPlan
from switchx.moe.router import router_logits
from switchx.moe.routing import make_plan
from switchx.moe.shared_groups import assign_shared_slots, constrain_shared, shared_axes
from switchx.moe.stats import Choices, RoutingStats, measure_routing
from switchx.partitioning.constrain import constrain


@dataclasses.dataclass(frozen=True)
class RoutedTokens:
    """Tokens in their groups, and what the router made of them.

    Attributes:
        x_GTD: the layer's input.
        is_token_GT: what was routed.
        logits_GTE, prob_GTE: of the router, in its precision.
    """

    x_GTD: jax.Array
    is_token_GT: jax.Array
    logits_GTE: jax.Array
    prob_GTE: jax.Array
    plan: RoutingPlan


class RoutedLayer(nnx.Module):
    """The router of a Switch layer; what the experts do is in the classes below it.

    Parameters: `w_router_DE`, unless a hash routes; `router_bias_E` in float32 where the
    load is balanced by it. No gradient reaches the bias: `training/router_bias.py` moves it.
    """

    def __init__(self, config, *, key):
        self.config = config
        D, E = config.d_model, config.switch.num_experts
        if config.switch.router.has_weights:
            self.w_router_DE = initializers.weight(
                config, key, (D, E), fan_in=D, scale=config.switch.router_init_scale
            )
        if config.switch.router.has_bias:
            self.router_bias_E = nnx.Param(jnp.zeros((E,), jnp.float32))

    def route(self, x_BLD, is_token_BL, token_BL, *, is_training: bool, key=None):
        """Groups the tokens and plans where they go.

        Args:
            is_token_BL: false for padding.
            token_BL: ids of the tokens; only a hash reads them, others take None.
            key: of exploration, which is for training alone.
        """
        switch, router = self.config.switch, self.config.switch.router
        B, L = is_token_BL.shape
        G, T = layer_groups(switch, B, L)
        if router.padding == "counted":
            is_token_BL = jnp.ones_like(is_token_BL)
        shared = shared_axes(switch.dispatcher, G)

        def grouped(x, dims):
            x = into_groups(x, G, T)
            return constrain_shared(x, shared) if shared else constrain(x, dims)

        x_GTD, is_token_GT = grouped(x_BLD, "GTD"), grouped(is_token_BL, "GT")
        key = key if is_training else None
        if router.has_weights:
            logits_GTE = router_logits(
                explored_inputs(router, x_GTD.astype(self.config.precision.router), key=key),
                self.w_router_DE[...],
                dtype=self.config.precision.router,
            )
        else:
            logits_GTE = hash_logits(into_groups(token_BL, G, T), switch.num_experts)
        prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
        plan = make_plan(
            router,
            logits_GTE,
            prob_GTE,
            is_token_GT,
            layer_capacity(switch, T, is_training=is_training),
            bias_E=self.router_bias_E[...] if router.has_bias else None,
            key=key,
            assign=functools.partial(assign_shared_slots, shared=shared),
        )
        return RoutedTokens(x_GTD, is_token_GT, logits_GTE, prob_GTE, plan)

    def measure(self, routed: RoutedTokens, batch: int, length: int) -> RoutingStats:
        """Statistics and choices of `batch` rows of `length` tokens."""
        stats = measure_routing(
            routed.logits_GTE,
            routed.prob_GTE,
            routed.plan,
            routed.is_token_GT,
            balance_scope=self.config.switch.router.balance_scope,
        )
        choices = Choices(
            out_of_groups(routed.plan.expert_GTS, batch, length),
            out_of_groups(jax.lax.stop_gradient(routed.plan.gate_GTS), batch, length),
        )
        return dataclasses.replace(stats, choices=(choices,))
