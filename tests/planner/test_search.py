# SPDX-License-Identifier: Apache-2.0
"""Layouts are all there, ranked by time, explained; what does not run or fit is counted."""

import collections
import dataclasses
import functools

import pytest

from switchx.hardware.spec import load_hardware
from switchx.models.config import ModelConfig
from switchx.optim.adamw import AdamW
from switchx.planner import suggestions
from switchx.planner.layout import Layout
from switchx.planner.search import (
    DOES_NOT_FIT,
    GROUPS_DO_NOT_DIVIDE,
    ON_DEVICE,
    SHARES_BY_ROWS,
    explain,
    layouts,
    num_bytes,
    predict,
    search,
    seconds,
)
from switchx.planner.suggestions import smallest_that_fits, workable_devices
from tests.planner.workloads import DENSE, SPARSE, SWITCH, make_workload, small

V5E, H200 = load_hardware("v5e"), load_hardware("h200")


@functools.cache
def search_on_v5e(model: ModelConfig = SPARSE, devices: int = 8):
    """The search for a small step, which several tests look at."""
    return search(make_workload(model), V5E, devices)


def test_every_mesh_of_four_devices_is_looked_at_once():
    """Ordered factorizations of 4 over 6 axes: 6 with one axis of 4, 15 with two of 2."""
    refused = collections.Counter()
    found = list(layouts(make_workload(DENSE), V5E, 4, refused))
    names = [layout.name for layout in found]
    assert len(set(names)) == len(names)
    assert len(names) + sum(refused.values()) == 6 + 15
    # A dense model has no experts to spread.
    assert refused["node x expert does not divide the experts"] == 2 + 9


@pytest.mark.parametrize("attention", ["einsum", "splash"])
def test_attention_of_one_kernel_has_neither_stages_nor_replicas_rows(attention):
    model = dataclasses.replace(SPARSE, positions="rotary", training_attention=attention)
    found = search_on_v5e(model)
    refused = [reason for reason in found.refused if "training_attention" in reason]
    assert bool(refused) == (attention == "splash")
    is_manual = [
        plan.layout.pipe > 1 or plan.layout.num_microbatches > 1 for plan in found.plans
    ]
    assert any(is_manual) == (attention == "einsum")


def test_a_run_that_writes_texts_has_no_stages():
    workload = dataclasses.replace(make_workload(SPARSE), writes_texts=True)
    found = search(workload, V5E, 8)
    assert {plan.layout.pipe for plan in found.plans} == {1}
    assert found.refused["a text evaluation decodes without stages"] > 0


def test_plans_are_ranked_and_use_the_devices():
    found = search_on_v5e()
    times = [plan.time.step_s for plan in found.plans]
    assert times == sorted(times)
    assert all(plan.layout.size == 8 for plan in found.plans)
    assert found.looked_at == len(found.plans) + sum(found.refused.values())
    used = {plan.layout.dispatcher for plan in found.plans}
    assert {"gather", "dropless", "all_to_all", "ragged_all_to_all", "sliced"} <= used


def test_nodes_are_where_the_nodes_are():
    hardware = dataclasses.replace(H200, devices_per_node=4)
    found = search(make_workload(), hardware, 8)
    assert found.refused["a flat all-to-all over node x expert is one over expert"] > 0
    nodes = {plan.layout.name for plan in found.plans if plan.layout.node > 1}
    assert any("hierarchical" in name for name in nodes)
    assert all(
        plan.layout.expert * plan.layout.model == 4
        for plan in found.plans
        if plan.layout.node > 1
    )


