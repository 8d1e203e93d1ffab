# SPDX-License-Identifier: Apache-2.0
"""`kill9_differing`: what a killed process leaves is the last checkpoint, bit for bit.

First the store alone at each of its write points (storage_kills.py), then whole runs of
training, resumed and killed again, at random write points and a random moment after: in a
step, in a snapshot, in a rename, while they resume. After each kill all arrays of the newest
checkpoint are compared with those of a run that was never killed.

`python -m switchx.bench.storage_resumed FOLDER KEEP POINT DELAY_S` trains; it kills itself.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from switchx.bench.storage_kills import Points
from switchx.bench.storage_runs import MODEL, child_environment, differing_bits, make_job
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.items import read_items
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.corpora.text_files import TextFiles
from switchx.data.objectives import CausalLM
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from switchx.own_code import python_words
from switchx.storage.cache import StorageSpec
from switchx.training.job import TrainingJob
from switchx.training.loop import train
from switchx.tree import named_leaves

NUM_STEPS, NUM_KILLS, SEED = 6, 20, 0
LONGEST_DELAY_S = 0.05
Rows = list[dict[str, Any]]


def rows(*, is_quick: bool, note: Callable[[str], None]) -> Rows:
    """A row a kind of kill: how many there were, and after how many something differed."""
    note("kill -9 at every write point of a store")
    of_store = store_row(stride=5 if is_quick else 1)
    return [of_store, training_row(3 if is_quick else NUM_KILLS, note)]


def store_row(stride: int) -> dict[str, Any]:
    """Kills a process that keeps records at every `stride`-th of its write points."""
    with tempfile.TemporaryDirectory(prefix="switchx-bench-") as folder:
        done = _child("storage_kills", folder, stride)
    if done.returncode:
        raise RuntimeError(f"a process of bench storage failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "killed": f"a store, write points in steps of {stride}",
        "kills": len(range(1, found["points"] + 1, stride)),
        "differing": len(found["faults"]),
        "first": str(next(iter(found["faults"].items()), "")) or None,
    }


def training_row(
    num_kills: int, note: Callable[[str], None], seed: int = SEED
) -> dict[str, Any]:
    """Kills training at random write points, until there were so many kills."""
    rng, wrong, kills, resumed = random.Random(seed), [], 0, 0
    with tempfile.TemporaryDirectory(prefix="switchx-bench-") as folder:
        root = pathlib.Path(folder)
        lines = [json.dumps({"text": f"text {number} " * 9}) for number in range(40)]
        (root / "text.jsonl").write_text("\n".join(lines))
        points = _uninterrupted(root / "whole")
        expected = {step: arrays_of(root / "whole", step) for step in range(1, NUM_STEPS + 1)}
        run, newest = root / "0", 0
        while kills < num_kills:
            done = _train(run, 2, rng.randint(1, points), rng.uniform(0, LONGEST_DELAY_S))
            found = newest_step(run)
            if found < newest:
                wrong.append(f"checkpoint {newest} was there, and now the newest is {found}")
            elif found and differing_bits(arrays_of(run, found), expected[found]):
                wrong.append(f"checkpoint {found} differs")
            newest = found
            if done.returncode == 0:  # it had fewer points left: another run begins
                run, newest = root / str(kills + 1000), 0
                continue
            if done.returncode != -signal.SIGKILL:
                raise RuntimeError(f"training ended by itself: {done.stderr[-2000:]}")
            kills, resumed = kills + 1, resumed + (found > 0)
            note(f"kill {kills} of {num_kills}: checkpoint {found or 'none'}")
    return {
        "killed": f"training, random write points of {points} (seed {seed})",
        "kills": kills,
        "with_a_checkpoint": resumed,
        "differing": len(wrong),
        "first": wrong[0] if wrong else None,
    }


def newest_step(folder: pathlib.Path) -> int:
    """Of the checkpoints that are whole; 0 for none."""
    if not (folder / "checkpoints").is_dir():
        return 0
    with Checkpointer(RunFolder(folder), Retention(keep_last=NUM_STEPS)) as checkpointer:
        return checkpointer.latest_complete_step() or 0


def arrays_of(folder: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by name, records among them."""
    path = RunFolder(folder).checkpoints / str(step)
    leaves = named_leaves(read_items(path, {"params": None, "train_state": None}))
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def _uninterrupted(folder: pathlib.Path) -> int:
    """Trains to the end and keeps all checkpoints; the number of write points."""
    done = _train(folder, NUM_STEPS, 0, 0.0)
    if done.returncode:
        raise RuntimeError(f"a process of bench storage failed: {done.stderr[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def _train(folder: pathlib.Path, keep: int, point: int, delay_s: float):
    return _child("storage_resumed", folder, keep, point, delay_s)


def _child(module: str, *words) -> subprocess.CompletedProcess:
    command = [*python_words(), "-m", f"switchx.bench.{module}", *map(str, words)]
    # Disks are tried, no accelerators, and a mesh takes all devices that there are.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    environment = child_environment() | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


# The process that trains.


def training_job(folder: pathlib.Path, keep: int) -> TrainingJob:
    """A checkpoint after each step; a quarter of the records is cached."""
    text = Task(
        "text", TextFiles(str(folder.parent / "text.jsonl")), ByteVocabulary(), CausalLM()
    )
    return make_job(
        MODEL,
        StorageSpec("disk", host_bytes=2**20),
        source=text,
        train_steps=NUM_STEPS,
        eval_every=NUM_STEPS,
        eval_batches=1,
        data_dir=str(folder.parent / "data"),
        retention=Retention(keep_last=keep, keep_best=0),
    )


class Silent:
    """A reporter that says nothing."""

    def __getattr__(self, name: str):
        return lambda *arguments: None


def main(folder: pathlib.Path, keep: int, point: int, delay_s: float) -> None:
    """Trains, and prints how many write points there were."""
    points = Points(point or None, delay_s)
    train(training_job(folder, keep), RunFolder(folder), Silent())
    print(points.number)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4]))
