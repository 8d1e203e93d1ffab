# SPDX-License-Identifier: Apache-2.0
"""Routing plans with two choices a token, for the dispatchers, and what they must compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from switchx.models.config import RouterConfig
from switchx.moe.plan import RoutingPlan, make_plan

G, T, S, E, C, D = 2, 11, 2, 3, 4, 5


def fixed_plan(num_choices: int = S, capacity: int = C) -> RoutingPlan:
    """Random choices, none twice by one token; some dropped, some tokens padding."""
    rng = np.random.default_rng(0)
    expert_GTS = np.array([[rng.permutation(E) for _ in range(T)] for _ in range(G)])
    expert_GTS = expert_GTS[..., :num_choices].astype(np.int32)
    expert_GTS[0, 3] = expert_GTS[1, 9:] = E
    slot_GTS, count_GE = np.zeros_like(expert_GTS), np.zeros((G, E), np.int32)
    for g, s, t in np.ndindex(G, num_choices, T):
        e = expert_GTS[g, t, s]
        if e < E:
            slot_GTS[g, t, s] = count_GE[g, e]
            count_GE[g, e] += 1
    gate_GTS = rng.uniform(0.1, 1.0, expert_GTS.shape).astype(np.float32)
    return RoutingPlan(
        *map(jnp.asarray, (expert_GTS, gate_GTS, slot_GTS, count_GE)), E, capacity
    )


@functools.partial(jax.jit, static_argnums=2)
def top1_plan(prob_GTE, is_token_GT, capacity: int) -> RoutingPlan:
    """The plan of Switch's own router: each token to its most probable expert."""
    router = RouterConfig(exploration="none")
    return make_plan(router, jnp.log(prob_GTE), prob_GTE, is_token_GT, capacity)


def is_kept(plan: RoutingPlan, g: int, t: int, s: int) -> bool:
    return bool(
        plan.expert_GTS[g, t, s] < plan.num_experts and plan.slot_GTS[g, t, s] < plan.capacity
    )


def dispatch_loop(x_GTD, plan: RoutingPlan, w_EDD):
    """sum over a token's kept choices of gate * tanh(x w_e), in float64."""
    y_GTD = np.zeros(x_GTD.shape)
    for g, t, s in np.ndindex(*plan.expert_GTS.shape):
        if is_kept(plan, g, t, s):
            hidden_D = x_GTD[g, t].astype(np.float64) @ w_EDD[int(plan.expert_GTS[g, t, s])]
            y_GTD[g, t] += float(plan.gate_GTS[g, t, s]) * np.tanh(hidden_D)
    return y_GTD


def tanh_experts(w_EDD):
    """Experts that a dispatcher can run, the same as in the loop."""
    return lambda x_ERD: jnp.tanh(jnp.einsum("ERD,EDF->ERF", x_ERD, w_EDD))


def numbers():
    """Activations, expert weights, and a direction to take gradients along."""
    rng = np.random.default_rng(1)
    shapes = (G, T, D), (E, D, D), (G, T, D)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]
