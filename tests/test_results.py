# SPDX-License-Identifier: Apache-2.0
"""What benches print: checks hold by their number alone, JSON has the agreed form."""

import json

import pytest

from switchx.results import Check, Report


@pytest.mark.parametrize(
    "value, bound, holds",
    [(0.93, ">=0.93", True), (0.9299, ">=0.93", False), (2, "<=1.5", False), (1, "==1", True)],
)
def test_a_check_is_not_rounded_up(value, bound, holds):
    assert Check("name", value, bound).holds is holds


def test_a_report_is_json_or_a_table(capsys):
    with pytest.raises(ValueError, match="use >=, <= or == and a number"):
        Check("name", 1.0, "0.9")
    row, check = {"model": "dense", "step_ms": 1.5}, Check("c", 0.8, ">=0.9")
    report = Report("bench x", [row], [check])
    report.print(as_json=True)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed.keys() == {"command", "environment", "results", "checks"}
    assert printed["environment"].keys() == {
        "device", "processor", "cores", "jax", "commit", "glibc_tunables",
        "switchx_malloc",
    }  # fmt: skip
    assert printed["results"] == [row]
    assert printed["checks"] == [{"name": "c", "value": 0.8, "bound": ">=0.9", "holds": False}]
    report.print(as_json=False)
    out = capsys.readouterr().out
    assert "dense" in out and "step_ms" in out and "c 0.800 >=0.9: does not hold" in out
