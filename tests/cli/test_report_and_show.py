# SPDX-License-Identifier: Apache-2.0
"""`switchx report` and `switchx show`: pictures, and clear words where there are none."""

import pathlib
import re
import shlex

import pytest

from switchx.cli.arguments import gin_of
from switchx.cli.main import _parse, _parser, main
from switchx.gin_config import building
from tests.analysis.recorded import write_dense_run, write_run
from tests.processes import ROOT


@pytest.fixture
def recorded(tmp_path) -> pathlib.Path:
    return write_run(tmp_path / "some run")


def test_page_is_written_into_the_run_folder(recorded, capsys):
    assert main(["report", f"--model_dir={recorded}"]) == 0
    path = recorded / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text()
    assert "<h1>Routing of some run</h1>" in text
    assert "2 in each of 3 layers" in text
    sample = "5 encoder and 3 decoder tokens of the validation data, 3 evaluations, the last"
    assert sample in text and text.count('<img alt="') == 7
    assert "http" not in text.replace("http://www.w3.org", "")


@pytest.fixture
def nothing_is_drawn(monkeypatch):
    monkeypatch.setattr("switchx.analysis.report.all_sections", lambda routing: [])


def test_page_may_go_elsewhere_where_it_can_be_written(
    recorded, nothing_is_drawn, cli, tmp_path
):
    output = tmp_path / "new folder" / "page.html"
    assert cli("report", f"--model_dir={recorded}", f"--output={output}").out == f"{output}\n"
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert not (recorded / "report.html").exists()
    (recorded / "file").write_text("")
    said = cli.refused("report", f"--model_dir={recorded}", f"--output={recorded}/file/x")
    assert "file/x cannot be written: nothing can be made in" in said


def test_folders_of_a_dense_run_or_of_none_are_refused(tmp_path, cli):
    folder = write_dense_run(tmp_path / "dense")
    assert cli.refused("report", f"--model_dir={folder}") == (
        f"switchx report: error: {folder} is the run of a dense model, which routes nothing; "
        "give the model_dir of a run with Switch layers\n"
    )
    said = cli.refused("report", f"--model_dir={tmp_path}")
    assert said.startswith(f"switchx report: error: {tmp_path} is not a run folder")
    assert "found dense; give the model_dir of a run" in said
    assert "nothing is there" in cli.refused("report", f"--model_dir={tmp_path / 'none'}")


def test_runs_without_what_is_shown_are_refused(recorded, cli):
    assert "--output: it is empty" in cli.refused(
        "report", f"--model_dir={recorded}", "--output="
    )
    for path in (recorded / "routing").iterdir():
        path.unlink()
    assert cli.refused("report", f"--model_dir={recorded}") == (
        f"switchx report: error: {recorded}/routing holds no routing sample; each evaluation "
        "in training writes one, so train a model with Switch layers until it is evaluated "
        "(EVAL_EVERY)\n"
    )
    assert not (recorded / "report.html").exists()
    (recorded / "metrics.jsonl").unlink()
    assert "has logged a step" in cli.refused("report", f"--model_dir={recorded}")


PAGE = (ROOT / "docs/pipeline.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def test_text_has_a_line_a_stage_and_direction(cli):
    lines = cli("show", "schedule", "--stages=2", "--microbatches=3").out.splitlines()
    assert lines[:5] == [
        "tick        0 1 2 3 4",
        "stage 0   F 0 1 2 . .",
        "          B . . 0 1 2",
        "stage 1   F . 0 1 2 .",
        "          B . 0 1 2 .",
    ]
    assert "bubble 25.0%" in lines[-1]


def test_json_has_the_bubble_and_its_check(cli):
    words = "show schedule --stages=4 --microbatches=8 --schedule=interleaved --chunks=2 --json"
    found = cli.json(*words.split())
    assert found["command"] == "show schedule"
    assert found["results"][0]["bubble"] == pytest.approx(3 / 19)
    assert [check["holds"] for check in found["checks"]] == [True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--stages=4 --microbatches=6 --schedule=interleaved --chunks=2", "use 4 or 8 microb"),
        ("--stages=0 --microbatches=6", "use at least 1"),
        ("--stages=4 --microbatches=1000000000", "4,000,000,000 cells are not drawn; use at"),
        ("--stages=2 --microbatches=2 --output=a.jpeg", "ends in .png, .svg, .pdf"),
        ("--stages=2 --microbatches=2 --output=no/where/a.png", "there is no folder"),
    ],
)
def test_wrong_options_are_refused(options, words, cli, in_a_folder):
    assert words in cli.refused("show", "schedule", *options.split())


def test_commands_of_the_page_run(capsys, in_a_folder):
    """Those that draw run; those that train are understood, and describe pipelines."""
    drawn, trained = 0, 0
    for command in COMMANDS:
        words = shlex.split(command)
        words = words[words.index("switchx") + 1 :]
        if words[0] == "show":
            assert main(words) == 0, command
            drawn += 1
        else:
            job = building.parse_job(*gin_of(_parse(_parser(), words)))
            assert job.mesh.pipe > 1 or "data_expert" in command
            trained += 1
    assert capsys.readouterr().out and (in_a_folder / "1f1b.png").is_file()
    assert drawn >= 3 and trained >= 3
