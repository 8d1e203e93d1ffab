# SPDX-License-Identifier: Apache-2.0
"""Experts inside of the tensor-parallel group; a buffer that is too small loses nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.compiled.collectives import collectives
from switchx.moe import dropless
from switchx.moe.dispatch import einsum_dispatch
from switchx.moe.dispatchers import FUNCTIONS
from switchx.moe.dropless import buffered_choices, overflows, sliced_dispatch
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from tests.cases import slow_unless
from tests.moe.sharded import (
    MOST_AXES,
    PIPELINE_MOE,
    C,
    E,
    G,
    S,
    T,
    answer,
    answer_on,
    answerer,
    assert_same,
    compiled_hlo,
    make_problem,
    random_choices,
)

SPEC = MOST_AXES["sliced"]
BY_DEFAULT = [("sliced", 0.5)]
# One expert a device: the third has all first choices, the second choices are spread.
SKEWED = random_choices(2)
SKEWED[:, :-1, 1] = np.where(SKEWED[:, :-1, 0] == 2, 5, SKEWED[:, :-1, 0])
SKEWED[:, :-1, 0] = 2


@pytest.mark.parametrize(
    ("name", "buffer_factor"),
    [
        slow_unless((name, factor) in BY_DEFAULT, name, factor)
        for name in ("sliced", "sliced_scatter")
        for factor in (0.5, 1.0, 1.5, 100.0)
    ],
)
def test_any_buffer_gives_the_numbers_of_room_for_all(name, buffer_factor):
    """Some devices overflow and run again, others do not; in one program."""
    spec = MeshSpec(model=4, rules=PIPELINE_MOE)
    problem = make_problem(SKEWED, capacity=T)
    # Of the whole batch; the two devices of `data` each have half of it.
    is_over = np.asarray(overflows(problem.plan, 4, buffer_factor))
    assert is_over[1] == (buffer_factor < 2)
    dispatch = functools.partial(FUNCTIONS[name], buffer_factor=buffer_factor)
    got = answer_on(spec, name, problem, answerer(dispatch))
    assert_same(got, answer(einsum_dispatch, problem))


def test_overflow_is_known_from_the_plan():
    problem = make_problem(SKEWED, capacity=T)
    load_E = np.bincount(SKEWED.reshape(-1), minlength=E + 1)[:E]
    room = buffered_choices(G * T * S, 8, 2.0)
    assert room == G * T * S // 4
    np.testing.assert_array_equal(overflows(problem.plan, 8, 2.0), load_E > room)
    assert np.asarray(overflows(problem.plan, 8, 2.0)).tolist() == [i == 2 for i in range(8)]
    # What is dropped takes no room.
    assert not np.any(overflows(make_problem(SKEWED, capacity=1).plan, 8, 2.0))
    assert not np.any(overflows(problem.plan, 8, None))


@pytest.mark.parametrize(
    ("factor", "room"), [(None, 100), (1.0, 25), (1.01, 26), (3.0, 75), (9.0, 100)]
)
def test_room_is_never_more_than_there_is(factor, room):
    assert buffered_choices(100, 4, factor) == room


def test_the_buffer_is_what_the_backward_pass_keeps():
    """Operands are saved and no hidden layer, which is computed again in the smaller one."""
    problem = make_problem(capacity=T)
    x_GTD, plan, bank, _ = problem.arguments

    def kept_rows(buffer_factor):
        dispatch = functools.partial(sliced_dispatch, buffer_factor=buffer_factor)
        _, pull_back = jax.eval_shape(
            functools.partial(jax.vjp, lambda x: dispatch(x, plan, bank)), x_GTD
        )
        return {leaf.shape for leaf in jax.tree.leaves(pull_back)}

    assert any(shape[-1:] == (16,) and len(shape) == 2 for shape in kept_rows(None))
    assert not any(
        shape[-1:] == (16,) and len(shape) == 2 and shape[0] > E for shape in kept_rows(0.5)
    )


def test_no_all_to_all_and_one_all_reduce_forward():
    spec = MeshSpec(model=4, rules=PIPELINE_MOE)
    forward, both = (collectives(hlo) for hlo in compiled_hlo(spec, "sliced", make_problem()))
    assert [c.kind for c in forward] == ["all-reduce"]
    assert not any("all-to-all" in c.kind for c in both)


def test_split_tokens_are_gathered_and_scattered():
    spec = MeshSpec(model=4, rules=PIPELINE_MOE)
    forward = collectives(next(compiled_hlo(spec, "sliced_scatter", make_problem())))
    assert [c.kind for c in forward] == ["all-gather", "reduce-scatter"]
    assert forward[0].num_bytes == forward[1].num_bytes == G // 2 * T * 8 * 4


def test_each_device_computes_its_own_choices_alone(monkeypatch):
    """Room for what its experts were asked for, in blocks; none for other devices' experts."""
    seen = []
    run_choices = dropless.run_choices

    def watched(x_GTD, gate_GTS, rows, experts):
        seen.append(rows.count_E.shape)
        return run_choices(x_GTD, gate_GTS, rows, experts)

    monkeypatch.setattr(dropless, "run_choices", watched)
    x_GTD, plan, bank, _ = make_problem(capacity=C).arguments
    with use_mesh(SPEC.build(), SPEC.rules):
        jax.eval_shape(sliced_dispatch, x_GTD, plan, bank)
    assert set(seen) == {(E // 2,)}
    assert jnp.shape(make_problem().plan.count_GE) == (G, E)
