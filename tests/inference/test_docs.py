# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/inference.md run, in their order, in one folder."""

import dataclasses
import re
import shlex

import pytest

from switchx.cli.main import main
from switchx.inference.config import DecodingConfig
from switchx.models.config import ModelConfig, SwitchConfig
from tests.processes import ROOT
from tests.training.saved_runs import SPANS, save_run

PAGE = (ROOT / "docs/inference.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EIGHT_DEVICES = "XLA_FLAGS=--xla_force_host_platform_device_count=8 "
MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 2, 4, 2, 2, switch=SwitchConfig(2, every=1))


@pytest.mark.slow  # half a minute; the README's commands are a default test
def test_blocks_run(in_a_folder, capsys):
    save_run(in_a_folder / "runs/tiny", MODEL, source=SPANS)
    (in_a_folder / "questions.txt").write_text("import <extra_id_0>\n")
    (in_a_folder / "pairs.tsv").write_text("import <extra_id_0>\t<extra_id_0> jax\n")
    names = {}
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "inference.md", "exec"), names)
            assert capsys.readouterr().out
            continue
        for command in block.splitlines():
            # Eight devices are there.
            program, *words = shlex.split(command.removeprefix(EIGHT_DEVICES))
            assert program == "switchx"
            assert main(words) == 0, capsys.readouterr().err
    files = {path.name for path in in_a_folder.iterdir()}
    assert {"answers.txt", "answers.txt.progress.json", "samples.jsonl"} <= files
    assert len((in_a_folder / "answers.txt").read_text().splitlines()) == 1
    artifact = {path.name for path in (in_a_folder / "runs/tiny_int4").iterdir()}
    assert artifact == {"artifact.json", "weights.safetensors", "vocabulary.json"}


def test_settings_of_decoding_are_named():
    ids = {"eos_id", "pad_id", "start_id", "is_prompt_bidirectional"}
    names = {field.name for field in dataclasses.fields(DecodingConfig)} - ids
    assert [name for name in names if f"`{name}`" not in PAGE] == []
