# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/command_line.md run, in their order, in one folder."""

import re
import shlex

import pytest

from switchx.cli import gin_edge
from switchx.cli.arguments import parse_job
from switchx.cli.main import _parse, _parser, main
from tests.compilation import compiled_once
from tests.processes import ROOT

PAGE = (ROOT / "docs/command_line.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCK.findall(PAGE) for line in block.splitlines()]

# So that a run takes seconds; a later flag wins.
MODEL = ["d_model=8", "d_ff=8", "num_heads=1", "num_encoder_layers=1", "num_decoder_layers=1"]
BRIEF = [
    *(f"--gin.ModelConfig.{each}" for each in MODEL),
    "--gin.SwitchConfig.every=1",
    "--gin.NUM_EXPERTS=2",
    "--gin.VOCAB_SIZE=500",
    "--gin.TrainingJob.eval_batches=1",
]


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch, session_cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_cache))
    monkeypatch.delenv("SWITCHX_DATA_DIR", raising=False)
    (tmp_path / "my_text").mkdir()
    for path in ROOT.glob("*.md"):
        (tmp_path / f"my_text/{path.stem}.txt").write_text(path.read_text(encoding="utf-8"))
    with compiled_once(session_cache / "compiled"):
        yield
    gin_edge.gin.clear_config()


def test_commands_run(in_a_folder, capsys):
    assert len(COMMANDS) == 10
    steps = 0
    for command in COMMANDS:
        program, name, *options = shlex.split(command)
        assert program == "switchx"
        if name == "train":
            steps += 1
            options += [*BRIEF, f"--gin.TRAIN_STEPS={steps}"]
        options = [each.replace("--size=2000", "--size=400") for each in options]
        assert main([name, *options]) == 0, f"{command}\n{capsys.readouterr().err}"
        assert capsys.readouterr().out


def test_macros_are_those_of_the_runs():
    cells = re.findall(r"^\| (`[A-Z_`, ]+`) \|", PAGE, re.MULTILINE)
    macros = {macro for cell in cells for macro in re.findall(r"[A-Z_]{2,}", cell)}
    words = ["train", "--gin_file=runs/pretrain_tiny.gin", "--model_dir=x"]
    values = {"DATA_DIR": "a", "INIT_FROM": "b"}
    words += [f"--gin.{macro}={values.get(macro, 7)}" for macro in sorted(macros)]
    job = parse_job(_parse(_parser(), words))
    gin_edge.gin.clear_config()
    assert len(macros) == 8
    assert (job.train_steps, job.batch_size, job.seed, job.log_every) == (7, 7, 7, 7)
    assert (job.eval_every, job.checkpoint_every) == (7, 7)
    assert (job.data_dir, job.init_from) == ("a", "b")
