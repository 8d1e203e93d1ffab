# SPDX-License-Identifier: Apache-2.0
import json
import os

import pytest

from switchx.bench import equivalence
from switchx.bench.equivalence import Cell
from switchx.cli.main import main
from switchx.partitioning.mesh import MeshSpec


@pytest.fixture
def two_cells(monkeypatch):
    cells = [
        Cell("hash", "gather", MeshSpec(expert=8)),
        Cell("hash", "einsum", MeshSpec(data=8)),
    ]
    monkeypatch.setattr(equivalence, "all_cells", lambda: (cells, {("sliced", "data=8"): "no"}))
    monkeypatch.setattr(equivalence, "sample_of", lambda cells: cells)
    monkeypatch.setattr(equivalence, "ROUTERS", {"hash": equivalence.ROUTERS["hash"]})
    monkeypatch.setattr(equivalence, "SAMPLE_CELLS", 2)


def test_report_and_exit_status(two_cells, monkeypatch, capsys):
    assert main(["check", "equivalence", "--sample", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["command"] == "check equivalence"
    assert [check["name"] for check in report["checks"]] == [
        "cells", "max_forward_error", "max_aux_loss_error", "max_gradient_error",
        "max_grad_norm_error",
    ]  # fmt: skip
    assert all(check["holds"] for check in report["checks"])
    assert report["results"][-1] == {
        "router": "all", "dispatcher": "sliced", "meshes": 1, "refused": "no",
    }  # fmt: skip
    monkeypatch.setattr(equivalence, "SAMPLE_CELLS", 3)
    assert main(["check", "equivalence", "--sample"]) == 1
    assert "does not hold" in capsys.readouterr().out


def test_devices_that_are_asked_for_are_not_changed(two_cells, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_x=1")
    assert main(["check", "equivalence", "--sample"]) == 0
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8 --xla_x=1"


def test_another_check_is_refused(capsys):
    assert main(["check", "equivalance"]) == 2
    assert "equivalance" in capsys.readouterr().err
