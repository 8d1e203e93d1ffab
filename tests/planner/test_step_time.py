# SPDX-License-Identifier: Apache-2.0
"""Seconds of steps: FLOPs shared out, bubbles, what is spent where."""

import dataclasses

import pytest

from switchx.planner.hardware import load_hardware
from switchx.planner.layout import Layout
from switchx.planner.model_cost import flops_per_sequence
from switchx.planner.step_time import bubble_fraction, device_flops, step_time
from tests.planner.workloads import DENSE, make_workload

H200 = load_hardware("h200")


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "bubble"),
    [(16, 16, 1, 15 / 31), (16, 64, 1, 15 / 79), (16, 64, 2, 15 / 143), (1, 8, 1, 0)],
)
def test_bubble_is_the_schedules(stages, microbatches, chunks, bubble):
    assert bubble_fraction(stages, microbatches, chunks) == pytest.approx(bubble)


def test_bubble_is_that_of_a_drawn_schedule():
    """Every stage busy for M units, the last one starts P - 1 units late."""
    stages, microbatches = 4, 6
    starts = [[stage + i for i in range(microbatches)] for stage in range(stages)]
    makespan = max(map(max, starts)) + 1
    idle = 1 - microbatches / makespan
    assert bubble_fraction(stages, microbatches) == pytest.approx(idle)


def test_one_device_does_three_forward_passes():
    workload = make_workload(DENSE)
    flops = flops_per_sequence(DENSE, 0, 16)
    assert device_flops(workload, Layout()) == pytest.approx(3 * 16 * flops.executed)


def test_devices_share_the_work_and_remat_adds_a_pass():
    workload = make_workload(DENSE)
    whole = device_flops(workload, Layout())
    for layout in (Layout(data=8), Layout(model=8), Layout(fsdp=2, data=2, model=2)):
        assert device_flops(workload, layout) == pytest.approx(whole / 8)
    again = device_flops(make_workload(dataclasses.replace(DENSE, remat="full")), Layout())
    flops = flops_per_sequence(DENSE, 0, 16)
    assert again - whole == pytest.approx(16 * (flops.executed - flops.logits))


def test_the_last_stage_has_the_logits_too():
    workload = make_workload(DENSE)
    flops = flops_per_sequence(DENSE, 0, 16)
    stage = device_flops(workload, Layout(pipe=4, num_microbatches=4))
    blocks = flops.executed - flops.logits
    assert stage == pytest.approx(3 * 16 * (blocks / 4 + flops.logits))


def test_slots_are_computed_full_or_empty():
    workload = make_workload()
    rows = device_flops(workload, Layout(dispatcher="dropless"))
    slots = device_flops(workload, Layout(dispatcher="all_to_all"))
    assert rows == pytest.approx(slots)  # a capacity factor of 1.0
    double = dataclasses.replace(workload.model.switch, capacity_factor=2.0)
    padded = make_workload(dataclasses.replace(workload.model, switch=double))
    assert device_flops(padded, Layout(dispatcher="all_to_all")) > slots
    assert device_flops(padded, Layout(dispatcher="dropless")) == pytest.approx(rows)


def test_a_bubble_stretches_what_every_tick_has():
    time = step_time(make_workload(DENSE), Layout(pipe=4, num_microbatches=4), H200)
    ticks = time.compute_s + time.collectives_s["pipeline"]
    assert time.bubble == pytest.approx(3 / 7)
    assert time.bubble_s <= ticks * (3 / 7) / (4 / 7) + 1e-12
    assert time.bubble_s >= time.compute_s * (3 / 7) / (4 / 7)


def test_time_between_nodes_is_part_of_all():
    inside = step_time(make_workload(DENSE), Layout(data=8), H200)
    across = step_time(make_workload(DENSE), Layout(data=16), H200)
    assert inside.between_s == 0
    assert 0 < across.between_s <= across.communication_s
