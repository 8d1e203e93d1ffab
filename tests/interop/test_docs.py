# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/checkpoints_of_others.md run, in their order, on models of their names."""

import dataclasses
import json
import re
import shlex
import shutil

import jax
import pytest

from switchx.cli.main import main
from switchx.data.vocabulary_training import train_sentencepiece
from switchx.models.config import SwitchConfig
from tests.data.words import sentences
from tests.interop.folders import SWITCH, huggingface_folder
from tests.interop.t5x_files import by_layers, write_t5x
from tests.processes import ROOT
from tests.training.jobs import make_params

PAGE = (ROOT / "docs/checkpoints_of_others.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODEL = dataclasses.replace(SWITCH, vocab_size=512, switch=SwitchConfig(8, every=2))
BRIEF = {
    "train": ("TRAIN_STEPS=1", "BATCH_SIZE=8", "INPUTS_LENGTH=16", "TARGETS_LENGTH=16",
              "TrainingJob.eval_batches=1", "ModelConfig.dropout_rate=0.0",
              "SwitchConfig.expert_dropout_rate=0.0"),
    "t5x": ("ModelConfig.vocab_size=512", "ModelConfig.d_model=12", "ModelConfig.d_ff=20",
            "ModelConfig.num_heads=3", "ModelConfig.d_head=4",
            "ModelConfig.num_encoder_layers=4", "ModelConfig.num_decoder_layers=4"),
}  # fmt: skip


@pytest.mark.slow  # half a minute; the README's commands are a default test
def test_every_block_runs(in_a_folder, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_, first=jax.devices()[:1]: first)
    (in_a_folder / "text.txt").write_text("".join(sentences(400)))
    train_sentencepiece(["text.txt"], 400, ".")
    pairs = [{"inputs": text, "targets": text} for text in sentences(20)]
    (in_a_folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    shutil.copy("vocabulary.model", "spiece.model")
    with_capacity = dataclasses.replace(MODEL.switch, expert_capacity=64)
    folder, _ = huggingface_folder(
        in_a_folder / "switch-base-8", dataclasses.replace(MODEL, switch=with_capacity)
    )
    shutil.copy("vocabulary.model", folder / "spiece.model")
    write_t5x(in_a_folder / "checkpoint_500100", by_layers(MODEL, make_params(MODEL)))

    blocks = BLOCK.findall(PAGE)
    assert len(blocks) == 5
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "checkpoints_of_others.md", "exec"), {})
            assert capsys.readouterr().out.startswith("8 experts, ")
            continue
        program, command, *options = shlex.split(block)
        assert program == "switchx"
        brief = BRIEF["t5x"] if "--from=t5x" in options else BRIEF.get(command, ())
        options += [f"--gin.{each}" for each in brief]
        assert main([command, *options]) == 0, f"{block}\n{capsys.readouterr().err}"
        capsys.readouterr()
    assert (in_a_folder / "for_transformers/spiece.model").is_file()
