# SPDX-License-Identifier: Apache-2.0
"""Seconds of collectives, worked by hand on networks of round numbers."""

import dataclasses

import pytest

from switchx.planner.hardware import (
    Compute,
    Hardware,
    Memory,
    Network,
)
from switchx.planner.layout import Layout
from switchx.planner.step_time import collective_seconds, crosses_nodes
from tests.data.refusals import refused

FAST = Network(100.0, 1.0, 0.01, "by hand")
SLOW = Network(10.0, 0.5, 0.1, "by hand")  # 5 bytes a second
GPUS = Hardware(
    "gpus", "by hand", 4, Compute(1.0, 1.0, ""), Memory(1.0, 1.0, 1.0, 1.0, ""), FAST, SLOW
)
TORUS = dataclasses.replace(
    GPUS,
    devices_per_node=64,
    inside=dataclasses.replace(FAST, torus_dims=2, torus_side=8, wraps_at=8, latency_s=0.0),
)


def seconds(kind, axes, layout, hardware=GPUS, num_bytes=800.0):
    return collective_seconds(kind, num_bytes, axes, layout, hardware)


def test_inside_of_a_node():
    layout = Layout(model=4)
    ring = 0.75 * 800 / 100 + 3 * 0.01
    assert seconds("all-gather", ("model",), layout) == pytest.approx(ring)
    assert seconds("reduce-scatter", ("model",), layout) == pytest.approx(ring)
    assert seconds("all-reduce", ("model",), layout) == pytest.approx(2 * ring)
    assert seconds("all-to-all", ("model",), layout) == pytest.approx(ring)


def test_over_nodes_a_ring_passes_each_port_once():
    """8 devices in 2 nodes: 4 of them share what leaves a node, 4 x 5 bytes a second."""
    ring = 7 / 8 * 800 / 20 + 6 * 0.01 + 2 * 0.1
    assert seconds("all-reduce", ("data",), Layout(data=8)) == pytest.approx(2 * ring)
    # One device of each node: its own 5 bytes a second.
    lonely = 1 / 2 * 800 / 5 + 2 * 0.1
    layout = Layout(data=2, model=4)
    assert seconds("all-gather", ("data",), layout) == pytest.approx(lonely)


def test_flat_all_to_all_sends_a_message_to_each_device_of_other_nodes():
    """8 experts in 2 nodes of 4: half of the bytes leave, in 4 messages."""
    expected = max(3 / 8 * 800 / 100, 4 / 8 * 800 / 5) + 3 * 0.01 + 4 * 0.1
    layout = Layout(node=2, expert=4)
    assert seconds("all-to-all", ("node", "expert"), layout) == pytest.approx(expected)


def test_hierarchical_sends_fewer_messages_and_as_many_bytes_between_nodes():
    """SE-MoE, section 4.2: one message a node where flat has one a device."""
    layout = Layout(node=2, expert=4)
    inside = seconds("all-to-all", ("expert",), layout)
    between = seconds("all-to-all", ("node",), layout)
    assert inside == pytest.approx(3 / 4 * 800 / 100 + 3 * 0.01)
    assert between == pytest.approx(1 / 2 * 800 / 5 + 0.1)


def test_on_a_torus_rings_send_both_ways_and_all_to_all_takes_a_quarter():
    layout = Layout(data=8, model=8)
    gather = seconds("all-gather", ("model",), layout, TORUS)
    assert gather == pytest.approx(7 / 8 * 800 / 200)
    # Every device's 800 bytes to 8 devices: 8 x 800 in all; a quarter of gathering those.
    exchange = seconds("all-to-all", ("model",), layout, TORUS)
    assert exchange == pytest.approx(8 * 800 / 200 / 4)
    # 64 devices lie along both dimensions.
    both = seconds("all-gather", ("data", "model"), layout, TORUS)
    assert both == pytest.approx(63 / 64 * 800 / 400)


def test_a_line_has_half_of_a_rings_links():
    layout = Layout(data=16, model=4)
    assert seconds("all-gather", ("model",), layout, TORUS) == pytest.approx(0.75 * 800 / 100)
    assert seconds("all-to-all", ("model",), layout, TORUS) == pytest.approx(800 * 4 / 4 / 100)


def test_neighbours_and_nothing():
    assert seconds("collective-permute", ("pipe",), Layout(pipe=4)) == pytest.approx(8.01)
    far = seconds("collective-permute", ("pipe",), Layout(pipe=2, model=4))
    assert far == pytest.approx(800 / 5 + 0.1)
    assert seconds("all-reduce", ("data",), Layout()) == 0
    assert crosses_nodes(("pipe",), Layout(pipe=2, model=4), GPUS)
    assert not crosses_nodes(("model",), Layout(pipe=2, model=4), GPUS)


def test_kinds_without_a_formula():
    with refused("kind='gossip' has no formula; use all-gather, <any>"):
        seconds("gossip", ("model",), Layout(model=2))
