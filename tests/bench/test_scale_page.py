# SPDX-License-Identifier: Apache-2.0
"""docs/scale.md says what was measured, of the configurations that are here."""

import json
import re
import shlex

import pytest

from switchx.bench import scale_page
from switchx.bench.compiled import PODS, pod_checks
from switchx.cli.arguments import parse_job
from switchx.cli.main import _parse, _parser
from switchx.partitioning.topology import Topology
from switchx.planner.model_cost import count_parameters

PAGE = scale_page.PAGE.read_text(encoding="utf-8")
REPORTS = json.loads(scale_page.RESULTS.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_results():
    assert scale_page.with_tables(PAGE, REPORTS) == PAGE


def test_a_page_without_a_place_is_refused():
    with pytest.raises(ValueError, match="has no lines"):
        scale_page.with_tables("# Scale", REPORTS)


def test_another_run_is_refused():
    with pytest.raises(ValueError, match="there is no switch_d; use switch_base"):
        scale_page.main(["switch_d"])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The page and its results in another folder, with what a compiler is to say of a run."""
    for name in ("RESULTS", "PAGE"):
        copy = tmp_path / getattr(scale_page, name).name
        copy.write_bytes(getattr(scale_page, name).read_bytes())
        monkeypatch.setattr(scale_page, name, copy)
    report = copy_of(REPORTS["switch_c"])
    monkeypatch.setattr(scale_page, "compiled_reports", lambda pods: [report])
    return report


def copy_of(report: dict) -> dict:
    return json.loads(json.dumps(report))


def test_what_was_compiled_again_is_written(elsewhere, capsys):
    elsewhere["results"][0]["matrix_flops_per_device"] = 12_340_000_000_000
    assert scale_page.main(["switch_c"]) == 0
    assert "| 12.34 |" in scale_page.PAGE.read_text()
    assert capsys.readouterr().out == ""


def test_a_step_that_is_refused_is_shown_and_fails(elsewhere, capsys):
    [row] = elsewhere["results"]
    row |= {"matrix_flops_per_device": None, "collectives": None,
            "excess_bytes_per_device": 1 << 30}  # fmt: skip
    elsewhere["checks"][0] |= {"value": 0, "holds": False}
    assert scale_page.main(["switch_c"]) == 1
    assert capsys.readouterr().out == "switch_c_fits 0 ==1: does not hold\n"
    [needs, sends] = [
        line for line in scale_page.PAGE.read_text().splitlines() if "| switch-c |" in line
    ]
    assert needs.endswith("| no |  |")
    assert set(sends.removeprefix("| switch-c")) == {"|", " "}


@pytest.mark.parametrize(("run_file", "topology"), PODS)
def test_results_are_of_this_configuration_and_hold(run_file, topology):
    report = REPORTS[scale_page.name_of(run_file)]
    [row] = report["results"]
    job = parse_job(
        _parse(_parser(), ["compile", f"--gin_file={run_file}", f"--topology={topology}"])
    )
    assert row["parameters"] == count_parameters(job.model).total
    assert row["topology"] == topology
    assert row["devices"] == Topology.parse(topology).num_devices
    assert row["tokens_per_batch"] == job.batch_size * job.inputs_length == 1 << 20
    assert all(check.holds for check in pod_checks([report]))


def test_commands_are_understood():
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    compiled = [words[1:] for words in commands if words[0] == "switchx"]
    assert len(compiled) == 2
    for words in compiled:
        arguments = _parse(_parser(), words)
        assert (arguments.gin_file[0], arguments.topology) in PODS
