# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/planner.md run; its numbers are the commands'."""

import re
import shlex

import pytest

from switchx.bench import papers, pipeline_moe_paper
from switchx.bench.se_moe_paper import exchange_saving, hierarchical_saving
from switchx.cli.main import main
from switchx.planner.hardware import known_hardware
from tests.processes import ROOT

PAGE = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
BRIEF = ["--gin.VOCAB_SIZE=500", "--gin.SwitchConfig.group_size=128"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, in_a_folder, capsys):
    program, name, *options = shlex.split(command)
    assert program == "switchx"
    assert main([name, *options, *(BRIEF if name == "plan" else [])]) == 0
    assert capsys.readouterr().out
    assert "--output" not in command or (in_a_folder / "mesh.gin").exists()


def test_python_runs(capsys):
    (block,) = (block for kind, block in BLOCKS if kind == "python")
    exec(block, {})
    assert "PPMoE over the best DPMoE, 143B" in capsys.readouterr().out


def test_the_tables_numbers_are_predicted():
    rows = dict(re.findall(r"^\| (PPMoE[^|]*|comm[^|]*) \|[^|]*\| ([^|]*) \|$", PAGE, re.M))
    large = pipeline_moe_paper.speedup("143B DPMoE DP128 TP2", "143B PPMoE TP8 PP16")
    small = pipeline_moe_paper.speedup("6.7B DPMoE DP32", "6.7B PPMoE TP8 PP4")
    assert rows["PPMoE over the best DPMoE, 143B"] == f"{large[1]:.2f}"
    assert rows["PPMoE over the best DPMoE, 6.7B"] == f"{small[1]:.2f}"
    saved = f"{hierarchical_saving():.1%}; of the all-to-alls alone {exchange_saving():.1%}"
    assert saved in rows.values()
    share = next(r for r in papers.headline_rows() if "all-to-alls of forward" in r["cell"])
    assert f"| 65.5% | {share['predicted']:.1%} |" in PAGE


def test_all_hardware_is_named():
    assert all(f"`{name}`" in PAGE for name in known_hardware())
