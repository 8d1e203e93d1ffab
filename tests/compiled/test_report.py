# SPDX-License-Identifier: Apache-2.0
"""Compiled steps as reports: every check can fail, and what does not fit says the way out."""

import dataclasses

import pytest

from switchx.compiled import report as compiled
from switchx.compiled.training_step import CompiledStep, HostMemory, Memory
from switchx.models.flops import count_parameters
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.partitioning.topology import GIB, Topology
from tests.training.jobs import ENCODER_DECODER, LENGTH, make_job

JOB = make_job(ENCODER_DECODER)
V4 = Topology.parse("v4:8x8x16")
STATE = compiled.planned_step(JOB, V4)["planned_argument_bytes_per_device"]
TOO_LARGE = Memory(3 * GIB, 97 * GIB, 100 * GIB, 15 * GIB)
STEP = CompiledStep(
    devices=1024,
    parameters=count_parameters(ENCODER_DECODER).total,
    tokens_per_batch=8 * LENGTH // 2,  # of the job's 8 rows
    target_tokens_per_batch=1 << 17,
    slots_per_token=2.4,
    memory=Memory(STATE + 1000, 5 * GIB, 8 * GIB, 15 * GIB),
    batch_bytes=1000,
    flops=7,
    collectives={"all-to-all": (3, 5)},
    seconds=1.0,
)


def verdicts(step: CompiledStep, job=JOB) -> dict[str, bool]:
    report = compiled.report_of(step, job, V4, "x.gin")
    return {check.name: check.holds for check in report.checks}


HOST = HostMemory(4 * GIB, Memory(30 * GIB, 0, 30 * GIB, 15 * GIB), 4 * GIB, 0.9, (1 << 20,))
FAULTS = {
    "fits": {"memory": dataclasses.replace(TOO_LARGE, arguments=STATE)},
    "argument_error_vs_planned": {"host": None, "batch_bytes": 1000 - STATE // 50},
    "parameters": {"parameters": STEP.parameters - 1},
    "devices": {"devices": 2048},
    "tokens_per_batch": {"tokens_per_batch": STEP.tokens_per_batch // 2},
    "slots_per_token": {"slots_per_token": 2.6},  # factor 2, and 1.25 times it
    "evaluation_fits": {"others": {"evaluation": TOO_LARGE}},
    "fits_without_storage": {"host": dataclasses.replace(HOST, without=STEP.memory)},
    "host_bytes_vs_formula": {"host": dataclasses.replace(HOST, needed=5 * GIB)},
    "copies_overlapped": {"host": dataclasses.replace(HOST, copies_overlapped=0.7)},
    "reversed_strides_wrong": {"host": dataclasses.replace(HOST, strides=(1, -1))},
}


@pytest.mark.parametrize(("failing", "changes"), FAULTS.items(), ids=FAULTS)
def test_every_check_can_fail(failing, changes):
    step = dataclasses.replace(STEP, host=HOST)
    assert all(verdicts(step).values())
    found = verdicts(dataclasses.replace(step, **changes))
    assert [name for name, holds in found.items() if not holds] == [failing]


def test_the_planned_time_is_the_planners():
    """2 FLOPs a weight and token, three passes: compute alone bounds it from below."""
    planned = compiled.planned_step(JOB, V4)
    seconds, row = (
        planned["planned_step_s"],
        compiled.report_of(STEP, JOB, V4, "x.gin").results[0],
    )
    assert row["planned_step_s"] == seconds
    # 1,024 replicas sum their gradients, and nothing else is sent.
    [(kind, size)] = row["planned_bytes_per_device"].items()
    assert kind == "all-reduce" and size >= 4 * count_parameters(ENCODER_DECODER).total
    tokens = JOB.batch_size * sum(JOB.sequence_lengths)
    assert seconds > 6 * ENCODER_DECODER.d_model**2 * tokens / (1024 * 275e12)
    assert compiled.planned_step(JOB, Topology.parse("tpu7x:4x4x4"))["planned_step_s"] > 0


def test_parts_of_an_exchange_have_to_overlap():
    switch = dataclasses.replace(
        ENCODER_DECODER.switch, dispatcher="all_to_all", exchange_parts=2
    )
    job = make_job(dataclasses.replace(ENCODER_DECODER, switch=switch))
    for number in (0, 1):
        step = dataclasses.replace(STEP, overlapped_exchanges=number)
        assert "overlapped_exchanges" not in verdicts(step)  # of slots sent at once
        assert verdicts(step, job)["overlapped_exchanges"] == (number == 1)


def test_by_how_much_it_does_not_fit_is_said():
    too_large = dataclasses.replace(STEP, memory=TOO_LARGE)
    [row] = compiled.report_of(too_large, JOB, V4, "x.gin").results
    assert row["excess_bytes_per_device"] == 85 * GIB
    assert "too large by 85.00 GiB a device, of temporaries" in row["way_out"]


@pytest.mark.parametrize(
    ("switch", "router", "slots"),
    [
        ({"expert_capacity": 2}, {}, 4.0),  # of 8 experts and sequences of 4 tokens
        ({"min_capacity": 4, "group_size": 16}, {}, 2.0),
        ({}, {"overflow": "dropless"}, 8.0),
    ],
)
def test_slots_are_held_to_what_the_configuration_asks_for(switch, router, slots):
    own = dataclasses.replace(ENCODER_DECODER.switch, capacity_factor=1.0, num_experts=8)
    own = dataclasses.replace(own, router=dataclasses.replace(own.router, **router), **switch)
    job = make_job(dataclasses.replace(ENCODER_DECODER, switch=own), batch_size=8)
    for number, holds in ((1.25 * slots, True), (1.26 * slots, False)):
        step = dataclasses.replace(STEP, slots_per_token=number)
        assert verdicts(step, job)["slots_per_token"] is holds


@pytest.mark.parametrize(
    ("rules", "is_planned"),
    [
        (Rules(), True),
        (Rules(optimizer_slices=("data",)), True),
        (Rules(optimizer_slices=("data", "expert")), False),
        (Rules(activations=(("B", ("data",)),)), False),
        (Rules(params=(("V", ("data",)),), may_stay_whole=()), False),
    ],
)
def test_a_job_with_rules_of_its_own_is_compared_with_no_other(rules, is_planned):
    job = make_job(ENCODER_DECODER, mesh=MeshSpec(rules=rules))
    planned = compiled.planned_step(job, Topology.parse("v5e:2x4"))
    assert bool(planned) is is_planned


def test_there_is_no_formula_for_the_parameters_of_a_model_of_ones_own(monkeypatch):
    own = dataclasses.replace(STEP, parameters=STEP.parameters - 1)
    assert not verdicts(own)["parameters"]
    monkeypatch.setattr(type(ENCODER_DECODER), "build", lambda self, key: None)
    assert verdicts(own)["parameters"]
