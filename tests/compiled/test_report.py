# SPDX-License-Identifier: Apache-2.0
"""Compiled steps as reports, and docs/scale.md: what was measured of today's configurations."""

import copy
import dataclasses
import json

import pytest

from switchx.cli.arguments import gin_of
from switchx.cli.main import _parse, _parser
from switchx.compiled import report as compiled
from switchx.compiled.report import PODS, pod_checks
from switchx.compiled.training_step import CompiledStep, HostMemory, Memory
from switchx.gin_config import building
from switchx.models.flops import count_parameters
from switchx.partitioning.topology import GIB, Topology
from tests.training.jobs import ENCODER_DECODER, LENGTH, make_job

JOB = make_job(ENCODER_DECODER)
V4 = Topology.parse("v4:8x8x16")
TOO_LARGE = Memory(3 * GIB, 97 * GIB, 100 * GIB, 15 * GIB)
STEP = CompiledStep(
    devices=1024,
    parameters=count_parameters(ENCODER_DECODER).total,
    tokens_per_batch=8 * LENGTH // 2,  # of the job's 8 rows
    target_tokens_per_batch=1 << 17,
    slots_per_token=2.4,
    memory=Memory(3 * GIB, 5 * GIB, 8 * GIB, 15 * GIB),
    flops=7,
    collectives={"all-to-all": (3, 5)},
    seconds=1.0,
)


def verdicts(step: CompiledStep, job=JOB) -> dict[str, bool]:
    report = compiled.report_of(step, job, V4, "x.gin")
    return {check.name: check.holds for check in report.checks}


