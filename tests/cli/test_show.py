# SPDX-License-Identifier: Apache-2.0
"""`switchx show schedule`, and the commands of docs/pipeline.md that draw."""

import json
import re
import shlex

import pytest

from switchx.cli.arguments import parse_job
from switchx.cli.main import _parse, _parser, main
from tests.processes import ROOT

PAGE = (ROOT / "docs/pipeline.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def test_text_has_a_line_a_stage_and_direction(capsys):
    assert main(["show", "schedule", "--stages=2", "--microbatches=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "tick        0 1 2 3 4",
        "stage 0   F 0 1 2 . .",
        "          B . . 0 1 2",
        "stage 1   F . 0 1 2 .",
        "          B . 0 1 2 .",
    ]
    assert "bubble 25.0%" in lines[-1]


def test_json_has_the_bubble_and_its_check(capsys):
    words = "show schedule --stages=4 --microbatches=8 --schedule=interleaved --chunks=2 --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["command"] == "show schedule"
    assert found["results"][0]["bubble"] == pytest.approx(3 / 19)
    assert [check["holds"] for check in found["checks"]] == [True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--stages=4 --microbatches=6 --schedule=interleaved --chunks=2", "use 4 or 8 microb"),
        ("--stages=0 --microbatches=6", "use at least 1"),
        ("--stages=2 --microbatches=2 --output=a.jpeg", "ends in .png, .svg, .pdf"),
        ("--stages=2 --microbatches=2 --output=no/where/a.png", "there is no folder"),
    ],
)
def test_wrong_options_are_refused(options, words, capsys, in_a_folder):
    assert main(["show", "schedule", *options.split()]) == 2
    assert words in capsys.readouterr().err


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
            job = parse_job(_parse(_parser(), words))
            assert job.mesh.pipe > 1 or "data_expert" in command
            trained += 1
    assert capsys.readouterr().out and (in_a_folder / "1f1b.png").is_file()
    assert drawn >= 3 and trained >= 3
