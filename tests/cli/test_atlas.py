# SPDX-License-Identifier: Apache-2.0
"""`switchx atlas`: a page that opens offline, tables, clear words where there is nothing."""

import dataclasses
import json
import math
import pathlib
import random
import re
import shutil
import sysconfig
import types
from pydoc_data.topics import topics

import numpy as np
import pyarrow.parquet
import pytest

from switchx import api
from switchx.analysis import atlas_page
from switchx.cli.atlas import _names
from switchx.cli.main import main
from switchx.data.labelled_texts import LabelledTexts, read_labelled_texts
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabulary_training import train_sentencepiece
from switchx.routing_atlas import make_atlas, require_readable, text_rows
from tests.data.refusals import refused
from tests.data.words import sentences
from tests.interop.folders import SWITCH, huggingface_folder
from tests.processes import ROOT
from tests.training.jobs import DENSE, ENCODER_DECODER

FIXTURES = ROOT / "tests/fixtures/1be465a"
BRIEF = ("--max_tokens=20", "--knockout_texts=4", "--knockouts=3", "--min_tokens=50")


def write_texts(folder: pathlib.Path, texts: int = 6) -> list[str]:
    """Three files of texts of about one length."""
    rng, paths = random.Random(0), []
    words = {"names": "def class import return self".split(), "digits": list("0123456789")}
    for label, own in (words | {"words": "the of a and to expert".split()}).items():
        lines = [json.dumps({"text": " ".join(rng.choice(own) for _ in range(12))})
                 for _ in range(texts)]  # fmt: skip
        paths.append(str(folder / f"{label}.jsonl"))
        pathlib.Path(paths[-1]).write_text("\n".join(lines))
    return paths


def table(folder: pathlib.Path, name: str) -> list[dict]:
    return pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()


@pytest.mark.slow
def test_a_run_beside_its_int4(in_a_folder, one_device, cli):
    inputs = write_texts(in_a_folder)
    words = [str(FIXTURES / "run"), "--input", *inputs, "--output=out", *BRIEF, "--json"]
    report = cli.json("atlas", *words, f"--against={FIXTURES / 'int4'}")
    folder, texts = in_a_folder / "out", read_labelled_texts(inputs)
    assert report["page"] == str(folder / "atlas.html")
    text = (folder / "atlas.html").read_text()
    assert "http" not in re.sub(r"base64,[^\"]*", "", text) and len(text) < 5 * 2**20
    for title in (
        "Atlas of run and int4",
        "Choices that differ",
        "Vocabulary: run",
        "Vocabulary: int4",
    ):
        assert title in text
    run, int4 = (folder / "tables" / name for name in ("run", "int4"))
    for name in ("layers", "experts", "labels", "vocabulary", "examples", "knockouts"):
        assert {row["model"] for row in table(run, name)} == {"run"}
    for one, other in zip(table(run, "layers"), table(int4, "layers"), strict=True):
        assert one["tokens"] == other["tokens"] > 0
    losses_are_those_of_scores(report, texts)
    removed = table(run, "knockouts")
    assert len(removed) == 3 * 3 and len({(r["layer"], r["expert"]) for r in removed}) == 3
    assert any(abs(each["change"]) > 1e-6 for each in removed)


def losses_are_those_of_scores(report: dict, texts: LabelledTexts) -> None:
    model = api.load(FIXTURES / "run")
    rows = text_rows(model, texts, 20)
    scores = model.score(*zip(*rows.pairs, strict=True))
    for k, label in enumerate(texts.labels):
        own = [s for s, r in zip(scores, rows.text_B, strict=True) if texts.label_R[r] == k]
        loss = -sum(s.log_likelihood for s in own) / sum(s.num_tokens for s in own)
        found = next(each for each in report["models"][0]["labels"] if each["label"] == label)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_a_converted_switch_folder(in_a_folder, one_device):
    inputs = write_texts(in_a_folder)
    (in_a_folder / "text.txt").write_text("".join(sentences(400)))
    train_sentencepiece(["text.txt"], 400, ".")
    theirs, _ = huggingface_folder(
        in_a_folder / "theirs", dataclasses.replace(SWITCH, vocab_size=512)
    )
    shutil.move("vocabulary.model", theirs / "spiece.model")
    assert main(["convert", "--from=huggingface", str(theirs), "ours"]) == 0
    assert (
        main(["atlas", "ours", "--input", *inputs, "--output=out", *BRIEF, "--knockouts=0"])
        == 0
    )
    layers = [each["layer"] for each in table(in_a_folder / "out/tables/ours", "layers")]
    assert layers == ["encoder 1", "encoder 3", "decoder 1"]
    moved = table(in_a_folder / "out/tables/ours", "transitions")
    assert {(each["layer"], each["next_layer"]) for each in moved} == {
        ("encoder 1", "encoder 3")
    }
    assert not (in_a_folder / "out/tables/ours/knockouts.parquet").exists()
    assert "with masked spans" in (in_a_folder / "out/atlas.html").read_text()


