# SPDX-License-Identifier: Apache-2.0
"""Compiled training steps communicate and compute what the planner says."""

import collections
import json

import jax
import pytest

from pallas_kernels.aot import tpu_compiler
from switchx.bench import planned_bytes
from switchx.bench.planned_bytes import BOUND, Compiled, compare
from switchx.bench.step_cases import CASES, IN_BFLOAT16, NUM_DEVICES, tpu_cases
from switchx.bench.step_cases import ON_TPU as ON_TPU_NAMES
from tests.processes import script_with_compiler

BRIEF = (
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


ON_TPU = """
import json
from switchx.bench.planned_bytes import TOPOLOGY, compare
from switchx.bench.step_cases import ON_TPU, tpu_cases
from switchx.compiled.devices import describe_devices
from tests.processes import script_with_compiler

names = "dense fsdp=8", "all_to_all fsdp=2 expert=4", "1f1b pipe=2 data=2 expert=2"
assert set(names) <= set(ON_TPU)
devices = describe_devices(TOPOLOGY)
rows = [
    compare(case, devices, sizes) for case, sizes in tpu_cases()
    if case.name in names and (sizes.compute == "bfloat16") == (case.name == names[0])
]
print(json.dumps(rows))
"""


@pytest.mark.aot
def test_bytes_and_flops_on_a_tpu_are_the_planned_ones():
    done = script_with_compiler(tpu_compiler, ON_TPU)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 3
    for row in rows:
        assert row["relative_error_of_bytes"] <= BOUND
        assert abs(row["relative_error_of_flops"]) <= BOUND
    [scattered] = (row for row in rows if row["case"] == "dense fsdp=8 bfloat16")
    assert scattered["reduce-scatter_compiled_bytes"] > scattered["all-reduce_compiled_bytes"]


def test_cases_for_a_tpu_are_cases():
    assert {case.name for case, _ in tpu_cases()} == {*ON_TPU_NAMES, *IN_BFLOAT16}


@pytest.fixture
def counted(monkeypatch):
    """`counted(compiled, planned)`: the first case's row, of such bytes by kind."""

    def row(compiled: dict, planned: dict) -> dict:
        step = Compiled("", 0, planned_bytes.Layout(data=NUM_DEVICES), {})
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
