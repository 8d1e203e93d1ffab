# SPDX-License-Identifier: Apache-2.0
"""The notebook of experiments/first_steps: what its cells name is there, and it runs whole."""

import ast
import json
import os
import re

import nbclient
import nbformat
import pytest

import switchx
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import _parse, _parser
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import save_vocabulary
from switchx.fields import describe
from tests.processes import ROOT

NOTEBOOK = ROOT / "experiments/first_steps/first_steps.ipynb"
COMMAND = re.compile(r"^ *%run -m switchx (.*)$", re.MULTILINE)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_ten_cells_name_what_is_there(notebook, in_a_folder, monkeypatch, capsys):
    """The first cell runs, the jobs of the others are built, nothing is computed."""
    monkeypatch.setenv("FOLDER", str(in_a_folder))
    cells = code_cells(notebook)
    assert len(cells) == 10 and not any(cell.outputs or cell.execution_count for cell in cells)
    names, built = {}, []
    for number, cell in enumerate(cells):
        command = COMMAND.search(cell.source)
        if command is not None:
            words = command[1].format_map({"FOLDER": in_a_folder}).split()
            assert _parse(_parser(), words).command == "quantize"
        tree = ast.parse(COMMAND.sub("    pass", cell.source))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "switchx":
                assert hasattr(switchx, node.attr), node.attr
        if number == 0:
            exec(cell.source, names)
            run = RunFolder(in_a_folder / "pretrained").create()
            run.config.write_text(json.dumps({"model": describe(names["job"].model)}))
            save_vocabulary(ByteVocabulary(), run.root)
        elif "job_from_gin" in cell.source:
            (call,) = [
                node.value for node in ast.walk(tree)
                if isinstance(node, ast.Assign) and "job_from_gin" in ast.unparse(node.value)
            ]  # fmt: skip
            built.append(eval(ast.unparse(call), names))
    assert "8 experts in each of" in capsys.readouterr().out
    (tuning,) = built
    assert tuning.init_from == str(in_a_folder / "pretrained")
    assert tuning.model.d_model == names["job"].model.d_model == 64


@pytest.mark.slow
def test_the_notebook_runs(notebook, session_cache, tmp_path):
    environment = os.environ | {
        "FOLDER": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "XDG_CACHE_HOME": str(session_cache),
    }
    client = nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3")
    client.execute(cwd=str(NOTEBOOK.parent), env=environment)
    outputs = [cell.outputs for cell in code_cells(notebook)]
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
