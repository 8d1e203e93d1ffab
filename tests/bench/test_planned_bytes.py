# SPDX-License-Identifier: Apache-2.0
"""Compiled training steps communicate what the planner says, kind by kind."""

import collections

import pytest

from switchx.bench import planned_bytes
from switchx.bench.planned_bytes import BOUND, CASES, LEFT_OVER, compare, make_job

BRIEF = (
    "dense data=8",
    "dense model=8",
    "replicas all_to_all data=2 expert=2 model=2",
)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in BRIEF], ids=lambda c: c.name)
def test_bytes_are_the_planned_ones(case):
    assert compare(case)["relative_error"] <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in BRIEF], ids=lambda c: c.name
)
def test_bytes_of_other_meshes_are_the_planned_ones(case):
    assert compare(case)["relative_error"] <= BOUND


def test_kinds_do_not_make_up_for_each_other(monkeypatch):
    """As many bytes of another kind are wrong twice."""
    counts = {"all-reduce": 100, "all-gather": 0}, {"all-reduce": 0, "all-gather": 100}
    for name, count in zip(("compiled_bytes", "planned_bytes"), counts, strict=True):
        monkeypatch.setattr(
            planned_bytes, name, lambda job, count=count: collections.Counter(count)
        )
    assert compare(CASES[0])["relative_error"] == 2.0


def test_a_missing_formula_is_found(monkeypatch):
    """The planner without its gradients is more than 5% off."""
    monkeypatch.setattr(planned_bytes, "compiled_bytes", planned_bytes.planned_bytes)
    assert compare(CASES[0])["relative_error"] == 0
    whole = planned_bytes.planned_bytes(make_job(CASES[0]))
    less = collections.Counter({"all-reduce": round(0.9 * whole["all-reduce"])})
    monkeypatch.setattr(planned_bytes, "compiled_bytes", lambda job: less)
    assert compare(CASES[0])["relative_error"] > BOUND


def test_what_is_left_over_says_why():
    assert LEFT_OVER and all(case.left_over for case in LEFT_OVER)
    assert not any(case.left_over for case in CASES)


def test_what_is_left_over_fails_a_check_of_its_own(monkeypatch):
    errors = {case.name: 0.3 for case in LEFT_OVER}
    monkeypatch.setattr(
        planned_bytes,
        "compare",
        lambda case: {"case": case.name, "relative_error": errors.get(case.name, 0.0)},
    )
    report = planned_bytes.run()
    assert {each.name: each.holds for each in report.checks} == {
        "hlo_vs_planner_bytes": True,
        "hlo_vs_planner_bytes_left_over": False,
    }
    assert len(report.results) == len(CASES) + len(LEFT_OVER)
