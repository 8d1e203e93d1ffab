# SPDX-License-Identifier: Apache-2.0
"""Plans in words say what the numbers say."""

from switchx.planner.hardware import load_hardware
from switchx.planner.layout import Layout
from switchx.planner.search import explain, num_bytes, predict, seconds
from tests.planner.workloads import make_workload

H200 = load_hardware("h200")


def test_the_first_plan():
    plan = predict(make_workload(), Layout(data=2, expert=4, dispatcher="all_to_all"), H200)
    text = explain(plan, H200, plan)
    assert text.startswith("2 replicas, 4 parts of the experts, Switch layers by all_to_all.")
    assert f"products take {plan.time.compute_s / plan.time.step_s:.0%}" in text
    assert f"A device holds {num_bytes(plan.memory.total)} of 130 GB" in text
    assert "leaves a node" not in text and "stages wait" not in text
    assert "slower" not in text


def test_another_plan_says_what_makes_it_slower():
    workload = make_workload()
    first = predict(workload, Layout(data=8, dispatcher="gather"), H200)
    other = predict(workload, Layout(model=8, dispatcher="gather"), H200)
    slow, fast = sorted((first, other), key=lambda plan: -plan.time.step_s)
    text = explain(slow, H200, fast)
    assert f"{slow.time.step_s / fast.time.step_s - 1:.1%} slower than the first" in text


def test_pipelines_wait_and_nodes_are_left():
    layout = Layout(pipe=4, data=4, dispatcher="gather", num_microbatches=4)
    plan = predict(make_workload(), layout, H200)
    text = explain(plan, H200, plan)
    assert "4 pipeline stages" in text and "4 microbatches" in text
    assert "stages wait" in text and "leaves a node" in text


def test_units():
    assert [seconds(x) for x in (2.0, 0.0123)] == ["2 s", "12.3 ms"]
    assert [num_bytes(x) for x in (2e12, 1.5e9, 2e6, 300.0)] == [
        "2 TB", "1.5 GB", "2 MB", "0.3 kB",
    ]  # fmt: skip
