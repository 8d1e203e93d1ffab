# SPDX-License-Identifier: Apache-2.0
"""Routing plans: fixed ones of two choices a token, and those that routers make."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from switchx.models.config import RouterConfig
from switchx.moe.routing_plan import RoutingPlan, make_plan
from tests.moe.sharded import make_plan as plan_of_choices

G, T, S, E, C, D = 2, 11, 2, 3, 4, 5


def fixed_plan(num_choices: int = S, capacity: int = C) -> RoutingPlan:
    """Random choices, none twice by one token; some dropped, some tokens padding."""
    rng = np.random.default_rng(0)
    expert_GTS = np.array([[rng.permutation(E) for _ in range(T)] for _ in range(G)])
    expert_GTS = expert_GTS[..., :num_choices]
    expert_GTS[0, 3] = expert_GTS[1, 9:] = E
    return plan_of_choices(expert_GTS, capacity, num_experts=E)


@functools.partial(jax.jit, static_argnums=(0, 3))
def traced_plan(router, logits_GTE, is_token_GT, capacity=4, **options) -> RoutingPlan:
    """What a router makes of the softmax of logits."""
    prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    return make_plan(router, logits_GTE, prob_GTE, is_token_GT, capacity, **options)


def plan_of(*arguments, **options) -> RoutingPlan:
    """The same in NumPy's arrays."""
    return jax.device_get(traced_plan(*arguments, **options))


@functools.partial(jax.jit, static_argnums=2)
def top1_plan(prob_GTE, is_token_GT, capacity: int) -> RoutingPlan:
    """The plan of Switch's own router: each token to its most probable expert."""
    router = RouterConfig(exploration="none")
    return make_plan(router, jnp.log(prob_GTE), prob_GTE, is_token_GT, capacity)


def numbers():
    """Activations, and a direction to take gradients along."""
    return np.random.default_rng(1).normal(size=(2, G, T, D)).astype(np.float32)
