# SPDX-License-Identifier: Apache-2.0
"""What `bench storage` says is what happened: bits, order and bytes that are wrong are seen."""

import dataclasses
import json
import re
import shlex

import numpy as np
import pytest

from switchx.bench import (
    storage,
    storage_memory,
    storage_order,
    storage_resumed,
    storage_runs,
    storage_time,
)
from switchx.bench.report import Check
from switchx.bench.storage_order import Event, violations
from switchx.cli.main import main
from switchx.storage.cache import BACKWARD, FORWARD
from switchx.storage.trace import trace_of_steps
from tests.processes import ROOT
from tests.test_readme import commands

BOUNDS = {
    "layered_gradient_error": "<=1e-6",
    "bits_differing_by_cache": "==0",
    "lazy_vs_dense_bits_differing": "==0",
    "loss_vs_resident": "<=1e-5",
    "layered_vs_resident_tokens_per_s": ">=0.85",
    "step_vs_bound": "<=1.3",
    "rss_over_budget": "<=1.2",
    "bytes_vs_formula": "==1",
    "order_violations": "==0",
    "kill9_differing": "==0",
}


@pytest.fixture
def measured(monkeypatch):
    """What each part found, to be changed by a test."""
    found = {
        "gradients": [{"gradients": "a model", "relative_error": 1e-8}],
        "bits": [{"cached": "10%", "bits_differing": 0}],
        "lazy": [{"late_updates": "adamw", "bits_differing": 0}],
        "losses": [{"losses": "on a disk", "max_relative_difference": 1e-7}],
        "traffic": [{"traffic": "a run", "read_vs_formula": 1.0, "written_vs_formula": 1.0}],
        "order": [{"order": "2 slots", "violations": 0}],
        "memory": [
            {"memory": width, "budget_mib": mib, "peak_rss_mib": 500 + mib}
            for width, mib in (("thin", 10), ("wide", 400))
        ],
        "kills": [{"killed": what, "differing": 0} for what in ("a store", "training")],
    }
    for module, name, part in (
        (storage, "gradient_rows", "gradients"),
        (storage, "cache_rows", "bits"),
        (storage, "lazy_rows", "lazy"),
        (storage, "loss_rows", "losses"),
        (storage_order, "traffic_rows", "traffic"),
        (storage_order, "order_rows", "order"),
        (storage_memory, "rows", "memory"),
        (storage_resumed, "rows", "kills"),
    ):
        monkeypatch.setattr(module, name, lambda *_, part=part, **__: found[part])
    times = [Check(name, 1.0, BOUNDS[name]) for name in list(BOUNDS)[4:6]]
    monkeypatch.setattr(
        storage_time, "measured", lambda rounds: ([{"step": "resident"}], times)
    )
    return found


def checks_of(capsys) -> dict[str, dict]:
    assert main(["bench", "storage", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {check["name"]: check for check in printed["checks"]}


def test_names_and_bounds_of_the_checks_are_fixed(measured, capsys):
    checks = checks_of(capsys)
    assert {name: check["bound"] for name, check in checks.items()} == BOUNDS
    assert all(check["holds"] for check in checks.values())


def test_commands_of_the_page_run(measured, capsys):
    page = (ROOT / "docs/storage.md").read_text(encoding="utf-8")
    found = [each for each in commands(page) if each.startswith("switchx bench ")]
    assert len(found) == 2
    for command in found:
        assert main(shlex.split(command)[1:]) == 0
        assert "kill9_differing" in capsys.readouterr().out
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (\S+) (\S+) \| \S.* \|$", page, re.MULTILINE)
    said = {name: comparison + bound for name, comparison, bound in rows}
    assert said == BOUNDS


@pytest.mark.parametrize(
    ("part", "row", "column", "value", "check"),
    [
        ("gradients", 0, "relative_error", float("nan"), "layered_gradient_error"),
        ("bits", 0, "bits_differing", 1, "bits_differing_by_cache"),
        ("lazy", 0, "bits_differing", 1, "lazy_vs_dense_bits_differing"),
        ("losses", 0, "max_relative_difference", 2e-5, "loss_vs_resident"),
        ("traffic", 0, "written_vs_formula", 0.99, "bytes_vs_formula"),
        ("order", 0, "violations", 1, "order_violations"),
        ("memory", 1, "peak_rss_mib", 990, "rss_over_budget"),
        ("kills", 1, "differing", 1, "kill9_differing"),
    ],
)
def test_a_check_fails_alone_by_its_own_number(
    measured, capsys, part, row, column, value, check
):
    measured[part][row][column] = value
    checks = checks_of(capsys)
    assert [name for name, each in checks.items() if not each["holds"]] == [check]


def test_bits_are_counted():
    one = {"a": np.array([1.0, 2.0], np.float32), "b": np.zeros(3, np.int8)}
    other = {name: array.copy() for name, array in one.items()}
    assert storage_runs.differing_bits(one, other) == 0
    other["a"].view(np.int32)[1] ^= 5
    other["b"][0] = -1
    assert storage_runs.differing_bits(one, other) == 2 + 8
    with pytest.raises(ValueError, match="cannot be compared"):
        storage_runs.differing_bits(one, {"a": one["a"]})


# Order.


def step_in_order(num_runs: int = 4, slots: int = 2) -> list[Event]:
    """What a step does whose guesses are all right."""
    events = []
    for sweep, runs in ((FORWARD, range(num_runs)), (BACKWARD, range(num_runs)[::-1])):
        way = 1 if sweep == FORWARD else -1
        for run in runs:
            if 0 <= run + way * (slots - 1) < num_runs:
                events.append(Event("read", sweep, run + way * (slots - 1)))
            events.append(Event("compute", sweep, run, slots - 1))
            if sweep == BACKWARD and run + 1 < num_runs:
                events.append(Event("keep", sweep, run + 1))
    return [*events, Event("keep", BACKWARD, 0)]


def test_a_step_in_order_has_no_violation():
    assert violations(step_in_order(), 4, 2) == []
    assert violations(step_in_order(5, 3), 5, 3) == []
    again = step_in_order()
    at = again.index(Event("compute", FORWARD, 2, 1))
    again[at + 1 : at + 1] = [Event("compute", FORWARD, 1, 1), Event("compute", FORWARD, 2, 1)]
    assert violations(again, 4, 2) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.remove(Event("read", FORWARD, 2)), "forward 1 began before the reads"),
        (lambda e: e.remove(Event("read", BACKWARD, 0)), "backward 1 began before the reads"),
        (lambda e: e.remove(Event("compute", FORWARD, 1, 1)), "forward 2 came after run 0"),
        (lambda e: e.remove(Event("compute", BACKWARD, 0, 1)), "backward ended at run 1"),
        (lambda e: e.remove(Event("keep", BACKWARD, 2)), "gradients kept of runs"),
        (
            lambda e: e.__setitem__(e.index(Event("compute", FORWARD, 1, 1)),
                                    Event("compute", FORWARD, 1, 2)),
            "forward 1 with 2 banks",
        ),
        (
            lambda e: e.insert(e.index(Event("compute", BACKWARD, 2, 1)), e.pop(e.index(
                Event("keep", BACKWARD, 3)))),
            "gradients of run 3 kept before run 2 began",
        ),
    ],
)  # fmt: skip
def test_what_is_out_of_order_is_named(change, words):
    events = step_in_order()
    change(events)
    found = violations(events, 4, 2)
    assert any(words in each for each in found), found


