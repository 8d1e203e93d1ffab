# SPDX-License-Identifier: Apache-2.0
"""Cells of the ladder's third rung for a card, in one file: configurations, and text as tokens.

    python -m experiments.card --data=DATA --output=r2.npz --rates=0.0013,0.0027 --seeds=900
    switchx check accelerator --only=ladder --ladder=r2.npz --output=first
    switchx check accelerator --only=ladder --ladder=r2.npz --output=second --after=first

Training reads more text than that of the lower rungs; validation is theirs, the same documents.
What a call of `check accelerator` measured is carried to the next by `--after`, which refuses
another card. The card's machine reads no text and needs neither gin nor Grain.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib

import numpy as np

from experiments.experiment import ENGLISH, MORE_ENGLISH, Experiment
from experiments.ladder import DENSE
from experiments.pages import ROOT
from switchx.data.loader import evaluation_batches
from switchx.data.tasks import Task
from switchx.fields import describe
from switchx.gin_config.building import job_from_gin
from switchx.training.job import TrainingJob

GIN_FILE = "configs/runs/ladder_r2.gin"
CONTENDERS = {"dense": (DENSE,), "16 experts": ()}


def rows_of(job: TrainingJob, source: Task, split: str) -> dict[str, np.ndarray]:
    """All rows of a split, packed, each once: features of whole batches [B, L], the last one
    filled up with padding."""
    task = dataclasses.replace(source, evaluation_split=split)
    batches = list(evaluation_batches(task, job.batches, data_dir=job.data_dir))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def cells_of(files: tuple[str, ...], rates: list[float], seeds: list[int], *bindings: str):
    """A job of each rate, seed and contender, by name."""
    return {
        f"{name}, rate {rate:g}, seed {seed}": job_from_gin(
            [ROOT / GIN_FILE],
            [f"FILES={files}", f"LEARNING_RATE={rate}", f"SEED={seed}", *own, *bindings],
        )
        for seed in seeds
        for rate in rates
        for name, own in CONTENDERS.items()
    }


def write(
    output: pathlib.Path, jobs: dict[str, TrainingJob], validated: tuple[str, ...]
) -> None:
    """Writes cells, and the rows of training and of validation, those of the files `validated`.

    A cell's case ends in a hash of its configuration and of the text, so that a call goes on
    only with cells that are the same.
    """
    job, digest = next(iter(jobs.values())), hashlib.sha256()
    corpus = dataclasses.replace(job.source.corpus, path=validated)
    texts = corpus.open("validation", job.data_dir)
    size = sum(len(example[field].encode()) for example in texts for field in texts.fields)
    arrays = {
        f"{split}/{name}": array.astype(np.uint16 if array.dtype == np.int32 else array.dtype)
        for split, source in (
            ("train", job.source),
            ("validation", dataclasses.replace(job.source, corpus=corpus)),
        )
        for name, array in rows_of(job, source, split).items()
        if name != "decoder_input_tokens"  # the card's machine makes it of the targets
    }
    for array in arrays.values():
        digest.update(array)
    cells = []
    for name, each in jobs.items():
        cell = {"seed": each.seed, "steps": each.train_steps, "rows": each.batch_size}
        cell["validation_bytes"] = size
        for key in ("model", "optimizer", "schedule", "loss", "step"):
            cell[key] = describe(getattr(each, key))
        own = digest.copy()
        own.update(json.dumps(cell).encode())
        cells.append({"case": f"{name}, {own.hexdigest()[:8]}"} | cell)
    np.savez_compressed(output, cells=json.dumps(cells), **arrays)


def main(words: list[str] | None = None) -> None:
    """Writes the file; bad input ends it with a line and status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, help="folder of the data")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the file, .npz")
    parser.add_argument("--rates", required=True, help="learning rates, apart by commas")
    parser.add_argument("--seeds", required=True, help="such as 900, which judges nothing")
    given = parser.parse_args(words)
    try:
        experiment = Experiment("rates", given.output.parent, given.data)
        validated, more = (
            tuple(map(str, experiment.files(*patterns).values()))
            for patterns in (ENGLISH, MORE_ENGLISH)
        )
        rates = map(float, given.rates.split(","))
        seeds = map(int, given.seeds.split(","))
        write(given.output, cells_of(validated + more, [*rates], [*seeds]), validated)
    except ValueError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
