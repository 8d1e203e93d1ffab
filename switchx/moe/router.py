# SPDX-License-Identifier: Apache-2.0
"""The Switch router: every token to its most probable expert.

Fedus et al. 2021 (arXiv:2101.03961), section 2.1 eq. 1-2, section 2.4 (float32), appendix C
(jitter). Dims: G T D E S
"""

import jax
import jax.numpy as jnp

from switchx.moe.capacity import assign_slots
from switchx.moe.plan import RoutingPlan


def jitter_inputs(x, jitter: float, *, key: jax.Array | None):
    """Multiplies by U[1-jitter, 1+jitter]; a key of None (evaluation) changes nothing."""
    if key is None or jitter == 0.0:
        return x
    return x * jax.random.uniform(key, x.shape, x.dtype, 1.0 - jitter, 1.0 + jitter)


def router_logits(x_GTD, w_router_DE, *, dtype="float32", jitter=0.0, key=None):
    """Router logits `[G, T, E]`, computed in `dtype` whatever the activations are.

    The jittered input is local to the router: the experts never see it.
    """
    x_GTD = jitter_inputs(x_GTD.astype(dtype), jitter, key=key)
    return jnp.einsum("GTD,DE->GTE", x_GTD, w_router_DE.astype(dtype))


def route_top1(prob_GTE, is_token_GT, capacity: int) -> RoutingPlan:
    """Sends each token to its most probable expert, gated by that probability (eq. 2).

    The gate is the probability under the softmax over all experts. Normalised over the
    one chosen expert it would be 1, and the router would have no gradient from the loss.

    Args:
        is_token_GT: false for padding, which is neither routed nor counted.
    """
    num_experts = prob_GTE.shape[-1]
    expert_GTS = jnp.argmax(prob_GTE, axis=-1, keepdims=True).astype(jnp.int32)
    expert_GTS = jnp.where(is_token_GT[..., None], expert_GTS, num_experts)
    gate_GTS = jnp.max(prob_GTE, axis=-1, keepdims=True)
    slot_GTS, count_GE = assign_slots(expert_GTS, num_experts)
    return RoutingPlan(expert_GTS, gate_GTS, slot_GTS, count_GE, num_experts, capacity)