HOST = HostMemory(4 * GIB, Memory(30 * GIB, 0, 30 * GIB, 15 * GIB), 4 * GIB, 0.9, (1 << 20,))
FAULTS = {
    "fits": {"memory": TOO_LARGE},
    "parameters": {"parameters": STEP.parameters - 1},
    "devices": {"devices": 2048},
    "tokens_per_batch": {"tokens_per_batch": STEP.tokens_per_batch // 2},
    "slots_per_token": {"slots_per_token": 2.6},  # factor 2, and 1.25 times it
    "evaluation_fits": {"others": {"evaluation": TOO_LARGE}},
    "fits_without_storage": {"host": dataclasses.replace(HOST, without=STEP.memory)},
    "host_bytes_vs_formula": {"host": dataclasses.replace(HOST, needed=5 * GIB)},
    "copies_overlapped": {"host": dataclasses.replace(HOST, copies_overlapped=0.7)},
    "reversed_strides_wrong": {"host": dataclasses.replace(HOST, strides=(1, -1))},
}


@pytest.mark.parametrize(("failing", "changes"), FAULTS.items(), ids=FAULTS)
def test_every_check_can_fail(failing, changes):
    step = dataclasses.replace(STEP, host=HOST)
    assert all(verdicts(step).values())
    found = verdicts(dataclasses.replace(step, **changes))
    assert [name for name, holds in found.items() if not holds] == [failing]


def test_the_planned_time_is_the_planners():
    """2 FLOPs a weight and token, three passes: compute alone bounds it from below."""
    planned = compiled.planned_step(JOB, V4)
    seconds, row = (
        planned["planned_step_s"],
        compiled.report_of(STEP, JOB, V4, "x.gin").results[0],
    )
    assert row["planned_step_s"] == seconds
    # 1,024 replicas sum their gradients, and nothing else is sent.
    [(kind, size)] = row["planned_bytes_per_device"].items()
    assert kind == "all-reduce" and size >= 4 * count_parameters(ENCODER_DECODER).total
    tokens = JOB.batch_size * sum(JOB.sequence_lengths)
    assert seconds > 6 * ENCODER_DECODER.d_model**2 * tokens / (1024 * 275e12)
    assert compiled.planned_step(JOB, Topology.parse("tpu7x:4x4x4"))["planned_step_s"] > 0


def test_parts_of_an_exchange_have_to_overlap():
    switch = dataclasses.replace(
        ENCODER_DECODER.switch, dispatcher="all_to_all", exchange_parts=2
    )
    job = make_job(dataclasses.replace(ENCODER_DECODER, switch=switch))
    for number in (0, 1):
        step = dataclasses.replace(STEP, overlapped_exchanges=number)
        assert "overlapped_exchanges" not in verdicts(step)  # of slots sent at once
        assert verdicts(step, job)["overlapped_exchanges"] == (number == 1)


def test_by_how_much_it_does_not_fit_is_said():
    too_large = dataclasses.replace(STEP, memory=TOO_LARGE)
    [row] = compiled.report_of(too_large, JOB, V4, "x.gin").results
    assert row["excess_bytes_per_device"] == 85 * GIB
    assert "too large by 85.00 GiB a device, of temporaries" in row["way_out"]


@pytest.mark.parametrize(
    ("tokens", "holds"), [(1 << 20, True), (1 << 19, False), (1 << 21, False)]
)
def test_the_aim_of_the_pods_has_two_sides(tokens, holds):
    [fits, aim] = compiled.pod_checks(
        [
            {
                "results": [{"run": "configs/runs/pretrain_switch_c.gin",
                             "tokens_per_batch": tokens}],
                "checks": [{"name": "fits", "value": 0, "bound": "==1", "holds": False}],
            }
        ]
    )  # fmt: skip
    assert (fits.name, fits.holds) == ("switch_c_fits", False)
    assert (aim.name, aim.holds) == ("switch_c_tokens_off_aim", holds)


# docs/scale.md

PAGE = compiled.PAGE.read_text(encoding="utf-8")
REPORTS = json.loads(compiled.RESULTS.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_results():
    assert compiled.with_tables(PAGE, REPORTS) == PAGE


def test_another_run_is_refused():
    with pytest.raises(ValueError, match="there is no switch_d; use switch_base"):
        compiled.main(["switch_d"])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The page and its results in another folder, with what a compiler is to say of a run."""
    for name in ("RESULTS", "PAGE"):
        path = tmp_path / getattr(compiled, name).name
        path.write_bytes(getattr(compiled, name).read_bytes())
        monkeypatch.setattr(compiled, name, path)
    report = copy.deepcopy(REPORTS["switch_c"])
    monkeypatch.setattr(compiled, "compiled_reports", lambda pods: [report])
    return report


def test_what_was_compiled_again_is_written(elsewhere, capsys):
    elsewhere["results"][0]["matrix_flops_per_device"] = 12_340_000_000_000
    assert compiled.main(["switch_c"]) == 0
    assert "| 12.34 |" in compiled.PAGE.read_text()
    out = capsys.readouterr().out
    assert out == f"{compiled.estimates_vs_times()}\n"
    said = "v5p 0.94 to 1.03 (102 cases), v5e 1.03 to 1.44 (16 cases), tpu7x 0.97 to 1.77 (100 "
    assert said in out


def test_a_step_that_is_refused_is_shown_and_fails(elsewhere, capsys):
    [row] = elsewhere["results"]
    row |= {"matrix_flops_per_device": None, "collectives": None,
            "excess_bytes_per_device": 1 << 30}  # fmt: skip
    elsewhere["checks"][0] |= {"value": 0, "holds": False}
    assert compiled.main(["switch_c"]) == 1
    assert capsys.readouterr().out.endswith("\nswitch_c_fits 0 ==1: does not hold\n")
    [needs, sends] = [
        line for line in compiled.PAGE.read_text().splitlines() if "| switch-c |" in line
    ]
    assert "| no |  |" in needs
    assert set(sends.removeprefix("| switch-c")) == {"|", " "}


@pytest.mark.parametrize(("run_file", "topology"), PODS)
def test_results_are_of_this_configuration_and_hold(run_file, topology):
    report = REPORTS[compiled.name_of(run_file)]
    [row] = report["results"]
    words = ["compile", f"--gin_file={run_file}", f"--topology={topology}"]
    job = building.parse_job(*gin_of(_parse(_parser(), words)))
    assert row["parameters"] == count_parameters(job.model).total
    assert row["topology"] == topology
    assert row["devices"] == Topology.parse(topology).num_devices
    assert row["tokens_per_batch"] == job.batch_size * job.inputs_length == 1 << 20
    assert all(check.holds for check in pod_checks([report]))
