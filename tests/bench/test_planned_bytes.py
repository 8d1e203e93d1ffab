# SPDX-License-Identifier: Apache-2.0
"""Compiled training steps communicate and compute what the planner says."""

import collections

import jax
import pytest

from switchx.bench import planned_bytes
from switchx.bench.planned_bytes import BOUND, Compiled, compare
from switchx.bench.step_cases import CASES, NUM_DEVICES

BRIEF = (
    "dense data=8",
    "dense data=2 fsdp=2 model=2",
    "1f1b pipe=2 data=4",
    "replicas all_to_all data=2 expert=2 model=2",
)


def assert_planned(case) -> None:
    row = compare(case, jax.devices()[:NUM_DEVICES])
    assert row["relative_error_of_bytes"] <= BOUND
    assert abs(row["relative_error_of_flops"]) <= BOUND


@pytest.mark.parametrize("case", [c for c in CASES if c.name in BRIEF], ids=lambda c: c.name)
def test_bytes_and_flops_are_the_planned_ones(case):
    assert_planned(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in BRIEF], ids=lambda c: c.name
)
def test_bytes_and_flops_of_other_cases_are_the_planned_ones(case):
    assert_planned(case)


@pytest.fixture
def counted(monkeypatch):
    """`counted(compiled, planned)`: the first case's row, of such bytes by kind."""

    def row(compiled: dict, planned: dict) -> dict:
        step = Compiled("", planned_bytes.Layout(data=NUM_DEVICES), {})
        monkeypatch.setattr(planned_bytes, "compile_step", lambda *arguments: step)
        monkeypatch.setattr(Compiled, "num_bytes", collections.Counter(compiled))
        monkeypatch.setattr(Compiled, "flops", lambda self, tiles: 1)
        counter = collections.Counter(planned)
        monkeypatch.setattr(planned_bytes, "planned_bytes", lambda *_, **__: counter)
        return compare(CASES[0], jax.devices()[:NUM_DEVICES])

    return row


def test_kinds_do_not_make_up_for_each_other(counted):
    """As many bytes of another kind are wrong twice."""
    row = counted({"all-reduce": 100, "all-gather": 0}, {"all-reduce": 0, "all-gather": 100})
    assert row["relative_error_of_bytes"] == 2.0


def test_a_missing_formula_fails_the_check(counted):
    rows = [counted({"all-reduce": 100}, {"all-reduce": 90})]
    bytes_check, flops_check = planned_bytes.checks(rows)
    assert (bytes_check.name, bytes_check.value) == ("hlo_vs_planner_bytes", 0.1)
    assert not bytes_check.holds
    # The compiled program has one operation, and the planner a model's.
    assert (flops_check.name, flops_check.holds) == ("hlo_vs_planner_flops", False)
