# SPDX-License-Identifier: Apache-2.0
"""The Switch layer: router, dispatcher and experts in place of a dense FFN.

Fedus et al. 2021 (arXiv:2101.03961), section 2, Figure 2. Dims: B L D G T E
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.layers.dropout import split_key
from switchx.layers.ffn import DenseFFN
from switchx.moe.dispatchers import choose_dispatcher
from switchx.moe.experts import Experts
from switchx.moe.groups import out_of_groups
from switchx.moe.plan import RoutingPlan
from switchx.moe.routed_layer import RoutedLayer
from switchx.moe.shared_groups import constrain_shared, shared_axes
from switchx.partitioning.constrain import constrain


class SwitchFFN(RoutedLayer):
    """A sparse FFN: `y_BLD, stats = switch_ffn(x_BLD, is_token_BL, is_training=...)`.

    With `shared_d_ff` a dense FFN of that size is added for every token, dropped ones among
    them, ungated.
    """

    def __init__(self, config, *, key):
        key_router, key_experts = jax.random.split(key)
        super().__init__(config, key=key_router)
        self.experts = Experts(config, key=key_experts)
        if config.switch.shared_d_ff is not None:
            shared = dataclasses.replace(config, d_ff=config.switch.shared_d_ff)
            self.shared_expert = DenseFFN(shared, key=jax.random.fold_in(key, 2))

    def __call__(self, x_BLD, is_token_BL, token_BL=None, *, is_training: bool, key=None):
        """Output and routing statistics.

        Args:
            is_token_BL: false for padding.
            token_BL: ids of the tokens, for a router that hashes them.
        """
        switch = self.config.switch
        B, L, _ = x_BLD.shape
        key_router, key_dropout = split_key(key, 2)
        key_shared = None if key is None else jax.random.fold_in(key, 2)
        routed = self.route(
            x_BLD, is_token_BL, token_BL, is_training=is_training, key=key_router
        )

        dispatch = choose_dispatcher(switch, routed.plan, is_training=is_training)
        y_GTD = dispatch(routed.x_GTD, routed.plan, self.experts.weights(key=key_dropout))
        if switch.router.overflow == "identity":
            y_GTD = y_GTD + dropped_gates(routed.plan)[..., None].astype(y_GTD.dtype) * (
                routed.x_GTD
            )
        shared = shared_axes(switch.dispatcher, y_GTD.shape[0])
        y_GTD = constrain_shared(y_GTD, shared) if shared else constrain(y_GTD, "GTD")
        y_BLD = out_of_groups(y_GTD, B, L)
        if switch.shared_d_ff is not None:
            y_BLD = y_BLD + self.shared_expert(x_BLD, key=key_shared)
        return y_BLD, self.measure(routed, B, L)


def dropped_gates(plan: RoutingPlan):
    """Sum of the gates of each token's choices that got no slot, `[G, T]`."""
    is_dropped_GTS = plan.is_routed_GTS & ~plan.is_kept_GTS
    return jnp.sum(jnp.where(is_dropped_GTS, plan.gate_GTS, 0.0), axis=-1)
