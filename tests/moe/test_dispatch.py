# SPDX-License-Identifier: Apache-2.0
"""Gather dispatch: empty slots, and no scatter of activations; its numbers: `test_layer.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx.moe.dispatch import gather_dispatch, token_of_slot
from tests.jaxprs import equations
from tests.moe.plans import C, D, E, G, T, fixed_plan, numbers


def test_empty_slots_hold_zeros():
    plan, (x_GTD, _) = fixed_plan(), numbers()
    seen = []
    gather_dispatch(jnp.asarray(x_GTD), plan, lambda x_ERD: seen.append(x_ERD) or x_ERD)
    x_EGCD = np.asarray(seen[0]).reshape(E, G, C, D)
    token_GEC = np.asarray(token_of_slot(plan)).reshape(G, E, C)
    for e, g, c in np.ndindex(E, G, C):
        t = token_GEC[g, e, c]
        expected_D = x_GTD[g, t] if t < T else np.zeros(D)
        np.testing.assert_array_equal(x_EGCD[e, g, c], expected_D)


def test_no_direction_scatters_activations():
    """The only scatter is that of token numbers into slots."""
    plan, (x_GTD, _) = fixed_plan(), numbers()

    def loss(x_GTD, gate_GTS):
        changed = dataclasses.replace(plan, gate_GTS=gate_GTS)
        return jnp.sum(gather_dispatch(x_GTD, changed, jnp.tanh) ** 2)

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x_GTD, plan.gate_GTS)
    scatters = [each for each in equations(program.jaxpr) if "scatter" in each.primitive.name]
    assert {each.outvars[0].aval.dtype for each in scatters} == {jnp.dtype("int32")}
