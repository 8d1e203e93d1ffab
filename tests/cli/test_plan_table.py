# SPDX-License-Identifier: Apache-2.0
"""Rows and tables of plans."""

import pytest

from switchx.cli.plan_table import print_search, row
from switchx.planner.hardware import load_hardware
from switchx.planner.layout import Layout
from switchx.planner.search import predict, search
from tests.planner.workloads import make_workload

V5E = load_hardware("v5e")


def test_a_rows_parts_add_up():
    workload = make_workload()
    plan = predict(workload, Layout(data=2, expert=4, dispatcher="all_to_all"), V5E)
    found = row(1, plan, workload)
    parts = ("compute_s", "communication_s", "update_s", "bubble_s")
    assert found["step_s"] == pytest.approx(sum(found[name] for name in parts))
    # Two Switch layers, four exchanges each of 4 groups' slots: 2 of 8 experts, 64 numbers.
    assert found["collective_bytes"]["all-to-all"] == 2 * 4 * (2 * 8 * 2 * 64 * 4)
    assert found["tokens_per_s"] == pytest.approx(256 / found["step_s"])


def test_the_table_has_as_many_rows_as_asked_for(capsys):
    found = search(make_workload(), V5E, 8)
    print_search(found, V5E, 8, top=2)
    out = capsys.readouterr().out
    assert f"{found.looked_at:,} layouts, {len(found.plans):,} fit" in out
    assert " 2  " in out and "\n 3  " not in out
