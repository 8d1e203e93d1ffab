# SPDX-License-Identifier: Apache-2.0
"""docs/memory_sharding.md: its commands train, and its files are there."""

import re
import shlex

import pytest

from switchx.cli.main import main
from tests.processes import ROOT

PAGE = (ROOT / "docs/memory_sharding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]

# So that a run takes seconds; a later flag wins.
BRIEF = [
    *(f"--gin.ModelConfig.{name}=8" for name in ("d_model", "d_ff", "d_head")),
    *(f"--gin.ModelConfig.num_{stack}_layers=2" for stack in ("encoder", "decoder")),
    "--gin.ModelConfig.num_heads=1",
    "--gin.NUM_EXPERTS=4",
    "--gin.VOCAB_SIZE=504",
    "--gin.TRAIN_STEPS=2",
    "--gin.TrainingJob.eval_batches=1",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, in_a_folder, capsys):
    """On the eight devices that tests have, so without the flag that simulates them."""
    flags, program, *words = shlex.split(command)
    assert (flags, program) == (
        "XLA_FLAGS=--xla_force_host_platform_device_count=8",
        "switchx",
    )
    assert main([*words, *BRIEF]) == 0, capsys.readouterr().err


def test_files_are_there():
    links = re.findall(r"\]\((\.\./[^)]+)\)", PAGE)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
