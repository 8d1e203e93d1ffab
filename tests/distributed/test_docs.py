# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/several_hosts.md and docs/checkpoints.md run as they stand."""

import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, child_environment, free_port

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# So that a run takes seconds.
BRIEF = " ".join(
    f"--gin.{each}"
    for each in (
        "TRAIN_STEPS={steps}", "ModelConfig.d_model=8", "ModelConfig.d_ff=8",
        "ModelConfig.num_heads=1", "ModelConfig.num_encoder_layers=1",
        "ModelConfig.num_decoder_layers=1", "SwitchConfig.every=1", "NUM_EXPERTS=2",
        "VOCAB_SIZE=500", "TrainingJob.eval_batches=1",
    )
)  # fmt: skip


def brief_numbers(blocks: str) -> str:
    """With a free port, and steps that brief runs have."""
    for found, brief in (
        (":8476", f":{free_port()}"), ("--steps=400,500", "--steps=1,2"),
        ("--step=best", "--step=2"),
    ):  # fmt: skip
        blocks = blocks.replace(found, brief)
    return blocks


def run(page: str, folder, cache, steps: list[int]) -> str:
    """All blocks of a page in one shell; each `switchx train` is made brief. Those of object
    stores are left out: tests/checkpoint/test_object_store.py has emulators of them."""
    found = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    blocks = "".join(block for block in found if "s3://" not in block)
    left = iter(steps)
    # Last in the line, where a flag wins over an earlier one.
    blocks = re.sub(
        r"^(switchx train .*?)( &)?$",
        lambda found: f"{found[1]} {BRIEF.format(steps=next(left))}{found[2] or ''}",
        brief_numbers(blocks),
        flags=re.MULTILINE,
    )
    script = f'set -e\nswitchx() {{ "{sys.executable}" -m switchx "$@"; }}\n{blocks}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=child_environment(cache, devices=1),
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_processes_on_one_machine_and_fewer_devices(tmp_path, session_cache):
    said = run("several_hosts.md", tmp_path, session_cache, [2, 2, 2, 4])
    assert said.count("Training finished; the state is saved at step 2") == 2
    assert said.count("Training finished; the state is saved at step 4") == 1


@pytest.mark.slow
def test_checkpoints_are_looked_at_and_read_in_the_other_layout(
    tmp_path, session_cache, run_cli
):
    made = run_cli(
        "train", "--gin_file=configs/runs/pretrain_tiny.gin", "--model_dir=run",
        *BRIEF.format(steps=1).split(),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    said = run("checkpoints.md", tmp_path, session_cache, [2, 3])
    assert "Training finished; the state is saved at step 3" in said
    assert "run/checkpoints/1: sound" in said
