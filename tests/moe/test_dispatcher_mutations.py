# SPDX-License-Identifier: Apache-2.0
"""Dispatchers broken on purpose are caught by the assertions that hold for the right ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe import all_to_all, dropless
from switchx.moe.all_to_all import all_to_all_dispatch, hierarchical_dispatch
from switchx.moe.dispatch import einsum_dispatch
from switchx.moe.dropless import sliced_dispatch, sliced_scatter_dispatch
from switchx.partitioning import collectives
from switchx.partitioning.mesh import MeshSpec
from tests.moe.sharded import PIPELINE_MOE, answer, answer_on, assert_same, make_problem

SLICED = MeshSpec(model=4, rules=PIPELINE_MOE)
PROBLEM = make_problem()


@pytest.fixture(scope="module")
def want():
    return answer(einsum_dispatch, PROBLEM)


def first_term_only(psum, value, axes):
    is_first = jax.lax.axis_index(axes) == 0
    return psum(jax.tree.map(lambda x: jnp.where(is_first, x, 0), value), axes)


@jax.custom_vjp
def doubled(x):
    return x


doubled.defvjp(lambda x: (x, None), lambda _, dx: (2 * dx,))


def doubled_gradient(run):
    """Of the activations, outputs unchanged: what Adam and Adafactor would hide."""
    return lambda x_GTD, *rest: run(doubled(x_GTD), *rest)


def doubled_weight_gradient(run):
    return lambda x, plan, bank, *rest: run(x, plan, jax.tree.map(doubled, bank), *rest)


def without_gates(run):
    return lambda x, gate_GTS, *rest: run(x, jnp.ones_like(gate_GTS), *rest)


def rolled(token_of_slot):
    """Every slot thinks that it has the next slot's token."""
    return lambda plan: jnp.roll(token_of_slot(plan), 1, axis=1)


def one_row_late(sort_into_rows):
    def sort(*arguments, **options):
        rows = sort_into_rows(*arguments, **options)
        return dropless.ExpertRows(jnp.roll(rows.choice_R, 1), rows.row_X, rows.count_E)

    return sort


def expert_late(sort_into_rows):
    """Rows are placed for the next expert."""

    def sort(expert_X, num_experts, **options):
        late_X = jnp.where(expert_X < num_experts, (expert_X + 1) % num_experts, expert_X)
        return sort_into_rows(late_X, num_experts, **options)

    return sort


# What is broken: (dispatcher, its name, mesh, module, function in it, what takes its place).
ALL_TO_ALL = (all_to_all_dispatch, "all_to_all", MeshSpec(expert=4))
IN_PARTS = (all_to_all_dispatch, "all_to_all", MeshSpec(expert=2, model=2))
TENSOR_SLICED = (sliced_dispatch, "sliced", SLICED)
MUTANTS = {
    "an exchange left out": (
        *ALL_TO_ALL, all_to_all, "all_to_all", lambda _: lambda x, axes: x,
    ),
    "off by one slot": (*ALL_TO_ALL, all_to_all, "token_of_slot", rolled),
    "doubled gradient": (*ALL_TO_ALL, all_to_all, "run_slots", doubled_gradient),
    "doubled gradient of weights": (
        *ALL_TO_ALL, all_to_all, "run_slots", doubled_weight_gradient,
    ),
    "terms of one part of F": (
        *IN_PARTS, jax.lax, "psum", lambda f: functools.partial(first_term_only, f),
    ),
    "terms of one device's experts": (
        *TENSOR_SLICED, jax.lax, "psum", lambda f: functools.partial(first_term_only, f),
    ),
    "no gate, as Algorithm 1 is printed": (
        *TENSOR_SLICED, dropless, "run_choices", without_gates,
    ),
    "off by one row": (*TENSOR_SLICED, dropless, "sort_into_rows", one_row_late),
    "another expert's rows": (*TENSOR_SLICED, dropless, "sort_into_rows", expert_late),
    "doubled gradient, sliced": (
        *TENSOR_SLICED, dropless, "run_choices", doubled_gradient,
    ),
    "half of a reduce-scatter": (
        sliced_scatter_dispatch, "sliced_scatter", SLICED, dropless, "run_choices",
        lambda run: lambda x, *rest: run(x, *rest) / 2,
    ),
    "rows of another token": (
        sliced_dispatch, "dropless", MeshSpec(), dropless,
        "sort_into_rows", one_row_late,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_dispatcher_is_caught(want, monkeypatch, mutant):
    dispatch, name, spec, module, function, break_it = MUTANTS[mutant]
    monkeypatch.setattr(module, function, break_it(getattr(module, function)))
    got = answer_on(spec, name, PROBLEM, dispatch)
    with pytest.raises(AssertionError):
        assert_same(got, want)
    monkeypatch.undo()
    assert_same(answer_on(spec, name, PROBLEM, dispatch), want)


def test_a_doubled_gradient_leaves_the_output_alone(want, monkeypatch):
    """So no test of outputs, nor of losses under Adam, would have found it."""
    run_slots = all_to_all.run_slots
    monkeypatch.setattr(all_to_all, "run_slots", doubled_gradient(run_slots))
    y_GTD, (dx_GTD, *_) = answer_on(MeshSpec(expert=4), "all_to_all", PROBLEM)
    assert_same(y_GTD, want[0])
    np.testing.assert_allclose(dx_GTD, 2 * np.asarray(want[1][0]), rtol=1e-4, atol=1e-5)


def test_a_dropped_psum_does_not_even_type(monkeypatch):
    """`check_vma` knows that devices hold different terms."""
    monkeypatch.setattr(jax.lax, "psum", lambda value, axes: value)
    with pytest.raises(ValueError, match="replicat|varying|vary"):
        answer_on(SLICED, "sliced", PROBLEM)


def test_half_of_a_hierarchical_exchange_is_caught(want, monkeypatch):
    spec = MeshSpec(node=2, expert=2)
    monkeypatch.setattr(
        all_to_all,
        "hierarchical_all_to_all",
        lambda x_P, axes: collectives.all_to_all(x_P, axes[1:]),
    )
    with pytest.raises(AssertionError):
        assert_same(answer_on(spec, "hierarchical", PROBLEM, hierarchical_dispatch), want)
