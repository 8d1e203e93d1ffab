# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/routing_statistics.md, drops.md and atlas.md run, each in one folder."""

import dataclasses
import re
import shlex
import subprocess

import jax
import pytest

from switchx.analysis.atlas import CONTEXT, LEAST_TIMES, NUM_PERMUTATIONS
from switchx.analysis.atlas_page import MOST_EXPERTS, MOST_ROWS
from switchx.cli.main import main
from switchx.data.labelled_texts import MAX_CHARACTERS
from switchx.models.config import SwitchConfig
from switchx.routing_atlas import MOST_KNOCK_OUTS
from switchx.training.telemetry.routing_alarms import FEWEST_CHOICES, RoutingAlarms
from tests.compilation import T5
from tests.processes import ROOT

PAGE = (ROOT / "docs/routing_statistics.md").read_text(encoding="utf-8")
ATLAS = (ROOT / "docs/atlas.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# So that the run takes seconds; a later flag wins.
BRIEF = [
    *(f"--gin.ModelConfig.{each}" for each in ("d_model=8", "d_ff=8", "num_heads=1")),
    *(f"--gin.ModelConfig.num_{each}coder_layers=1" for each in ("en", "de")),
    "--gin.SwitchConfig.every=1",
    "--gin.NUM_EXPERTS=2",
    "--gin.CorpusVocabulary.sample_characters=20000",
    "--gin.VOCAB_SIZE=500",
    "--gin.TRAIN_STEPS=4",
    "--gin.EVAL_EVERY=2",
    "--gin.LOG_EVERY=1",
    "--gin.TrainingJob.eval_batches=1",
]


@pytest.mark.slow  # the README's commands are a default test
def test_blocks_run(in_a_folder, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_, first=jax.devices()[:1]: first)
    blocks = BLOCK.findall(PAGE)
    assert [language for language, _ in blocks] == ["bash", "bash", "python"]
    for block in (blocks[1][1], blocks[0][1]):
        for command in block.splitlines():
            _, name, *options = shlex.split(command)
            assert main([name, *options, *(BRIEF if name == "train" else [])]) == 0, command
    assert capsys.readouterr().out.endswith("runs/routed/report.html\n")
    exec(blocks[2][1], {})
    assert capsys.readouterr().out.count("[") == 1 + 3  # a row an evaluation


@pytest.mark.slow
def test_blocks_of_drops_and_drift_run(in_a_folder, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_, first=jax.devices()[:1]: first)
    brief = {"train": [*BRIEF, "--gin.CHECKPOINT_EVERY=2"], "plan": BRIEF}
    blocks = BLOCK.findall((ROOT / "docs/drops.md").read_text(encoding="utf-8"))
    assert [language for language, _ in blocks].count("python") == 1
    for language, block in blocks:
        if language == "python":
            exec(block, {})
            assert "{'encoder 0': np.float64(" in capsys.readouterr().out
            continue
        for command in block.splitlines():
            if command.startswith("printf"):
                subprocess.run(command, shell=True, check=True)
                continue
            _, name, *options = shlex.split(command.replace("=200,400", "=2,4"))
            assert main([name, *options, *brief.get(name, [])]) == 0, command
            said = capsys.readouterr()
            assert name != "drops" or "choices" in said.out
            assert name != "drift" or "choose other experts" in said.out


def test_numbers_of_the_page_are_those_of_the_code():
    assert f"{SwitchConfig(8).recorded_places} places" in PAGE
    alarms = RoutingAlarms()
    for said in (
        f"above {alarms.violation_factor:g} times its median of the last {alarms.median_lines}",
        f"in {alarms.lines_in_a_row} lines in a row, drops are above twice the floor and "
        f"{alarms.least_dropped:.0%} of choices above it",
        f"dead in {alarms.dead_lines} lines in a row, in which an even share is "
        f"{FEWEST_CHOICES} choices",
        f"beyond {alarms.bias_updates:g} updates",
        f"less than {alarms.least_information:g} nats in {alarms.lines_in_a_row} lines",
        f"first {alarms.first_lines} lines of a run",
    ):
        assert said in PAGE, said
    assert alarms.dropped_factor == 2 and alarms.least_violation == 1
    fields = {field.name for field in dataclasses.fields(alarms)}
    assert all(f"`{name}`" in PAGE or name == "hooks" for name in fields)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_blocks_of_the_atlas_run(in_a_folder, one_device, capsys):
    text = (ROOT / "switchx/routing_atlas.py").read_text()
    (in_a_folder / "code.txt").write_text(text[:6000])
    (in_a_folder / "prose.txt").write_text(ATLAS[:6000])
    for language, block in BLOCK.findall(ATLAS):
        if language == "python":
            exec(block, {})
            continue
        for command in block.splitlines():
            _, name, *options = shlex.split(command)
            brief = {
                "train": [*T5, "--gin.EVAL_EVERY=1"],
                "atlas": ["--knockouts=2", "--factors=1"],
            }
            assert main([name, *options, *brief.get(name, [])]) == 0, command
    said = capsys.readouterr().out
    assert "against/atlas.html" in said and "Without single experts 1" in said


def test_numbers_of_the_atlas_page_are_those_of_the_code():
    for said in (
        f"at most {MAX_CHARACTERS:,} characters",
        f"{NUM_PERMUTATIONS:,} permutations of the labels",
        f"/ {NUM_PERMUTATIONS + 1:,}",
        f"ids seen {LEAST_TIMES} times",
        f"with {CONTEXT} neighbours",
        f"at most {MOST_EXPERTS} busiest experts a layer, {MOST_ROWS} in all",
        f"`--knockouts=N` ({MOST_KNOCK_OUTS})",
    ):
        assert said in ATLAS.replace("\n", " "), said