def test_bad_input_is_named(in_a_folder, cli):
    inputs, run = write_texts(in_a_folder), FIXTURES / "run"
    words = (run, "--input", *inputs, "--output=out")
    assert "labels of fewer than 100000 tokens: names (" in cli.refused(
        "atlas", *words, "--min_tokens=100000"
    )
    assert not (in_a_folder / "out").exists()
    assert not list(in_a_folder.glob(".out*"))
    said = cli.refused("atlas", *words, "--label_column=kind")
    assert "has no 'kind'; its columns are text; name others by" in said
    assert "--input is missing (files, folders)" in cli.refused("atlas", run, "--output=out")
    said = cli.refused("atlas", *words, "--knockouts=many")
    assert "'many' is no whole number of at least 1" in said


def model_of(config, vocabulary=None, **formats) -> api.Model:
    form = TextFormat(**(dict(
        inputs_end_with_eos=True, is_prompt_bidirectional=False, names_sentinels=False
    ) | formats))  # fmt: skip
    return api.Model(config, {}, vocabulary or ByteVocabulary(), 0, form, "")


def texts_of(*texts: str, targets=None) -> LabelledTexts:
    return LabelledTexts(list(texts), targets, ("a",), np.zeros(len(texts), int), None)


def test_each_model_has_its_task(in_a_folder, cli, monkeypatch):
    asked = []
    load = lambda folder, step, task: asked.append(task)  # noqa: E731
    monkeypatch.setattr("switchx.api.load", load)
    for name, given in (("make_atlas", None), ("write_page", {})):
        monkeypatch.setattr(f"switchx.routing_atlas.{name}", lambda *a, x=given, **k: x)
    words = ["--task=a", "--against=b", "--against_task=c", "--output=out", "--json"]
    cli.json("atlas", "tiny", *words)
    assert asked == ["a", "c"]


def test_models_without_text_have_no_atlas_and_two_of_one_name_have_two():
    with refused("mine is a dense model, which routes nothing; give one"):
        require_readable(model_of(DENSE), "mine")
    model = model_of(ENCODER_DECODER)
    assert require_readable(model, "mine") is None
    for factor in (0, -1, math.inf, math.nan):
        with refused("capacity factors are finite and above 0; leave the others out"):
            make_atlas(model, texts_of("a"), pathlib.Path(), name="a", factors=(1, factor))
    object.__setattr__(model, "vocabulary", None)
    with refused("mine has no vocabulary, so it cannot read texts; convert it"):
        require_readable(model, "mine")
    assert _names([("a/run", None), ("b/run", None)]) == ["run", "run_against"]
    assert _names([("run", 10), ("run/", 20)]) == ["run", "run_20"]
    assert _names([("a", None), ("b", None)]) == ["a", "b"]
    # Maps of shades, not of colours: there is no palette to run out of; tables are cut.
    layer = types.SimpleNamespace(load_E=np.arange(300), num_experts=300)
    atlas = types.SimpleNamespace(layers=[layer] * 4)
    assert atlas_page.shown_experts(atlas, layer) == list(range(300 - 64, 300))
    assert atlas_page._cut(atlas) == " The 64 busiest of 300; tables/ has all."


