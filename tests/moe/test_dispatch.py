# SPDX-License-Identifier: Apache-2.0
"""Gather dispatch: gradients against a loop, empty slots, no scatter of activations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx.moe.dispatch import gather_dispatch, token_of_slot
from tests.compare import assert_slope
from tests.moe.plans import C, D, E, G, T, dispatch_loop, fixed_plan, numbers, tanh_experts


def test_gradients_equal_finite_differences():
    plan, (x_GTD, w_EDD, target_GTD) = fixed_plan(), numbers()

    def loss(x_GTD, gate_GTS, w_EDD):
        changed = dataclasses.replace(plan, gate_GTS=gate_GTS)
        return jnp.sum(gather_dispatch(x_GTD, changed, tanh_experts(w_EDD)) * target_GTD)

    def by_loop(point):
        x_GTD, gate_GTS, w_EDD = point
        changed = dataclasses.replace(plan, gate_GTS=gate_GTS)
        return np.sum(dispatch_loop(x_GTD, changed, w_EDD) * target_GTD)

    point = x_GTD, plan.gate_GTS, w_EDD
    assert_slope(by_loop, point, jax.jit(jax.grad(loss, (0, 1, 2)))(*point), rtol=1e-4)


def test_empty_slots_hold_zeros():
    plan, (x_GTD, _, _) = fixed_plan(), numbers()
    seen = []
    gather_dispatch(jnp.asarray(x_GTD), plan, lambda x_ERD: seen.append(x_ERD) or x_ERD)
    x_EGCD = np.asarray(seen[0]).reshape(E, G, C, D)
    token_GEC = np.asarray(token_of_slot(plan)).reshape(G, E, C)
    for e, g, c in np.ndindex(E, G, C):
        t = token_GEC[g, e, c]
        expected_D = x_GTD[g, t] if t < T else np.zeros(D)
        np.testing.assert_array_equal(x_EGCD[e, g, c], expected_D)


def primitives(jaxpr):
    """(name, output dtype) of every primitive of a program, inner ones included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, equation.outvars[0].aval.dtype
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_no_direction_scatters_activations():
    """The only scatter is that of token numbers into slots."""
    plan, (x_GTD, w_EDD, _) = fixed_plan(), numbers()

    def loss(x_GTD, gate_GTS):
        changed = dataclasses.replace(plan, gate_GTS=gate_GTS)
        return jnp.sum(gather_dispatch(x_GTD, changed, tanh_experts(w_EDD)) ** 2)

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x_GTD, plan.gate_GTS)
    scatters = {dtype for name, dtype in primitives(program.jaxpr) if "scatter" in name}
    assert scatters == {jnp.dtype("int32")}
