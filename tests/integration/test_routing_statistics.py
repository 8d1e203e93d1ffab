# SPDX-License-Identifier: Apache-2.0
"""The notebook of routing statistics computes nothing itself, and runs on a run folder."""

import json
import os

import nbclient
import nbformat
import pytest

from tests.processes import ROOT

NOTEBOOK = ROOT / "experiments/routing_statistics/routing.ipynb"


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
