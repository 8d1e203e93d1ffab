# SPDX-License-Identifier: Apache-2.0
"""`switchx report`: one page, and clear words where there is nothing to report."""

import pathlib

import pytest

from switchx.cli.main import main
from tests.analysis.recorded import write_dense_run, write_run


@pytest.fixture
def recorded(tmp_path) -> pathlib.Path:
    return write_run(tmp_path / "some run")


def refusal(capsys, *options) -> str:
    assert main(["report", *map(str, options)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_page_is_written_into_the_run_folder(recorded, capsys):
    assert main(["report", f"--model_dir={recorded}"]) == 0
    path = recorded / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text()
    assert "<h1>Routing of some run</h1>" in text
    assert "2 in each of 3 layers" in text
    sample = "5 encoder and 3 decoder tokens of the validation data, 3 evaluations, the last"
    assert sample in text and text.count('<img alt="') == 6
    assert "http" not in text.replace("http://www.w3.org", "")


def test_page_may_go_elsewhere(recorded, capsys, tmp_path):
    output = tmp_path / "new folder" / "page.html"
    assert main(["report", f"--model_dir={recorded}", f"--output={output}"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert not (recorded / "report.html").exists()


def test_a_dense_run_is_refused(tmp_path, capsys):
    folder = write_dense_run(tmp_path / "dense")
    assert refusal(capsys, f"--model_dir={folder}") == (
        f"switchx report: error: {folder} is the run of a dense model, which routes nothing; "
        "give the model_dir of a run with Switch layers\n"
    )


def test_a_run_without_evaluations_is_refused(recorded, capsys):
    for path in (recorded / "routing").iterdir():
        path.unlink()
    assert refusal(capsys, f"--model_dir={recorded}") == (
        f"switchx report: error: {recorded}/routing holds no routing sample; each evaluation "
        "in training writes one, so train a model with Switch layers until it is evaluated "
        "(EVAL_EVERY)\n"
    )
    assert not (recorded / "report.html").exists()


def test_a_run_that_has_logged_nothing_is_refused(recorded, capsys):
    (recorded / "metrics.jsonl").unlink()
    assert "has logged a step" in refusal(capsys, f"--model_dir={recorded}")


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("")
    said = refusal(capsys, f"--model_dir={tmp_path}")
    assert said.startswith(f"switchx report: error: {tmp_path} is not a run folder")
    assert "found notes.txt; give the model_dir of a run" in said
    assert "nothing is there" in refusal(capsys, f"--model_dir={tmp_path / 'none'}")


def test_an_empty_output_is_refused(recorded, capsys):
    said = refusal(capsys, f"--model_dir={recorded}", "--output=")
    assert said == "switchx report: error: --output is empty; is a shell variable not set?\n"


def test_an_output_that_cannot_be_written_is_one_line(recorded, capsys):
    (recorded / "file").write_text("")
    assert main(["report", f"--model_dir={recorded}", f"--output={recorded}/file/x"]) == 1
    assert capsys.readouterr().err.startswith("switchx report: error: ")
