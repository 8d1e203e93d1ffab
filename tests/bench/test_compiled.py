# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import subprocess

import pytest

from switchx.bench import compiled
from switchx.partitioning.topology import GIB, Topology
from switchx.planner.model_cost import count_parameters
from switchx.training.aot import CompiledStep, Memory
from tests.training.jobs import ENCODER_DECODER, LENGTH, make_job

JOB = make_job(ENCODER_DECODER)
V4 = Topology.parse("v4:8x8x16")
STEP = CompiledStep(
    devices=2048,
    parameters=count_parameters(ENCODER_DECODER).total,
    tokens_per_batch=8 * LENGTH // 2,  # of the job's 8 rows
    target_tokens_per_batch=1 << 17,
    slots_per_token=2.4,
    memory=Memory(3 * GIB, 5 * GIB, 8 * GIB, 15 * GIB),
    flops=7,
    collectives={"all-to-all": (3, 5)},
    seconds=1.0,
)


def verdicts(step: CompiledStep) -> dict[str, bool]:
    report = compiled.report_of(step, JOB, V4, "x.gin")
    return {check.name: check.holds for check in report.checks}


def test_every_check_can_fail():
    assert all(verdicts(STEP).values())
    for changes, failing in (
        ({"memory": Memory(3 * GIB, 97 * GIB, 100 * GIB, 15 * GIB)}, "fits"),
        ({"parameters": STEP.parameters - 1}, "parameters"),
        ({"devices": 1024}, "devices"),
        ({"tokens_per_batch": STEP.tokens_per_batch // 2}, "tokens_per_batch"),
        ({"slots_per_token": 2.6}, "slots_per_token"),  # factor 2, and 1.25 times it
    ):
        found = verdicts(dataclasses.replace(STEP, **changes))
        assert [name for name, holds in found.items() if not holds] == [failing]


def test_by_how_much_it_does_not_fit_is_said():
    memory = Memory(3 * GIB, 97 * GIB, 100 * GIB, 15 * GIB)
    [row] = compiled.report_of(
        dataclasses.replace(STEP, memory=memory), JOB, V4, "x.gin"
    ).results
    assert row["excess_bytes_per_device"] == 85 * GIB
    assert "too large by 85.00 GiB a device, of temporaries" in row["way_out"]


def test_the_four_models_come_from_the_command(monkeypatch):
    commands = []

    def run(words, topology, **options):
        commands.append(words)
        row = json.dumps({"command": "compile", "results": [{"topology": str(topology)}]})
        return subprocess.CompletedProcess(words, 0, f"noise\n{row}\n", "")

    monkeypatch.setattr(compiled, "run_with_compiler", run)
    reports = compiled.compiled_reports(note=lambda line: None)
    assert [report["results"][0]["topology"] for report in reports] == [
        "v5e:16x16", "v5e:16x16", "v5p:8x8x16", "v4:8x8x16",
    ]  # fmt: skip
    assert all("--json" in words for words in commands)


def test_a_process_that_dies_is_reported(monkeypatch):
    died = subprocess.CompletedProcess([], 3, "", "no memory left")
    monkeypatch.setattr(compiled, "run_with_compiler", lambda *a, **k: died)
    with pytest.raises(RuntimeError, match="status 3: no memory left"):
        compiled.compiled_reports(note=lambda line: None)


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