def test_rows_are_the_text_or_what_masks_it():
    vocabulary = ByteVocabulary()
    text = "abcdefghij" * 3
    rows = text_rows(model_of(DENSE), texts_of(text, "xy"), 8)
    assert rows.text_B.tolist() == [0, 0, 0, 0, 1]
    assert all(not inputs and len(targets) <= 8 for inputs, targets in rows.pairs)
    whole = [token for _, targets in rows.pairs for token in targets]
    assert whole == [*vocabulary.encode(text), 1, *vocabulary.encode("xy"), 1]
    assert rows.how == "the decoder reads the text"
    vocabulary, texts = ByteVocabulary(), texts_of("abcdefghij" * 3, "x")
    rows = text_rows(model_of(ENCODER_DECODER), texts, 10)
    assert rows.how == "the encoder reads the text, and the decoder writes it once more"
    assert rows.pairs[0] == ([*vocabulary.encode("abcdefghij"), 1],) * 2
    assert rows.text_B.tolist() == [0, 0, 0, 1]
    # Spans: the targets spell out what is masked, a text of one token has none.
    model = model_of(ENCODER_DECODER, names_sentinels=True)
    texts = texts_of("abcdefghij" * 18, "x")
    rows = text_rows(model, texts, 60)
    assert re.match("the encoder reads the text with masked spans.*; 1 texts of less", rows.how)
    assert rows.text_B.tolist() == [0, 0, 0]
    for inputs, targets in rows.pairs:
        restored = vocabulary.decode(inputs)
        spans = re.findall(r"(<extra_id_\d+>)([^<]*)", vocabulary.decode(targets))
        for sentinel, span in spans:
            restored = restored.replace(sentinel, span)
        assert restored == "abcdefghij" * 6 and len(spans) > 1
    assert text_rows(model, texts, 60).pairs == rows.pairs
    assert text_rows(model, texts, 60, seed=1).pairs != rows.pairs
    targets = texts_of("ab", targets=["cd"])
    rows = text_rows(model, targets, 10)
    assert rows.pairs == [([*vocabulary.encode("ab"), 1], [*vocabulary.encode("cd"), 1])]
    with refused(
        "text 1, 'ab', has 3 tokens and its target 3; a row has 2: raise --max_tokens"
    ):
        text_rows(model, targets, 2)


def code_prose_digits(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Files to train on and to look at, of code, prose and digits."""
    rng, train, test = random.Random(0), [], []
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "calendar", "configparser", "ast", "shlex", "textwrap", "csv", "cmd")
    code = "\n\n".join((library / f"{name}.py").read_text() for name in names)
    prose = "\n\n".join(topics[name] for name in sorted(topics))  # of Python's help
    lines = [" ".join(str(rng.randint(0, 99999)) for _ in range(60)) for _ in range(700)]
    for label, text in (("code", code), ("prose", prose), ("digits", "\n\n".join(lines))):
        for kind, part, files in (
            ("train", text[:200_000], train),
            ("test", text[200_000:240_000], test),
        ):
            (folder / kind).mkdir(exist_ok=True)
            files.append(str(folder / kind / f"{label}.txt"))
            pathlib.Path(files[-1]).write_text(part)
    return train, test


@pytest.mark.slow  # it trains for a minute
def test_a_specialists_removal_hurts_its_own_label_most(in_a_folder, one_device, cli):
    """Three labels, p < 0.01 each, on texts that neither trained it nor found the specialist.

    Not every training has three such labels: docs/atlas.md has ten. In five of them the expert
    that takes most more of a label was removed: p < 0.01 for 8 of 15 labels, lower loss for 5.
    """
    train, test = code_prose_digits(in_a_folder)
    bindings = (
        f"FILES={train}", "VOCAB_SIZE=1000", "NUM_EXPERTS=8", "SEED=1", "SwitchConfig.every=1",
        "ModelConfig.num_encoder_layers=1", "ModelConfig.num_decoder_layers=1",
        "ModelConfig.d_model=64", "ModelConfig.d_ff=128", "ModelConfig.num_heads=4",
        "ModelConfig.d_head=16", "ModelConfig.dropout_rate=0.0", "TRAIN_STEPS=1000",
        "WARMUP_STEPS=200", "EVAL_EVERY=500", "LOG_EVERY=500", "CHECKPOINT_EVERY=1000",
        "INPUTS_LENGTH=64", "TARGETS_LENGTH=24", "TrainingJob.eval_batches=2",
        "text_files.TextFiles.max_characters=1000",
    )  # fmt: skip
    words = (
        f"--gin_file=configs/{file}.gin"
        for file in ("runs/pretrain_tiny", "tasks/text_span_corruption")
    )
    cli("train", *words, *(f"--gin.{each}" for each in bindings), "--model_dir=run")
    options = ("--output=out", "--max_tokens=64", "--knockout_texts=48", "--json")
    found = cli.json("atlas", "run", "--input", *test, *options)["models"][0]["labels"]
    assert [each["label"] for each in found] == ["code", "prose", "digits"]
    for each in found:
        assert each["change"] > 0 and each["p"] < 0.01, each
    informed = [each["label_p"] for each in table(in_a_folder / "out/tables/run", "layers")]
    assert informed == [pytest.approx(1 / 1001)] * 2
    assert len(table(in_a_folder / "out/tables/run", "saturation")) == 3 * 2
