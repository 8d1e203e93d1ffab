# SPDX-License-Identifier: Apache-2.0
"""experiments/elephants: its README's commands run in miniature, in their order."""

import importlib
import json
import re
import shlex

import numpy as np
import pytest
import sacrebleu

from experiments.elephants.run import verdict
from switchx.bench import torch_peer
from switchx.cli.main import main
from switchx.data.corpora.multi30k import LANGUAGES
from switchx.gin_config import building
from tests.compilation import compiled_once
from tests.data.words import sentences
from tests.processes import ROOT

FOLDER = ROOT / "experiments/elephants"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPTS = ("cells", "quality", "throughput", "cost", "tables")

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
    "tables": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield {name: importlib.import_module(name) for name in SCRIPTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, session_cache):
    """Where the commands run: `multi30k`, made up, and a copy of the README."""
    base = tmp_path_factory.mktemp("elephants")
    (base / "multi30k").mkdir()
    lines = sentences(400)
    for number, language in enumerate(LANGUAGES):
        for split in ("train", "val", "test_2016_flickr"):
            text = "".join(lines[number:] + lines[:number])
            (base / f"multi30k/{split}.{language}").write_text(text, encoding="utf-8")
    (base / "README.md").write_text(PAGE, encoding="utf-8")
    with compiled_once(session_cache / "compiled"):
        yield base
    building.gin.clear_config()


def run(command: str, scripts) -> str:
    """Runs a line of the README in this folder and gives the script's or command's name."""
    program, name, *options = shlex.split(command)
    if program == "switchx":
        assert main([name, *options, *BRIEF[name]]) == 0
        return name
    path = name
    name = path.removeprefix("experiments/elephants/").removesuffix(".py")
    assert program == "python" and (ROOT / path).is_file()
    results = ["--results=results.json"]
    readme = ["--readme=README.md"] if name == "tables" else []
    scripts[name].main([*options, *BRIEF[name], *results, *readme])
    return name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_run_in_their_order(folder, scripts, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch_peer, "is_available", lambda: False)
    commands = "".join(BLOCK.findall(PAGE)).splitlines()
    assert [run(each, scripts) for each in commands] == list(BRIEF)
    results = json.loads((folder / "results.json").read_text())
    assert list(results) == ["cost", "quality", "throughput"]
    judged = verdict(results["quality"], results["throughput"])
    assert judged["verdict"] == "undecided" and "12 of 12 cells" in judged["because"]
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
    page = (folder / "README.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert scripts["tables"].all_tables(results) in page
    assert scripts["tables"].all_tables(results) in printed
    assert "were not installed" in page and "Not measured yet" not in page

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
    tables = scripts["tables"].all_tables(results)
    assert "PyTorch | float32 | int8 | int4 | float32 over PyTorch | same texts |" in tables


def test_the_page_has_the_tables_of_its_results(scripts):
    tables = scripts["tables"]
    results = scripts["cells"].read_results(FOLDER / "results.json")
    assert tables.with_tables(PAGE, tables.all_tables(results)) == PAGE


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


def test_half_a_line_is_forgotten(scripts, tmp_path):
    file = tmp_path / "cells.jsonl"
    scripts["cells"].FinishedCells(file).add({"a": 1, "b": "ü"}, {"x": [1]})
    file.write_text(file.read_text() + '{"cell": {"a"')
    finished = scripts["cells"].FinishedCells(file)
    assert finished.get({"b": "ü", "a": 1}) == {"x": [1]} and finished.get({"a": 2}) is None
    finished.add({"a": 2}, None)
    assert len(file.read_text().splitlines()) == 2