@pytest.mark.slow  # compiles a program of ten layers
def test_a_program_with_more_slots_than_it_says_is_seen(monkeypatch):
    assert storage_order.order_rows((2,), num_steps=1)[0]["violations"] == 0

    class OneMore(storage_order.WatchedGradients):
        def __init__(self, job, banks):
            storage = dataclasses.replace(job.storage, slots=job.storage.slots + 1)
            super().__init__(dataclasses.replace(job, storage=storage), banks)

    monkeypatch.setattr(storage_order, "WatchedGradients", OneMore)
    assert storage_order.order_rows((2,), num_steps=1)[0]["violations"] > 0


# Bytes.


def test_the_closed_formula_of_bytes_is_what_a_cache_does():
    layers, experts, steps = 5, 3, 4
    used = [[np.arange(experts)] * layers] * steps
    trace = trace_of_steps(used, [f"decoder {n}" for n in range(layers)], experts, 1, sweeps=3)
    found = storage_order.simulated(trace, experts, "lru")
    assert found == (steps * experts * (3 * layers - 2), steps * experts * layers)


# The parts themselves, small.


@pytest.mark.slow  # compiles some models
def test_parts_measure_what_holds():
    model = dataclasses.replace(storage_runs.MODEL, num_decoder_layers=2)
    with storage_runs.programs_compiled_once():
        (gradients,) = storage.gradient_rows({"two layers": model})
        assert 0 <= gradients["relative_error"] <= 1e-6
        whole, part = storage.cache_rows((0.1, 1.0), num_steps=2, policies=["lru"])
        assert whole["hit_rate"] > part["hit_rate"] and part["bits_differing"] == 0
        (late,) = storage.lazy_rows(["adafactor"], num_steps=3)
        assert late["touched_share"] < 1 and late["bits_differing"] == 0
        on_disk, control = storage.loss_rows(2)
        assert on_disk["max_relative_difference"] <= 1e-5
        closed, counted = storage_order.traffic_rows(2, ["next_use"])
        assert closed["read_vs_formula"] == closed["written_vs_formula"] == 1
        assert counted["read_vs_formula"] == counted["written_vs_formula"] == 1


@pytest.mark.slow  # compiles a model twice
def test_gradients_of_another_step_are_far(monkeypatch):
    model = dataclasses.replace(storage_runs.MODEL, num_decoder_layers=2)

    class OneMicrobatch(storage.LayeredGradients):
        def __init__(self, config, loss, num_microbatches, slots):
            super().__init__(config, loss, 1, slots)

    monkeypatch.setattr(storage, "LayeredGradients", OneMicrobatch)
    assert storage.gradient_error(model) > 1e-3


@pytest.mark.slow  # processes of their own
def test_times_memory_and_kills_are_measured():
    rows, checks = storage_time.measured(1)
    assert [row["vs_resident"] == 1 for row in rows[:-1]] == [True, False, True, False]
    assert all(check.value > 0 for check in checks)
    assert rows[-1]["read_mib_per_step"] > 0 and rows[-1]["written_mib_per_s"] > 0
    with storage_runs.programs_compiled_once():
        of_parent = np.ones(2**31, np.uint8)
        row = storage_memory.measured(storage_memory.THIN)
        assert len(of_parent) / 2**20 > row["peak_rss_mib"] > row["budget_mib"] > 0
        killed = storage_resumed.training_row(1, lambda text: None)
        assert (killed["kills"], killed["differing"]) == (1, 0)
