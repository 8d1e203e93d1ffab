# SPDX-License-Identifier: Apache-2.0
"""docs/compiled.md: what was compiled of today's configurations, and what is compiled again."""

import copy
import json

import pytest

from experiments import scale
from experiments.pages import END
from switchx.cli.arguments import gin_of
from switchx.cli.main import _parse, _parser
from switchx.gin_config import building
from switchx.models.flops import count_parameters
from switchx.partitioning.topology import Topology


@pytest.mark.parametrize(
    ("tokens", "holds"), [(1 << 20, True), (1 << 19, False), (1 << 21, False)]
)
def test_the_aim_of_the_pods_has_two_sides(tokens, holds):
    report = {
        "results": [{"run": "configs/runs/pretrain_switch_c.gin", "tokens_per_batch": tokens}],
        "checks": [{"name": "fits", "value": 0, "bound": "==1", "holds": False}],
    }
    [fits, aim] = scale.pod_checks(report)
    assert (fits.name, fits.holds) == ("switch_c_fits", False)
    assert (aim.name, aim.holds) == ("switch_c_tokens_off_aim", holds)


REPORTS = json.loads(scale.RESULTS.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_results():
    assert f"{scale.BEGIN}\n\n{scale.tables(REPORTS)}\n\n{END}" in scale.PAGE.read_text()


def test_another_run_is_refused():
    with pytest.raises(ValueError, match="there is no switch_d; use switch_base"):
        scale.main(["switch_d"])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The page and its results in another folder, with what a compiler is to say of a run."""
    for name in ("RESULTS", "PAGE"):
        path = tmp_path / getattr(scale, name).name
        path.write_bytes(getattr(scale, name).read_bytes())
        monkeypatch.setattr(scale, name, path)
    report = copy.deepcopy(REPORTS["switch_c"])
    monkeypatch.setattr(scale, "compiled_report", lambda *pod: report)
    return report


def test_what_was_compiled_again_is_written(elsewhere, capsys):
    elsewhere["results"][0]["matrix_flops_per_device"] = 12_340_000_000_000
    assert scale.main(["switch_c"]) == 0
    assert "| 12.34 |" in scale.PAGE.read_text()
    out = capsys.readouterr().out
    assert out == f"{scale.estimates_vs_times()}\n"
    said = "v5p 0.94 to 1.03 (102 cases), v5e 1.03 to 1.44 (16 cases), tpu7x 0.97 to 1.77 (100 "
    assert said in out


def test_a_step_that_is_refused_is_shown_and_fails(elsewhere, capsys):
    [row] = elsewhere["results"]
    row |= {"matrix_flops_per_device": None, "collectives": None,
            "excess_bytes_per_device": 1 << 30}  # fmt: skip
    elsewhere["checks"][0] |= {"value": 0, "holds": False}
    assert scale.main(["switch_c"]) == 1
    assert capsys.readouterr().out.endswith("\nswitch_c_fits 0 ==1: does not hold\n")
    [needs, sends] = [
        line for line in scale.PAGE.read_text().splitlines() if "| switch-c |" in line
    ]
    assert "| no |  |" in needs
    assert set(sends.removeprefix("| switch-c")) == {"|", " "}


@pytest.mark.parametrize(("run_file", "topology"), scale.PODS)
def test_results_are_of_this_configuration_and_hold(run_file, topology):
    report = REPORTS[scale.name_of(run_file)]
    [row] = report["results"]
    words = ["compile", f"--gin_file={run_file}", f"--topology={topology}"]
    job = building.parse_job(*gin_of(_parse(_parser(), words)))
    assert row["parameters"] == count_parameters(job.model).total
    assert row["topology"] == topology
    assert row["devices"] == Topology.parse(topology).num_devices
    assert row["tokens_per_batch"] == job.batch_size * job.inputs_length == 1 << 20
    assert all(check.holds for check in scale.pod_checks(report))
