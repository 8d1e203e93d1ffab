# SPDX-License-Identifier: Apache-2.0
"""The notebooks of first_steps and routing_statistics: as they are committed, and run whole."""

import ast
import json
import os
import re

import nbclient
import nbformat
import pytest

import switchx
from experiments.first_screen import ENVIRONMENT
from switchx.cli.main import _parse, _parser
from tests.processes import ROOT

NOTEBOOK = ROOT / "experiments/first_steps/first_steps.ipynb"
ATLAS = NOTEBOOK.with_name("atlas.ipynb")
ROUTING = ROOT / "experiments/routing_statistics/routing.ipynb"
COMMAND = re.compile(r"^ *%run -m switchx (.*)$", re.MULTILINE)
MAGIC = re.compile(r"^( *)%.*$", re.MULTILINE)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path, number", [(NOTEBOOK, 10), (ATLAS, 12)])
def test_cells_have_outputs_and_name_what_is_there(path, number):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, number + 1))
    assert sum(bool(cell.outputs) for cell in cells) > 0.8 * number
    shown = json.dumps([cell.outputs for cell in cells])
    assert '"error"' not in shown and '"stderr"' not in shown
    for cell in cells:
        if command := COMMAND.search(cell.source):
            assert _parse(_parser(), command[1].split()).command == "quantize"
        for node in ast.walk(ast.parse(MAGIC.sub(r"\1pass", cell.source))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "switchx":
                assert hasattr(switchx, node.attr), node.attr


def executed(notebook, folder, cache) -> list:
    """Outputs of the cells, which write below a folder."""
    environment = {"FOLDER": str(folder), "XDG_CACHE_HOME": str(cache)}
    client = nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3")
    client.execute(cwd=str(folder), env=os.environ | ENVIRONMENT | environment)
    return [cell.outputs for cell in code_cells(notebook)]


@pytest.mark.slow
def test_the_notebook_of_the_atlas_runs(session_cache, tmp_path):
    notebook = nbformat.read(ATLAS, as_version=4)
    (cell,) = (each for each in notebook.cells if "make_atlas(" in each.source)
    cell.source = cell.source.replace('name="tiny"', 'name="tiny", knockouts=4, factors=(1.0,)')
    outputs = executed(notebook, tmp_path, session_cache)
    for number in (4, 5, 6, 7):
        assert "svg" in json.dumps(outputs[number])
    assert (tmp_path / "atlas_of_tiny/tables/tiny/knockouts.parquet").exists()


@pytest.mark.slow
def test_the_notebook_runs(session_cache, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    outputs = executed(notebook, tmp_path, session_cache)
    # A bar and no lines beside it: each training has one display, and nothing else.
    for number in (2, 6):
        (shown,) = outputs[number]
        assert "<progress " in shown["data"]["text/html"]
        assert "validation: negative log perplexity" in shown["data"]["text/plain"]
    assert not [each for cell in outputs for each in cell if each.get("name") == "stderr"]
    logs = [
        [json.loads(line) for line in (tmp_path / name / "validation.jsonl").open()]
        for name in ("pretrained", "tuned")
    ]
    for first, *_, last in logs:
        assert last["neg_log_perplexity"] > first["neg_log_perplexity"] + 0.5
    for number in (4, 5):
        assert "data:image/svg+xml" in json.dumps(outputs[number])
    assert (tmp_path / "tuned_int4/artifact.json").exists()
    assert "".join(each["text"] for each in outputs[9]).count("tuned") == 2


def test_the_notebook_of_routing_statistics_computes_nothing_itself():
    notebook = nbformat.read(ROUTING, as_version=4)
    assert len(notebook.cells) <= 12
    code = [cell.source for cell in code_cells(notebook)]
    for word in ("numpy", "np.", "matplotlib", "def ", "for ", " + ", " * ", " / "):
        assert not any(word in source for source in code), word
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.slow
def test_the_notebook_of_routing_statistics_runs(finished_run):
    notebook = nbformat.read(ROUTING, as_version=4)
    environment = ENVIRONMENT | {"MODEL_DIR": str(finished_run.folder)}
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3")
    client.execute(cwd=str(ROUTING.parent), env=os.environ | environment)
    shown = [cell.outputs for cell in code_cells(notebook)][1:]
    assert all(outputs and "text/html" in outputs[0]["data"] for outputs in shown)
    assert sum("data:image/svg+xml" in json.dumps(outputs) for outputs in shown) == 5