def test_pipelines_of_stacked_blocks_and_experts_beside_slices():
    assert any(plan.layout.pipe > 1 for plan in search_on_v5e(DENSE).plans)
    flat = dataclasses.replace(DENSE, scan_layers=False)
    assert {plan.layout.pipe for plan in search_on_v5e(flat).plans} == {1}
    found = search_on_v5e()
    spread = [plan.layout for plan in found.plans if plan.layout.is_spread]
    assert {each.dispatcher for each in spread} == {"all_to_all"}
    assert all(each.fsdp > 1 and each.node == each.pipe == 1 for each in spread)
    assert max(each.fsdp * each.expert for each in spread) == 8
    assert not any(plan.layout.is_spread for plan in search_on_v5e(DENSE).plans)


def test_what_does_not_fit_is_refused_and_the_smallest_kept():
    least = min(plan.memory.total for plan in search_on_v5e(DENSE).plans)
    found = search(make_workload(DENSE), small(V5E, least * 0.4), 8)
    assert found.refused[DOES_NOT_FIT] > 0
    assert found.smallest is not None
    smallest = found.smallest.memory.total
    assert smallest > least * 0.4
    assert not search(make_workload(DENSE), small(V5E, 0.999 * smallest), 8).plans


def test_microbatches_make_room():
    workload = make_workload(dataclasses.replace(DENSE, remat="full"), batch_size=64)
    layout = Layout(data=4)
    whole = predict(workload, layout, V5E)
    room = predict(workload, dataclasses.replace(layout, num_microbatches=4), V5E)
    assert room.memory.total < whole.memory.total
    hardware = small(V5E, (whole.memory.total + room.memory.total) / 2)
    plans = search(workload, hardware, 4).plans
    (data,) = (plan for plan in plans if plan.layout.data == 4)
    assert data.layout.num_microbatches > 1


def test_optimizer_slices_are_taken_where_the_state_does_not_fit_whole():
    workload = make_workload(dataclasses.replace(DENSE, remat="full"), optimizer=AdamW())
    layout = Layout(data=8)
    whole = predict(workload, layout, V5E)
    cut = predict(workload, dataclasses.replace(layout, has_optimizer_slices=True), V5E)
    # Two moments, in eight parts.
    assert cut.memory.params == whole.memory.params
    assert cut.memory.optimizer == pytest.approx(whole.memory.optimizer / 8, rel=0.01)
    # But for the sums of relative biases, which replicas take over buckets before.
    assert 0.8 <= cut.time.communication_s / whole.time.communication_s <= 1
    assert cut.time.update_s < whole.time.update_s / 5

    def found(num_bytes):
        plans = search(workload, small(V5E, num_bytes), 8).plans
        return [plan.layout for plan in plans if plan.layout.data == 8]

    (taken,) = found((whole.memory.total + cut.memory.total) / 2)
    assert taken.has_optimizer_slices and "zero1" in taken.name
    assert not any(each.has_optimizer_slices for each in found(1.01 * whole.memory.total))
    assert "slices over replicas" in explain(cut, V5E, cut)


def test_devices_that_nothing_divides_into_and_the_fewest_that_would_do():
    workload = make_workload(
        dataclasses.replace(DENSE, remat="full", scan_layers=False), batch_size=8
    )
    plans = search(workload, V5E, 8).plans
    hardware = small(V5E, 1.01 * min(plan.memory.total for plan in plans))
    assert not search(workload, hardware, 2).plans
    number, plan = smallest_that_fits(workload, hardware, 2)
    assert number in (4, 8) and plan.layout.size == number
    limited = dataclasses.replace(hardware, max_devices=2)
    assert smallest_that_fits(workload, limited, 2) is None
    found = search_on_v5e(devices=7)
    assert found.plans == () and found.smallest is None
    below, above = workable_devices(make_workload(), V5E, 7)
    assert below < 7 < above
    assert search_on_v5e(devices=above).plans
    for workload, devices in ((make_workload(), 12), (make_workload(DENSE, batch_size=12), 17)):
        runs = {
            n: suggestions._runs(workload, V5E, n, ON_DEVICE) for n in range(1, 2 * devices + 1)
        }
        near = [n for n in range(devices) if runs.get(n)][-1:]
        near += [n for n in range(devices + 1, 2 * devices + 1) if runs[n]][:1]
        assert workable_devices(workload, V5E, devices) == near


