# SPDX-License-Identifier: Apache-2.0
"""Slots counted in traced programs, against slots counted by hand."""

import dataclasses
import functools

import jax
import pytest

from switchx.models.params import abstract_params, forward
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.planner.program_cost import executed_slots
from tests.training.jobs import DENSE, ENCODER_DECODER, LENGTH, SWITCH, make_batch

ROWS = 16


def count(config, spec: MeshSpec | None = None) -> float:
    batch = make_batch(config, ROWS)
    run = jax.jit(functools.partial(forward, config, is_training=True))
    arguments = abstract_params(config), batch
    if spec is None:
        return executed_slots(run.trace(*arguments).jaxpr, config)
    with use_mesh(spec.build(), spec.rules):
        return executed_slots(run.trace(*arguments).jaxpr, config)


def with_switch(**changes):
    switch = dataclasses.replace(SWITCH, **changes)
    return dataclasses.replace(ENCODER_DECODER, switch=switch)


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}, {"activation": "geglu"}])
def test_groups_of_eight_tokens_and_two_slots_for_each_of_eight_experts(changes):
    config = dataclasses.replace(ENCODER_DECODER, **changes)
    # One sparse block in each stack, a group a row, 8 experts of 2 slots.
    assert count(config) == 2 * ROWS * 8 * 2


def test_rounding_up_to_one_slot_is_seen():
    """Capacity 1 of 16 experts for 8 tokens: two slots a token."""
    config = with_switch(num_experts=16, capacity_factor=1.0)
    assert count(config) == 2 * ROWS * LENGTH * 2


@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(expert=4),
        MeshSpec(data=2, expert=4),
        MeshSpec(data=2, expert=2, model=2),
    ],
    ids=str,
)
def test_on_a_mesh_all_devices_together(spec):
    assert count(with_switch(dispatcher="all_to_all"), spec) == 2 * ROWS * 8 * 2
    assert count(with_switch(dispatcher="einsum"), spec) == 2 * ROWS * 8 * 2


@pytest.mark.parametrize("activation", ["relu", "geglu"])
@pytest.mark.parametrize(
    ("d_ff", "spec"),
    [(16, None), (32, MeshSpec(data=2, expert=2, model=2)), (64, MeshSpec(expert=2, model=4))],
)
def test_a_part_of_f_as_long_as_d_counts_once(activation, d_ff, spec):
    """The product with w_out then looks like that with w_in."""
    config = dataclasses.replace(
        with_switch(dispatcher="all_to_all" if spec else "gather"),
        activation=activation, d_ff=d_ff,
    )  # fmt: skip
    assert config.d_model == 16
    assert count(config, spec) == pytest.approx(2 * ROWS * 8 * 2, rel=1e-9)


def test_without_equal_blocks_there_are_none():
    assert count(with_switch(dispatcher="dropless")) == 0


def test_dense_products_are_no_slots():
    dense = dataclasses.replace(DENSE, switch=SWITCH)
    assert count(dense) == ROWS * 8 * 2


def test_stages_do_not_have_tokens_of_their_own():
    config = with_switch(dispatcher="all_to_all", group_size=LENGTH)
    assert count(config, MeshSpec(pipe=2, expert=4)) == 2 * ROWS * 8 * 2
