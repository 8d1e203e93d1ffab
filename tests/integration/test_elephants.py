# SPDX-License-Identifier: Apache-2.0
"""experiments/elephants: its README's commands run in miniature, in their order."""

import importlib
import json
import re
import shlex

import numpy as np
import pytest
import sacrebleu

from experiments.elephants.run import judge
from experiments.elephants.tables import throughput
from switchx.bench.peers import torch_peer
from switchx.cli.main import main
from switchx.data.corpora.multi30k import LANGUAGES
from tests.compilation import compiled_once
from tests.data.words import sentences
from tests.processes import ROOT

FOLDER = ROOT / "experiments/elephants"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPTS = ("quality", "throughput", "cost")

# What is added to a command so that it takes seconds.
BRIEF = {
    "train": [
        f"--gin.{each}"
        for each in (
            "TRAIN_STEPS=2", "WARMUP_STEPS=1", "BATCH_SIZE=8", "INPUTS_LENGTH=64",
            "VOCAB_SIZE=500", "TrainingJob.eval_batches=1", "NUM_EXPERTS=2",
            "ModelConfig.d_model=16", "ModelConfig.d_ff=16", "ModelConfig.num_heads=1",
            "ModelConfig.num_encoder_layers=2",
        )
    ],
    "quality": ["--directions=en_de,de_en", "--sentences=4", "--max_new_tokens=4",
                "--samples=20"],
    "throughput": ["--batches=4", "--sentences=4", "--max_new_tokens=4", "--rounds=1"],
    "cost": ["--batches=4"],
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts():
    return {name: importlib.import_module(f"experiments.elephants.{name}") for name in SCRIPTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, session_cache):
    """Where the commands run, with `multi30k`, made up."""
    base = tmp_path_factory.mktemp("elephants")
    (base / "multi30k").mkdir()
    lines = sentences(400)
    for number, language in enumerate(LANGUAGES):
        for split in ("train", "val", "test_2016_flickr"):
            text = "".join(lines[number:] + lines[:number])
            (base / f"multi30k/{split}.{language}").write_text(text, encoding="utf-8")
    with compiled_once(session_cache / "compiled"):
        yield base


def run(command: str, scripts) -> str:
    """Runs a line of the README in this folder and gives the script's or command's name."""
    program, flag, *options = shlex.split(command)
    if program == "switchx":
        assert main([flag, *options, *BRIEF[flag]]) == 0
        return flag
    module, *options = options
    name = module.removeprefix("experiments.elephants.")
    assert (program, flag) == ("python", "-m")
    scripts[name].main([*options, *BRIEF[name], "--results=results.json"])
    return name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_run_in_their_order(folder, scripts, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch_peer, "is_available", lambda: False)
    *commands, last = "".join(BLOCK.findall(PAGE)).splitlines()
    assert [run(each, scripts) for each in commands] == list(BRIEF)
    assert last == "make experiments"  # whose tests are in tests/experiments
    results = json.loads((folder / "results.json").read_text())
    assert list(results) == ["quality", "throughput", "cost"]
    judged = judge(results)
    assert "verdict" not in judged and "12 of 12 cells" in judged["because"]  # it has no rule
    directions = [(row["direction"], row["beams"]) for row in results["quality"]["rows"]]
    assert directions == [
        (direction, beams) for direction in ("en_de", "de_en", "mean") for beams in (1, 2)
    ]
    for row in results["throughput"]["rows"]:
        assert list(row["input_tokens_per_s"]) == list(scripts["throughput"].OURS)
        same = row["same_texts_as_float32"]
        # Pruning changes no text.
        assert [same[name] for name in same if name.startswith("float32")] == [1.0] * 3
    assert [row["model"] for row in results["cost"]["rows"]] == ["float32", "int8", "int4"]
    assert "were not installed" in judged["tables"][1]["title"]

    # What was measured is not measured again.
    def refuse(*arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(scripts["quality"], "answer", refuse)
    monkeypatch.setattr(scripts["throughput"], "measure", refuse)
    for command in commands[1:3]:
        run(command, scripts)
    again = json.loads((folder / "results.json").read_text())
    assert again == results


@pytest.mark.hf
@pytest.mark.timeout(600)
def test_pytorch_says_the_same_texts(folder, scripts, monkeypatch):
    monkeypatch.chdir(folder)
    commands = "".join(BLOCK.findall(PAGE)).splitlines()
    if not (folder / "runs/elephants").exists():
        run(commands[0], scripts)
    run(commands[2], scripts)
    results = json.loads((folder / "results.json").read_text())
    for row in results["throughput"]["rows"]:
        assert row["same_texts_as_float32"]["torch"] == 1.0
    (row, *_) = throughput(results["throughput"])["rows"]
    columns = ("PyTorch", "float32", "int8", "int4", "float32 over PyTorch", "same texts")
    assert tuple(row) == ("beams", "batch", *columns)


def test_a_sample_is_sacrebleus_score_of_the_resampled_texts(scripts):
    quality = scripts["quality"]
    targets = [line.strip() for line in sentences(12)]
    base = [line.replace("a", "e", 1) for line in targets]
    other = [line.replace("o", "u", 2) for line in targets]
    indices = quality.bootstrap_indices(12, samples=9)
    scores = [quality.resampled_bleu(texts, targets, indices) for texts in (base, other)]
    for texts, got in zip((base, other), scores, strict=True):
        rows = [range(12), *indices.tolist()]
        want = [
            sacrebleu.corpus_bleu([texts[i] for i in row], [[targets[i] for i in row]]).score
            for row in rows
        ]
        np.testing.assert_allclose(got, want, rtol=1e-6)
    found = quality.change_and_interval(*scores)
    assert found["change"] == scores[1][0] - scores[0][0]
    changes = np.subtract(scores[1][1:], scores[0][1:])
    assert min(changes) <= found["low"] < found["high"] <= max(changes)
    assert quality.change_and_interval(scores[0], scores[0]) == dict.fromkeys(found, 0.0)


def test_prices_are_the_papers(scripts):
    """Its T4 at batch 20: $390.55 a month, 1565 words/s, 0.250 monthly USD/token."""
    row = {
        "batch": 20, "beams": 1, "words_per_s": {"int4": 1565.0},
        "batch_latency_ms": {"int4": 421.0},
    }  # fmt: skip
    (found,) = scripts["cost"].cost_rows({"rows": [row]}, 390.55, (20,), 1)
    assert found["monthly_usd_per_word_per_s"] == pytest.approx(0.250, abs=5e-4)
    assert found["usd_per_million_words"] == pytest.approx(390.55 / 730 * 1e6 / 3600 / 1565)
    with pytest.raises(ValueError, match=r"measured were \(batch, beams\) \[\(20, 1\)\]"):
        scripts["cost"].cost_rows({"rows": [row]}, 390.55, (20,), 2)
