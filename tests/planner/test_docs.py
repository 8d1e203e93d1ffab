# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/planner.md run."""

import json
import re
import shlex

import pytest

from switchx.cli.main import main
from switchx.hardware.spec import known_hardware
from tests.processes import ROOT

PAGE = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
BRIEF = ["--gin.VOCAB_SIZE=500", "--gin.SwitchConfig.group_size=128"]


@pytest.mark.slow  # tests/cli/test_docs.py parses them by default
def test_commands_run(in_a_folder, capsys):
    commands = [shlex.split(line) for line in COMMANDS]
    assert [words[:2] for words in commands if words[0] != "switchx"] == [
        ["make", "experiments"]  # tests/planner/test_papers.py
    ]
    plans = [words[1:] for words in commands if words[0] == "switchx"]
    small = [words for words in plans if "--gin_file=configs/runs/pretrain_tiny.gin" in words]
    assert len(small) == len(plans) - 1 == 4
    for words in small:
        assert main([*words, *BRIEF]) == 0
        assert capsys.readouterr().out
    assert (in_a_folder / "mesh.gin").exists()


@pytest.mark.slow  # all meshes of 1024 devices
def test_switch_c_is_planned_as_the_page_says(in_a_folder, capsys):
    (command,) = (line for line in COMMANDS if "pretrain_switch_c.gin" in line)
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["results"]
    assert [plan["is_spread"] for plan in plans[:8]] == [True] * 7 + [False]
    first, last = (f"{plans[n]['step_s']:.2f}" for n in (0, 6))
    assert f"plans are spread, {first} to {last} s a step" in PAGE


def test_python_runs_and_all_hardware_is_named(capsys):
    (block,) = (block for kind, block in BLOCKS if kind == "python")
    exec(block, {})
    assert 0 < float(capsys.readouterr().out) < 1
    assert all(f"`{name}`" in PAGE for name in known_hardware())
