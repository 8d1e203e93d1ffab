# SPDX-License-Identifier: Apache-2.0
"""Every dispatcher on its meshes gives the outputs and raw gradients of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from switchx.moe.dispatch import einsum_dispatch
from switchx.moe.dispatchers import FUNCTIONS
from switchx.moe.sharded_dispatch import expert_specs, run_exchanged, run_on_devices
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from tests.cases import slow, slow_unless
from tests.moe.banks import dispatch_loop
from tests.moe.sharded import (
    HOMES,
    MOST_AXES,
    PIPELINE_MOE,
    E,
    G,
    S,
    T,
    answer_on,
    answerer,
    assert_same,
    compiled,
    make_problem,
    name_of,
    random_choices,
)

ONES = np.ones((G, T, 1), int)
# Choices, by name: the shapes are the same, so that one program runs them all.
LOADS = {
    "random": random_choices(),
    "all tokens on two experts": np.concatenate([3 * ONES, 4 * ONES], axis=2),
    "empty experts": np.sort(np.random.default_rng(3).choice([1, 6], (G, T, S))),
    "nothing routed": np.full((G, T, S), E),
    "one token": np.where(np.arange(T)[None, :, None] == 5, [[[2, 7]]], E) * np.ones((G, 1, 1)),
}
LOADS["empty experts"][..., 1] = np.where(LOADS["empty experts"][..., 0] == 1, 6, 1)


@pytest.fixture(scope="module")
def want():
    """The einsum form on one device, itself held against loops."""
    run = answerer(einsum_dispatch)
    problems = {name: make_problem(choices) for name, choices in LOADS.items()}
    answers = {name: run(*problem.arguments) for name, problem in problems.items()}
    for name, problem in problems.items():
        loop = dispatch_loop(problem.x_GTD, problem.plan, problem.numbers)
        np.testing.assert_allclose(answers[name][0], loop, rtol=1e-5, atol=1e-5)
    return problems, answers


@pytest.mark.parametrize(
    ("name", "spec"),
    [slow_unless(MOST_AXES[name] == spec, name, spec) for name, spec in HOMES],
    ids=name_of,
)
def test_whatever_the_load_numbers_are_those_of_one_device(want, name, spec):
    problems, answers = want
    for load, problem in problems.items():
        assert_same(answer_on(spec, name, problem), answers[load])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("all_to_all", 3),
        slow("all_to_all", 99),  # a part for each slot
        slow("hierarchical", 2),
    ],
)
def test_slots_that_travel_in_parts_give_the_same_numbers(want, name, parts):
    problems, answers = want
    run = answerer(functools.partial(FUNCTIONS[name], exchange_parts=parts))
    for load, problem in problems.items():
        assert_same(answer_on(MOST_AXES[name], name, problem, run), answers[load])


# On one device two others are `all_to_all` and `dropless`.
ALIKE = ("gather", "hierarchical", "sliced", "sliced_scatter")


@pytest.mark.parametrize("name", [slow_unless(name not in ALIKE, name) for name in FUNCTIONS])
def test_on_one_device_all_are_the_same(want, name):
    problems, answers = want
    for load, problem in problems.items():
        assert_same(compiled(name)(*problem.arguments), answers[load])


def test_dropout_differs_between_devices_and_not_between_calls(key):
    """Devices with other tokens drop other entries."""
    problem, spec = make_problem(), MeshSpec(expert=4)
    bank = dataclasses.replace(problem.bank, key=key, dropout_rate=0.5)
    same = jax.tree.map(
        lambda a: jnp.broadcast_to(a[:1], a.shape), (problem.x_GTD, problem.plan)
    )
    with use_mesh(spec.build(), spec.rules):
        run = jax.jit(lambda x, plan, bank: FUNCTIONS["all_to_all"](x, plan, bank))
        y_GTD = run(*same, bank)
        np.testing.assert_array_equal(y_GTD, run(*same, bank))
    # The groups are alike, so all that tells them apart is what was dropped.
    assert len({row.tobytes() for row in np.asarray(y_GTD)}) == len(y_GTD)


def test_parts_of_an_exchange_have_masks_of_their_own(key):
    """Two tokens alike, one in each part: what is dropped tells them apart."""
    x_PERD = jnp.ones((1, E, 2, 8))
    bank = dataclasses.replace(make_problem().bank, key=key, dropout_rate=0.5)
    y_PERD = run_exchanged(x_PERD, bank, lambda x_PERD: x_PERD, exchange_parts=2)
    assert np.all(np.any(y_PERD[0, :, 0] != y_PERD[0, :, 1], axis=-1))
    bank = dataclasses.replace(bank, key=None)
    y_PERD = run_exchanged(x_PERD, bank, lambda x_PERD: x_PERD, exchange_parts=2)
    np.testing.assert_array_equal(y_PERD[0, :, 0], y_PERD[0, :, 1])


def test_weights_are_split_by_their_names_and_a_key_is_whole(key):
    bank = dataclasses.replace(make_problem().bank, key=key)
    mesh = MeshSpec(data=1, fsdp=2, expert=2, model=2).build()
    specs = expert_specs(Rules(), mesh, bank)
    assert specs.w_in_EDF == PartitionSpec("expert", "fsdp", "model")
    assert specs.b_out_ED == PartitionSpec("expert", "fsdp")
    assert specs.key == PartitionSpec()


def test_a_device_sees_its_groups_its_experts_and_all_of_d():
    seen = {}

    def local(x_GTD, plan, experts, placement):
        seen.update(x=x_GTD.shape, plan=plan.expert_GTS.shape, w=experts.w_in_EDF.shape)
        assert placement.experts == ("model",)
        return x_GTD * 1.0

    spec, problem = MeshSpec(fsdp=2, model=2, rules=PIPELINE_MOE), make_problem()
    with use_mesh(spec.build(), spec.rules):
        y_GTD = jax.jit(lambda *a: run_on_devices(local, *a))(*problem.arguments[:3])
    assert seen == {"x": (2, T, 8), "plan": (2, T, S), "w": (4, 8, 16)}
    # Both devices of a group returned the tokens as their terms.
    np.testing.assert_allclose(y_GTD, 2 * problem.x_GTD, rtol=1e-6)
