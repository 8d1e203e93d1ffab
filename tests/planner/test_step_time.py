# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives, by hand on networks of round numbers, and of steps."""

import dataclasses

import pytest

from switchx.hardware.spec import Compute, Hardware, Memory, Network, load_hardware
from switchx.models.flops import flops_per_sequence
from switchx.pipeline.schedule import ScheduleSpec
from switchx.planner.layout import Layout
from switchx.planner.step_time import (
    bubble_fraction,
    collective_seconds,
    crosses_nodes,
    device_flops,
    executed_flops,
    step_time,
)
from tests.data.refusals import refused
from tests.planner.workloads import DENSE, make_workload

FAST = Network(100.0, 1.0, 0.01, "by hand")
SLOW = Network(10.0, 0.5, 0.1, "by hand")  # 5 bytes a second
GPUS = Hardware(
    "gpus", "by hand", 4, Compute(1.0, 1.0, ""), Memory(1.0, 1.0, 1.0, 1.0, ""), FAST, SLOW
)
TORUS = dataclasses.replace(
    GPUS,
    devices_per_node=64,
    inside=dataclasses.replace(FAST, torus_dims=2, wraps_at=8, latency_s=0.0),
)


def seconds(kind, axes, layout, hardware=GPUS, num_bytes=800.0):
    return collective_seconds(kind, num_bytes, axes, layout, hardware)


def test_inside_of_a_node_between_neighbours_and_nothing():
    layout = Layout(model=4)
    ring = 0.75 * 800 / 100 + 3 * 0.01
    assert seconds("all-gather", ("model",), layout) == pytest.approx(ring)
    assert seconds("reduce-scatter", ("model",), layout) == pytest.approx(ring)
    assert seconds("all-reduce", ("model",), layout) == pytest.approx(2 * ring)
    assert seconds("all-to-all", ("model",), layout) == pytest.approx(ring)
    assert seconds("collective-permute", ("pipe",), Layout(pipe=4)) == pytest.approx(8.01)
    far = seconds("collective-permute", ("pipe",), Layout(pipe=2, model=4))
    assert far == pytest.approx(800 / 5 + 0.1)
    assert seconds("all-reduce", ("data",), Layout()) == 0
    assert crosses_nodes(("pipe",), Layout(pipe=2, model=4), GPUS)
    assert not crosses_nodes(("model",), Layout(pipe=2, model=4), GPUS)
    with refused("kind='gossip' has no formula; use all-gather, <any>"):
        seconds("gossip", ("model",), Layout(model=2))


def test_over_nodes_a_ring_passes_each_port_once():
    """8 devices in 2 nodes: 4 of them share what leaves a node, 4 x 5 bytes a second."""
    ring = 7 / 8 * 800 / 20 + 6 * 0.01 + 2 * 0.1
    assert seconds("all-reduce", ("data",), Layout(data=8)) == pytest.approx(2 * ring)
    # One device of each node: its own 5 bytes a second.
    lonely = 1 / 2 * 800 / 5 + 2 * 0.1
    layout = Layout(data=2, model=4)
    assert seconds("all-gather", ("data",), layout) == pytest.approx(lonely)


def test_all_to_all_over_nodes_flat_and_hierarchical():
    # 8 experts in 2 nodes of 4: half of the bytes leave, in 4 messages.
    expected = max(3 / 8 * 800 / 100, 4 / 8 * 800 / 5) + 3 * 0.01 + 4 * 0.1
    layout = Layout(node=2, expert=4)
    assert seconds("all-to-all", ("node", "expert"), layout) == pytest.approx(expected)
    # SE-MoE, section 4.2: one message a node where flat has one a device.
    layout = Layout(node=2, expert=4)
    inside = seconds("all-to-all", ("expert",), layout)
    between = seconds("all-to-all", ("node",), layout)
    assert inside == pytest.approx(3 / 4 * 800 / 100 + 3 * 0.01)
    assert between == pytest.approx(1 / 2 * 800 / 5 + 0.1)


def test_rings_and_lines_of_a_torus():
    layout = Layout(data=8, model=8)
    gather = seconds("all-gather", ("model",), layout, TORUS)
    assert gather == pytest.approx(7 / 8 * 800 / 200)
    # Every device's 800 bytes to 8 devices: 8 x 800 in all; a quarter of gathering those.
    exchange = seconds("all-to-all", ("model",), layout, TORUS)
    assert exchange == pytest.approx(8 * 800 / 200 / 4)
    # 64 devices lie along both dimensions.
    both = seconds("all-gather", ("data", "model"), layout, TORUS)
    assert both == pytest.approx(63 / 64 * 800 / 400)
    layout = Layout(data=16, model=4)
    assert seconds("all-gather", ("model",), layout, TORUS) == pytest.approx(0.75 * 800 / 100)
    assert seconds("all-to-all", ("model",), layout, TORUS) == pytest.approx(800 * 4 / 4 / 100)


