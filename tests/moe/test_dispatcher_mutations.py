# SPDX-License-Identifier: Apache-2.0
"""Dispatchers broken on purpose are caught by the assertions that hold for the right ones."""

import functools

import jax
import jax.numpy as jnp
import pytest

from switchx.moe import all_to_all, dropless
from switchx.moe.dispatch import einsum_dispatch
from switchx.moe.dispatchers import FUNCTIONS
from switchx.moe.dropless import sliced_dispatch
from switchx.partitioning import collectives
from tests.cases import slow
from tests.moe.sharded import MOST_AXES, answer, answer_on, answerer, assert_same, make_problem

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


# What is broken: (its name, module, function in it, what takes its place). By default: what
# travels, raw gradients, gates.
MUTANTS = {
    "an exchange left out": (
        "all_to_all", all_to_all, "all_to_all", lambda _: lambda x, axes: x,
    ),
    "doubled gradient of weights": (
        "all_to_all", all_to_all, "run_slots", doubled_weight_gradient,
    ),
    "no gate, as Algorithm 1 is printed": ("sliced", dropless, "run_choices", without_gates),
}  # fmt: skip
MORE_MUTANTS = {
    "terms of one device's experts": (
        "sliced", jax.lax, "psum", lambda f: functools.partial(first_term_only, f),
    ),
    "another expert's rows": ("sliced", dropless, "sort_into_rows", expert_late),
    "half of a hierarchical exchange": (
        "hierarchical", all_to_all, "hierarchical_all_to_all",
        lambda _: lambda x_P, axes: collectives.all_to_all(x_P, axes[1:]),
    ),
    "off by one slot": ("all_to_all", all_to_all, "token_of_slot", rolled),
    "doubled gradient": ("all_to_all", all_to_all, "run_slots", doubled_gradient),
    "terms of one part of F": (
        "all_to_all", jax.lax, "psum", lambda f: functools.partial(first_term_only, f),
    ),
    "off by one row": ("sliced", dropless, "sort_into_rows", one_row_late),
    "doubled gradient, sliced": ("sliced", dropless, "run_choices", doubled_gradient),
    "half of a reduce-scatter": (
        "sliced_scatter", dropless, "run_choices",
        lambda run: lambda x, *rest: run(x, *rest) / 2,
    ),
    "rows of another token": ("dropless", dropless, "sort_into_rows", one_row_late),
}  # fmt: skip


@pytest.mark.parametrize("mutant", [*MUTANTS, *(slow(name) for name in MORE_MUTANTS)])
def test_a_broken_dispatcher_is_caught(want, monkeypatch, mutant):
    name, module, function, break_it = (MUTANTS | MORE_MUTANTS)[mutant]
    assert_same(answer_on(MOST_AXES[name], name, PROBLEM), want)
    monkeypatch.setattr(module, function, break_it(getattr(module, function)))
    got = answer_on(MOST_AXES[name], name, PROBLEM, answerer(FUNCTIONS[name]))
    with pytest.raises(AssertionError):
        assert_same(got, want)
    if "doubled gradient" in mutant:  # no test of outputs, nor of losses under Adam, finds it
        assert_same(got[0], want[0])


def test_a_dropped_psum_does_not_even_type(monkeypatch):
    """`check_vma` knows that devices hold different terms."""
    monkeypatch.setattr(jax.lax, "psum", lambda value, axes: value)
    with pytest.raises(ValueError, match="replicat|varying|vary"):
        answer_on(MOST_AXES["sliced"], "sliced", PROBLEM, answerer(sliced_dispatch))
