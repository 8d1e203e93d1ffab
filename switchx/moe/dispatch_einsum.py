# SPDX-License-Identifier: Apache-2.0
"""One-hot einsum dispatch: the readable oracle, as Mesh-TensorFlow wrote it.

Fedus et al. 2021 (arXiv:2101.03961), appendix F. Dims: G T S E C D
"""

import jax
import jax.numpy as jnp

from switchx.moe.plan import RoutingPlan
from switchx.partitioning.constrain import constrain


def dispatch_tensor(plan: RoutingPlan, dtype):
    """1 where a choice of token T got slot C of expert E, `[G, T, S, E, C]`."""
    is_expert_GTSE = jax.nn.one_hot(plan.expert_GTS, plan.num_experts, dtype=dtype)
    is_slot_GTSC = jax.nn.one_hot(plan.slot_GTS, plan.capacity, dtype=dtype)
    return jnp.einsum("GTSE,GTSC->GTSEC", is_expert_GTSE, is_slot_GTSC)


def einsum_dispatch(x_GTD, plan: RoutingPlan, experts):
    """Dispatches and combines by two einsums over one-hot tensors."""
    G, T, D = x_GTD.shape
    E, C = plan.num_experts, plan.capacity
    dispatch_GTSEC = dispatch_tensor(plan, x_GTD.dtype)
    # Multiplying by zero would not keep out what experts make of empty slots, if it is NaN.
    is_used_EGC1 = jnp.einsum("GTSEC->EGC", dispatch_GTSEC)[..., None] > 0
    x_EGCD = jnp.einsum("GTSEC,GTD->EGCD", dispatch_GTSEC, x_GTD)
    x_EGCD = jnp.where(is_used_EGC1, x_EGCD, 0)
    y_ERD = experts(constrain(x_EGCD.reshape(E, G * C, D), "ERD"))
    y_EGCD = constrain(y_ERD, "ERD").reshape(E, G, C, -1)
    y_EGCD = jnp.where(is_used_EGC1, y_EGCD, 0)
    combine_GTEC = jnp.einsum(
        "GTSEC,GTS->GTEC", dispatch_GTSEC, plan.gate_GTS.astype(x_GTD.dtype)
    )
    return jnp.einsum("GTEC,EGCD->GTD", combine_GTEC, y_EGCD)
