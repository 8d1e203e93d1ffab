# SPDX-License-Identifier: Apache-2.0
"""Gather and einsum dispatch against loops, plain indexing and each other; poisoned slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.dispatch import (
    gather_dispatch,
    gather_rows,
    token_of_slot,
)
from tests.compare import assert_slope
from tests.moe.plans import (
    C,
    D,
    E,
    G,
    T,
    dispatch_loop,
    fixed_plan,
    numbers,
    tanh_experts,
)


def inverse_of(index_GQ, num_rows: int, num_choices: int):
    """Places each row goes to, by a loop; one past the last place where there is none."""
    num_places = index_GQ.shape[1]
    inverse_GRS = np.full((len(index_GQ), num_rows, num_choices), num_places, np.int32)
    used = np.zeros((len(index_GQ), num_rows), int)
    for g, q in np.ndindex(*index_GQ.shape):
        r = index_GQ[g, q]
        if r < num_rows:
            inverse_GRS[g, r, used[g, r]] = q
            used[g, r] += 1
    return inverse_GRS


@pytest.mark.parametrize("num_choices", [1, 2])
def test_gather_rows_is_indexing_forward_and_backward(num_choices):
    rng = np.random.default_rng(0)
    num_rows, num_places = 7, 10
    index_GQ = np.full((2, num_places), num_rows, np.int32)  # past the end: an empty place
    for g in range(2):
        rows = np.repeat(np.arange(num_rows), num_choices)
        taken = rng.choice(num_places, size=min(len(rows), 8), replace=False)
        index_GQ[g, taken] = rng.permutation(rows)[: len(taken)]
    inverse_GRS = inverse_of(index_GQ, num_rows, num_choices)
    x_GRD = rng.normal(size=(2, num_rows, 3)).astype(np.float32)
    target_GQD = rng.normal(size=(2, num_places, 3)).astype(np.float32)

    def plain(x_GRD):
        padded_GRD = jnp.pad(x_GRD, ((0, 0), (0, 1), (0, 0)))
        return jnp.stack([padded_GRD[g][index_GQ[g]] for g in range(2)])

    def gathered(x_GRD):
        return gather_rows(x_GRD, jnp.asarray(index_GQ), jnp.asarray(inverse_GRS))

    def grad(function):
        loss = jax.grad(lambda x_GRD: jnp.sum(function(x_GRD) * target_GQD))
        return jax.jit(loss)(x_GRD)

    np.testing.assert_array_equal(jax.jit(gathered)(x_GRD), plain(x_GRD))
    np.testing.assert_allclose(grad(gathered), grad(plain), rtol=1e-6)
    # Twice used rows and empty places did occur.
    assert np.any(np.asarray(index_GQ) == num_rows)
    assert np.any(inverse_GRS[..., -1] < num_places)


def gradients(dispatch, plan, experts=tanh_experts):
    """Output, and gradients by the activations, the gates and the experts' weights."""
    x_GTD, w_EDD, target_GTD = numbers()

    def loss(x_GTD, gate_GTS, w_EDD):
        changed = dataclasses.replace(plan, gate_GTS=gate_GTS)
        y_GTD = dispatch(x_GTD, changed, experts(w_EDD))
        return jnp.sum(y_GTD * target_GTD), y_GTD

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x_GTD, plan.gate_GTS, w_EDD)


def test_gradients_equal_finite_differences():
    plan, (x_GTD, w_EDD, target_GTD) = fixed_plan(), numbers()
    grads, _ = gradients(gather_dispatch, plan)
    arguments = [np.asarray(a, np.float64) for a in (x_GTD, plan.gate_GTS, w_EDD)]
    for i, grad in enumerate(grads):

        def by_loop(changed, i=i):
            x_GTD, gate_GTS, w_EDD = (*arguments[:i], changed, *arguments[i + 1 :])
            moved_plan = dataclasses.replace(plan, gate_GTS=gate_GTS)
            return np.sum(dispatch_loop(x_GTD, moved_plan, w_EDD) * target_GTD)

        assert_slope(by_loop, arguments[i], grad, rtol=1e-4)


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
