# SPDX-License-Identifier: Apache-2.0
"""A job as the planner sees it: the arrays and the groups that training has."""

import dataclasses

import jax

from switchx import tree
from switchx.moe.capacity import group_shape
from switchx.planner.layout import Layout
from switchx.training.program import TrainingProgram, fitting_group_size, workload_of
from tests.training.jobs import ENCODER_DECODER, SPARSE, make_job


def test_arrays_are_those_of_the_program():
    job = make_job(ENCODER_DECODER)
    program = TrainingProgram(job, jax.devices()[:1])
    state = program.abstract_state
    expected = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((state.params, state.opt_state))
        if leaf.shape
    )
    found = workload_of(job).state
    assert expected == sum(
        each.itemsize * int(jax.numpy.prod(jax.numpy.array(each.shape))) for each in found
    )
    names = []
    tree.map_named(lambda name, leaf: names.append(name), state.params)
    assert sorted(each.name for each in found if each.kind == "params") == sorted(names)


def test_groups_capacity_and_refusals_are_the_dispatchers():
    job = make_job(SPARSE)
    workload = workload_of(job)
    assert workload.routing(8, 8)[:2] == group_shape(64, 8)
    layout = Layout(expert=8, dispatcher="all_to_all")
    assert workload.refusal(layout, 8, 8) is None
    assert "keeps routing groups whole" in workload.refusal(layout, 4, 16)


def test_group_size_that_fits_some_devices():
    switch = dataclasses.replace(SPARSE.switch, group_size=8192)
    job = make_job(dataclasses.replace(SPARSE, switch=switch), batch_size=16)
    size = fitting_group_size(job, 8)
    assert group_shape(16 * 8, size)[0] % 8 == 0
    assert group_shape(16 * 8, size + 1)[0] % 8 != 0
    assert fitting_group_size(make_job(dataclasses.replace(SPARSE, switch=None)), 8) is None
