# SPDX-License-Identifier: Apache-2.0
"""What must hold for any plan, on one device and on eight: poison and metamorphic tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.moe.dispatchers import FUNCTIONS
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from tests.cases import slow_unless
from tests.moe.sharded import (
    MOST_AXES,
    E,
    G,
    Problem,
    S,
    T,
    answer_on,
    assert_same,
    compiled,
    make_problem,
    name_of,
)

CELLS = [("gather", MeshSpec(data=2, expert=4)), *MOST_AXES.items()]
# By default one that sends slots and one that sends rows; the others are like one of them.
WAYS = ("all_to_all", "dropless")
each_cell = pytest.mark.parametrize(
    ("name", "spec"), [slow_unless(cell[0] in WAYS, *cell) for cell in CELLS], ids=name_of
)


def run(name, spec, problem: Problem):
    return answer_on(spec, name, problem)


@st.composite
def problems(draw):
    """Any choices, loads skewed and experts empty among them, some choices none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.sampled_from([0.0, 1.0, 4.0]))
    scores_GTE = rng.gumbel(size=(G, T, E)) - skew * np.log1p(rng.permutation(E))
    expert_GTS = np.argsort(-scores_GTE, axis=-1)[..., :S]
    expert_GTS[rng.uniform(size=(G, T, S)) < draw(st.sampled_from([0.0, 0.3]))] = E
    return make_problem(expert_GTS, capacity=4, seed=int(rng.integers(1 << 30)))


few = settings(max_examples=3, derandomize=True)


@each_cell
@few
@given(problem=problems(), seed=st.integers(0, 999))
def test_any_slots_will_do(name, spec, problem, seed):
    """Which slot of its expert a token has says nothing, as long as no other has it."""
    C = problem.plan.capacity
    slot_GTS = np.asarray(problem.plan.slot_GTS)
    order_GEC = np.random.default_rng(seed).permuted(
        np.tile(np.arange(C), (G, E + 1, 1)), axis=2
    )
    g = np.arange(G)[:, None, None]
    moved = order_GEC[g, problem.plan.expert_GTS, np.minimum(slot_GTS, C - 1)]
    slot_GTS = np.where(slot_GTS < C, moved, slot_GTS)
    plan = dataclasses.replace(problem.plan, slot_GTS=jnp.asarray(slot_GTS))
    assert_same(
        run(name, spec, dataclasses.replace(problem, plan=plan)), run(name, spec, problem)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PoisonedBank:
    """Experts that return NaN for empty rows, as outputs and as gradients of inputs.

    A row of a token is never all zero here; empty ones are. If a gradient arrives at an
    empty row, everything becomes NaN: weights would have learned from it.
    """

    bank: object

    def __call__(self, x_ERD):
        return self._poison(self.bank, x_ERD)

    def run_rows(self, x_RD, count_E, gate_R=None):
        return self._poison(lambda x: self.bank.run_rows(x, count_E, gate_R), x_RD)

    def on_device(self, index, is_first_part):
        return PoisonedBank(self.bank.on_device(index, is_first_part))

    def _poison(self, run, x):
        is_used = jnp.any(x != 0, axis=-1, keepdims=True)

        @jax.custom_vjp
        def poison_input(x, is_used):
            return x

        @jax.custom_vjp
        def poison_output(y, is_used):
            return jnp.where(is_used, y, jnp.nan)

        def backward_input(is_used, dx):
            return jnp.where(is_used, dx, jnp.nan), np.zeros(is_used.shape, jax.dtypes.float0)

        def backward_output(is_used, dy):
            arrived = jnp.any(jnp.where(is_used, 0.0, dy) != 0.0)
            dy = jnp.where(arrived, jnp.nan, jnp.where(is_used, dy, 0.0))
            return dy, np.zeros(is_used.shape, jax.dtypes.float0)

        poison_input.defvjp(lambda x, is_used: (x, is_used), backward_input)
        poison_output.defvjp(
            lambda y, is_used: (poison_output(y, is_used), is_used), backward_output
        )
        return poison_output(run(poison_input(x, is_used)), is_used)


@each_cell
def test_nan_in_unused_slots_and_rows_changes_nothing(name, spec):
    # Of four slots an expert has all, one, two or none in use; some tokens are dropped.
    choices = np.full((G, T, S), E)
    choices[:, :, 0], choices[:, 3, 1], choices[:, 5:7, 1] = 2, 7, 5
    problem = make_problem(choices)
    want = run(name, spec, problem)
    x_GTD, plan, bank, dy_GTD = problem.arguments
    with use_mesh(spec.build(), spec.rules):
        got = compiled(name, spec)(x_GTD, plan, PoisonedBank(bank), dy_GTD)
    y, (dx, dgate, poisoned) = got
    assert_same((y, (dx, dgate, poisoned.bank)), want)


def test_the_poison_is_one():
    """The same experts, with empty rows looked at, do give NaN."""
    problem = make_problem(capacity=T)

    def careless(x_GTD, plan, experts):
        return (
            FUNCTIONS["gather"](x_GTD, plan, experts) + experts(jnp.zeros((E, 1, 8)))[0, 0, 0]
        )

    x_GTD, plan, bank, _ = problem.arguments
    assert np.all(np.isnan(jax.jit(careless)(x_GTD, plan, PoisonedBank(bank))))
