# SPDX-License-Identifier: Apache-2.0
"""A run folder reads its own copy of the vocabulary: its source may be moved or deleted."""

import json
import shutil
from pathlib import Path

import jax
import pytest

import switchx
from switchx.cli.main import main
from switchx.data.vocabularies import train_model
from tests.data.words import sentences

# After a run file: what makes it small enough to take no time.
TINY = """
from __gin__ import dynamic_registration
from switchx.data import objectives
from switchx.data import tasks
from switchx.data import tokenizers
from switchx.data.corpora import text_files
from switchx.models import config

include "optimizers/adafactor_constant.gin"

FILES = %gin.REQUIRED
config.ModelConfig.vocab_size = 320
config.ModelConfig.d_model = 8
config.ModelConfig.d_ff = 8
config.ModelConfig.num_heads = 1
config.ModelConfig.d_head = 8
config.ModelConfig.architecture = "decoder_only"
config.ModelConfig.num_encoder_layers = 0
config.ModelConfig.num_decoder_layers = 1
config.ModelConfig.dropout_rate = 0.0
config.ModelConfig.switch = None
tasks.Task.corpus = @text_files.TextFiles()
text_files.TextFiles.path = %FILES
TRAIN_STEPS = 2
BATCH_SIZE = 8
INPUTS_LENGTH = 12
TARGETS_LENGTH = 12
"""
WORDS = """
VOCABULARY = @tokenizers.SentencePieceVocabulary()
tokenizers.SentencePieceVocabulary.path = "words.model"
tokenizers.SentencePieceVocabulary.num_sentinels = 20
"""


def run(*words) -> None:
    assert main(list(map(str, words))) == 0, words


@pytest.fixture
def folder(in_a_folder, monkeypatch):
    """A folder with a text, a vocabulary `words.model` and the two overlays; one device."""
    (device, *_) = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    (in_a_folder / "text.txt").write_text("\n".join(sentences(300)))
    (in_a_folder / "words.model").write_bytes(train_model(sentences(300), 300))
    (in_a_folder / "tiny.gin").write_text(TINY)
    (in_a_folder / "words.gin").write_text(TINY + WORDS)
    return in_a_folder


@pytest.mark.slow  # trains three times
def test_a_fine_tuned_run_needs_no_other_folder(folder, monkeypatch, capsys):
    small = [f"--gin.FILES={folder / 'text.txt'}"]
    pretrain = ["train", "--gin_file=configs/runs/pretrain_tiny.gin", "--gin_file=words.gin",
                *small, "--model_dir=first"]  # fmt: skip
    run(*pretrain)
    run("train", "--gin_file=configs/runs/finetune.gin", "--gin_file=tiny.gin", *small,
        "--gin.INIT_FROM=first", "--model_dir=tuned")  # fmt: skip

    # The pretrained run's vocabulary file becomes another one: refused, as it can be read.
    (folder / "words.model").write_bytes(train_model(sentences(300), 299))
    for command in (pretrain, ["eval", *pretrain[1:]]):
        assert main(command) == 2
        assert "'first' was trained with another vocabulary" in capsys.readouterr().err
    # It goes, then the pretrained run, the working directory, and the text's folder.
    (folder / "words.model").unlink()
    run("train", "--gin_file=first/operative_config.gin", "--gin.TRAIN_STEPS=3",
        "--model_dir=first")  # fmt: skip
    fingerprint = switchx.load("first").vocabulary.fingerprint()
    shutil.rmtree("first")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "tuned").rename(elsewhere / "moved")
    (folder / "text.txt").rename(elsewhere / "text.txt")
    monkeypatch.chdir(elsewhere)
    run("eval", "--model_dir=moved", "--gin.FILES=text.txt", "--json")
    run("train", "--gin_file=moved/operative_config.gin", "--gin.TRAIN_STEPS=3",
        "--gin.FILES=text.txt", "--model_dir=moved")  # fmt: skip
    assert switchx.load("moved").vocabulary.fingerprint() == fingerprint
    log = Path("moved/validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [0, 2, 3]
