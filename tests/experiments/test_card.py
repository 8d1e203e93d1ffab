# SPDX-License-Identifier: Apache-2.0
"""experiments/card.py and the part of `check accelerator` that trains its cells."""

import dataclasses
import json

import numpy as np
import pytest

import switchx
from experiments import card
from switchx.bench.accelerator import command, ladder
from switchx.bench.accelerator.command import parts_named
from switchx.bench.accelerator.parts import Session
from switchx.checkpoint.run_folder import RunFolder
from switchx.shipped import TEXTS

SMALL = ("VOCAB_SIZE=512", "BATCH_SIZE=8", "TRAIN_STEPS=2", "WARMUP_STEPS=1", "LOG_EVERY=1",
         "CHECKPOINT_EVERY=2", "EVAL_EVERY=2", "ModelConfig.num_decoder_layers=1")  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    texts = map(json.loads, (TEXTS / "plays.jsonl").read_text().splitlines())
    (folder / "a.txt").write_text("\n\n".join(each["text"] for each in texts))
    (folder / "more.txt").write_text("\n\n".join(f"Said {i} times." for i in range(900)))
    files = str(folder / "a.txt"), str(folder / "more.txt")
    return card.cells_of(files, [0.01], [900], *SMALL)


def write(file, jobs):
    """Cells that are validated on the first of their files."""
    card.write(file, jobs, next(iter(jobs.values())).source.corpus.path[:1])


@pytest.fixture(scope="module")
def session(jobs, tmp_path_factory):
    file = tmp_path_factory.mktemp("card") / "cells.npz"
    write(file, jobs)
    return Session(is_rehearsal=True, output=file.parent, ladder=str(file))


def first_file(job):
    return dataclasses.replace(job.source.corpus, path=job.source.corpus.path[:1])


def test_a_split_is_written_once_and_whole(jobs, session):
    """Each word of validation is there once: by the tokens' texts. It is the first file's,
    training both files'."""
    job = next(iter(jobs.values()))
    with np.load(session.ladder) as file:
        cells, weights = json.loads(str(file["cells"])), file["validation/decoder_loss_weights"]
        train = file["train/decoder_segment_ids"]
    assert [each["case"].rpartition(", ")[0] for each in cells] == [*jobs]
    texts = first_file(job).open("validation", None), job.source.corpus.open("train", None)
    encode = job.source.vocabulary.encode
    tokens = sum(len(encode(each["text"])) + 1 for each in texts[0])  # and the end of the text
    assert weights.sum() == tokens and len(weights) % job.batch_size == 0
    assert (train > 0).sum() == sum(len(encode(each["text"])) + 1 for each in texts[1])


def test_cells_that_do_not_fit_are_left(session):
    """The part is not run unasked."""
    with pytest.raises(SystemExit, match="2 cells are left for a next call with --after"):
        next(ladder.ladder(dataclasses.replace(session, limit_s=0.0)))
    with pytest.raises(ValueError, match="--ladder=FILE of .* go together"):
        command.run(session.output / "out", only=["ladder"], is_rehearsal=True)
    assert "ladder" not in [part.name for part in parts_named(())]
    assert [part.name for part in parts_named(["ladder"])] == ["ladder"]


def test_a_next_call_trains_what_a_next_file_asks_for(monkeypatch, jobs, session, tmp_path):
    """And no cell of the same configuration and text again."""

    def run_part(settings, limit_s, log, take):
        file = dataclasses.replace(session, ladder=settings["ladder"], done=settings["done"])
        for each in ladder.ladder(file):
            take(each)

    monkeypatch.setattr(command, "run_part", run_part)
    monkeypatch.setattr(ladder, "trained", lambda *of: trained.append(of) or -4.0)
    trained, files = [], (session.ladder, str(tmp_path / "more.npz"))
    more = {name: dataclasses.replace(job, seed=901) for name, job in jobs.items()}
    write(files[1], jobs | {f"{name}, again": job for name, job in more.items()})
    for after, file, num_cells in ((None, files[0], 2), ("0", files[1], 4)):
        found = command.run(
            tmp_path / str(len(trained)), only=["ladder"], ladder=file, is_rehearsal=True,
            after=after and tmp_path / after, note=lambda text: None,
        )  # fmt: skip
        assert len(found.rows) == len(trained) == num_cells
        assert len({row["case"] for row in found.rows}) == num_cells
    with np.load(session.ladder) as cells:
        tokens = cells["validation/decoder_loss_weights"].sum()
    opened = first_file(next(iter(jobs.values()))).open("validation", None)
    size = sum(len(each["text"].encode()) for each in opened)
    assert found.rows[0]["bits_per_byte"] == pytest.approx(4 * tokens / size / np.log(2))


@pytest.mark.slow
def test_cells_begin_as_runs_do_and_go_on_where_a_call_ended(jobs, session, tmp_path):
    """The first model is that of `switchx train`, to its evaluation; what a call measured is
    not measured again."""
    job = next(iter(jobs.values()))
    switchx.train(job, tmp_path / "run")
    line = json.loads(RunFolder(tmp_path / "run").validation.read_text().splitlines()[0])
    with np.load(session.ladder) as file:
        cell, other = json.loads(str(file["cells"]))
        text = [ladder.rows_in(file, split) for split in ("train", "validation")]
    for split, rows in zip(("train", "validation"), text, strict=True):
        of_run = card.rows_of(job, job.source, split)
        assert split == "validation" or all((rows[n] == of_run[n]).all() for n in of_run)
    assert line["step"] == 0
    begun = ladder.trained(cell, *text, steps=0)
    assert begun == pytest.approx(line["neg_log_perplexity"], rel=1e-5)
    (row,) = ladder.ladder(dataclasses.replace(session, done=frozenset([cell["case"]])))
    assert row["case"] == other["case"] and begun < row["measured"] < 0 and row["steps"] == 2