H200 = load_hardware("h200")


@pytest.mark.parametrize(("stages", "microbatches"), [(16, 16), (16, 64), (1, 8)])
def test_bubble_is_the_schedules(stages, microbatches):
    schedule = ScheduleSpec().build(stages, microbatches)
    assert bubble_fraction(stages, microbatches) == pytest.approx(schedule.bubble())


def test_devices_share_three_forward_passes_and_remat_and_stages_add_one():
    workload, flops = make_workload(DENSE), flops_per_sequence(DENSE, 0, 16)
    whole = device_flops(workload, Layout())
    assert whole == pytest.approx(3 * 16 * flops.executed)
    for layout in (Layout(data=8), Layout(model=8), Layout(fsdp=2, data=2, model=2)):
        assert device_flops(workload, layout) == pytest.approx(whole / 8)
    again = device_flops(make_workload(dataclasses.replace(DENSE, remat="full")), Layout())
    # The last product of an FFN is a term of a sum that is kept.
    needed = flops.executed - flops.logits - flops.dense_ffn / 2
    assert again - whole == pytest.approx(16 * needed)
    # A stage runs its blocks once more before it goes backward; stages share the logits too.
    stage = device_flops(workload, Layout(pipe=4, num_microbatches=4))
    assert stage == pytest.approx((whole + 16 * (flops.executed - flops.logits)) / 4)


def test_slots_are_computed_full_or_empty():
    workload = make_workload()
    rows = device_flops(workload, Layout(dispatcher="dropless"))
    slots = device_flops(workload, Layout(dispatcher="all_to_all"))
    assert rows == pytest.approx(slots)  # a capacity factor of 1.0
    double = dataclasses.replace(workload.model.switch, capacity_factor=2.0)
    padded = make_workload(dataclasses.replace(workload.model, switch=double))
    assert device_flops(padded, Layout(dispatcher="all_to_all")) > slots
    assert device_flops(padded, Layout(dispatcher="dropless")) == pytest.approx(rows)


def test_a_bubble_is_the_products_of_ticks_without_a_microbatch():
    """4 stages and 4 microbatches: 7 rounds of the blocks, 4 of the logits; 2 chunks, 5.5."""
    layout = Layout(pipe=4, num_microbatches=4)
    time = step_time(make_workload(DENSE), layout, H200)
    assert time.bubble == pytest.approx(3 / 7)
    logits = 3 * 16 * flops_per_sequence(DENSE, 0, 16).logits / 4 / H200.compute.flops_per_s
    assert time.bubble_s == pytest.approx((time.compute_s - logits) * 3 / 4)
    chunks = dataclasses.replace(layout, schedule=ScheduleSpec("interleaved", 2))
    shorter = step_time(make_workload(DENSE), chunks, H200)
    assert shorter.bubble == pytest.approx(3 / 11)
    assert shorter.bubble_s == pytest.approx((time.compute_s - logits) * 1.5 / 4)


def test_other_systems_stages_wait_and_keep_what_they_need():
    layout = Layout(pipe=4, num_microbatches=4, is_ours=False)
    workload = make_workload(DENSE)
    flops = flops_per_sequence(DENSE, 0, 16)
    assert device_flops(workload, layout) == pytest.approx(3 * 16 * flops.executed / 4)
    assert executed_flops(workload, layout) == device_flops(workload, layout)
    time = step_time(workload, layout, H200)
    ticks = time.compute_s + time.collectives_s["pipeline"]
    assert time.bubble_s == pytest.approx(ticks * (3 / 7) / (4 / 7))


def test_copies_have_slots_that_are_computed_too():
    workload = make_workload()
    double = dataclasses.replace(workload.model.switch, num_replicas=8)
    with_copies = make_workload(dataclasses.replace(workload.model, switch=double))
    layout = Layout(expert=8, dispatcher="all_to_all")
    more = device_flops(with_copies, layout) - device_flops(workload, layout)
    slots = flops_per_sequence(workload.model, 0, 16).expert_slots
    assert more == pytest.approx(3 * 16 * slots / 8)


def test_time_between_nodes_is_part_of_all():
    inside = step_time(make_workload(DENSE), Layout(data=8), H200)
    across = step_time(make_workload(DENSE), Layout(data=16), H200)
    assert inside.between_s == 0
    assert 0 < across.between_s <= across.communication_s