def test_no_group_of_a_model_axis_straddles_two_nodes():
    six = dataclasses.replace(DENSE, num_heads=6, d_ff=24)
    for name, sizes in (("h200x8x3", {1, 2}), ("h200x6x4", {1, 2, 3, 6})):
        found = layouts(
            make_workload(six, batch_size=24), load_hardware(name), 24, collections.Counter()
        )
        assert {each.model for each in found} == sizes


def test_no_number_of_devices_that_the_batch_excludes_is_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(
        suggestions, "_runs", lambda w, h, number, storage: tried.append(number)
    )
    workload = make_workload(batch_size=2**14)
    assert workable_devices(workload, load_hardware("v5p"), 2**16 + 1) == []
    assert len(tried) < 40


def test_groups_that_do_not_divide_are_counted():
    switch = dataclasses.replace(SWITCH, group_size=256)
    workload = make_workload(dataclasses.replace(SPARSE, switch=switch))
    found = search(workload, V5E, 8)
    assert found.refused[GROUPS_DO_NOT_DIVIDE] > 0
    # Devices can share a group along the experts' axis, and then by all_to_all alone.
    assert {p.layout.dispatcher for p in found.plans if p.layout.expert > 1} == {"all_to_all"}
    layouts = [plan.layout for plan in found.plans]
    assert all(each.data == 1 and (each.fsdp == 1 or each.is_spread) for each in layouts)
    # They do so by a ragged all-to-all.
    found = search(workload, H200, 8)
    assert found.refused[SHARES_BY_ROWS] > 0
    assert {plan.layout.expert for plan in found.plans} == {1}


def test_a_batch_of_loads_is_not_split():
    router = dataclasses.replace(SWITCH.router, balance_scope="batch")
    switch = dataclasses.replace(SWITCH, router=router)
    workload = make_workload(dataclasses.replace(SPARSE, switch=switch))
    found = search(workload, V5E, 8)
    assert {plan.layout.num_microbatches for plan in found.plans} == {1}
    assert (
        found.refused[
            "balance_scope='batch' counts first where there are microbatches: not planned"
        ]
        > 0
    )


def test_plans_are_explained():
    plan = predict(make_workload(), Layout(data=2, expert=4, dispatcher="all_to_all"), H200)
    text = explain(plan, H200, plan)
    assert text.startswith("2 replicas, 4 parts of the experts, Switch layers by all_to_all.")
    assert f"products take {plan.time.compute_s / plan.time.step_s:.0%}" in text
    assert f"A device holds {num_bytes(plan.memory.total)} of 130 GB" in text
    assert "leaves a node" not in text and "stages wait" not in text
    assert "slower" not in text
    workload = make_workload()
    first = predict(workload, Layout(data=8, dispatcher="gather"), H200)
    other = predict(workload, Layout(model=8, dispatcher="gather"), H200)
    slow, fast = sorted((first, other), key=lambda plan: -plan.time.step_s)
    text = explain(slow, H200, fast)
    assert f"{slow.time.step_s / fast.time.step_s - 1:.1%} slower than the first" in text
    layout = Layout(pipe=4, data=4, dispatcher="gather", num_microbatches=4)
    plan = predict(make_workload(), layout, H200)
    text = explain(plan, H200, plan)
    assert "4 pipeline stages" in text and "4 microbatches" in text
    assert "stages wait" in text and "leaves a node" in text
    assert [seconds(x) for x in (2.0, 0.0123)] == ["2 s", "12.3 ms"]
    assert [num_bytes(x) for x in (2e12, 1.5e9, 2e6, 300.0)] == [
        "2 TB", "1.5 GB", "2 MB", "0.3 kB",
    ]  # fmt: skip
