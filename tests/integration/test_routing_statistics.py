# SPDX-License-Identifier: Apache-2.0
"""Routing statistics of a whole run: recorded, reported, and read in the notebook."""

import json
import os

import nbclient
import nbformat
import numpy as np
import pytest

from switchx.analysis.routing import read_snapshots
from switchx.cli.main import main
from tests.processes import ROOT

NOTEBOOK = ROOT / "experiments/routing_statistics/routing.ipynb"


def test_a_run_records_its_evaluations_and_reports_them(finished_run, tmp_path, capsys):
    folder = finished_run.folder
    snapshots = read_snapshots(folder / "routing")
    assert [each.step for each in snapshots] == [0, 6, 12]
    assert snapshots[0].layers == ["encoder 0", "decoder 0"]
    first, last = snapshots[0].stacks, snapshots[-1].stacks
    for before, after in zip(first, last, strict=True):
        np.testing.assert_array_equal(before.token_T, after.token_T)
        assert len(after.token_T) > 100
        assert not np.array_equal(before.expert_NTS, after.expert_NTS)  # it has learnt
    output = tmp_path / "report.html"
    assert main(["report", f"--model_dir={folder}", f"--output={output}"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert "2 evaluations" not in output.read_text() and "3 evaluations" in output.read_text()


def test_the_notebook_computes_nothing_itself():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert len(notebook.cells) <= 12
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for word in ("numpy", "np.", "matplotlib", "def ", "for ", " + ", " * ", " / "):
        assert not any(word in source for source in code), word
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.slow
def test_the_notebook_runs(finished_run):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    environment = os.environ | {
        "MODEL_DIR": str(finished_run.folder),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3")
    client.execute(cwd=str(NOTEBOOK.parent), env=environment)
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert all(outputs and "text/html" in outputs[0]["data"] for outputs in shown)
    assert sum("data:image/svg+xml" in json.dumps(outputs) for outputs in shown) == 5
