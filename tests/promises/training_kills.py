# SPDX-License-Identifier: Apache-2.0
"""`kill9_differing`: what a killed process leaves is the last checkpoint, bit for bit.

First the store alone at each of its write points (storage_kills.py), then whole runs of
training, resumed and killed again, at random write points and a random moment after: in a
step, in a snapshot, in a rename, while they resume. After each kill all arrays of the newest
checkpoint are compared with those of a run that was never killed.

`python -m tests.promises.training_kills FOLDER KEEP POINT DELAY_S` trains; it kills itself.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

from switchx.bench.storage import child_environment
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.items import read_items
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.corpora.text_files import TextFiles
from switchx.data.objectives import CausalLM
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from switchx.own_code import python_words
from switchx.progress import SilentReporter
from switchx.training.job import TrainingJob
from switchx.training.loop import train
from switchx.training.offload.storage_spec import StorageSpec
from switchx.tree import named_leaves
from tests.promises.storage import MODEL, differing_bits, make_job
from tests.promises.storage_kills import Points

NUM_STEPS, NUM_KILLS, SEED = 6, 20, 0
LONGEST_DELAY_S = 0.05


def killed() -> Iterator[tuple]:
    """How often something differed after kills of a store and of training."""
    yield from of_a_store()
    yield from of_training()


def of_a_store(stride: int = 1) -> Iterator[tuple]:
    """Kills a process that keeps records at every `stride`-th of its write points."""
    with tempfile.TemporaryDirectory() as folder:
        done = _child("storage_kills", folder, stride)
    if done.returncode:
        raise RuntimeError(f"a process that keeps records failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found["points"] <= 80:
        raise RuntimeError(f"a store has {found['points']} write points; expected more than 80")
    what = f"a store, {found['points']} write points in steps of {stride}"
    yield "kill9_differing", what, len(found["faults"])
    for point, faults in found["faults"].items():
        yield "fault", f"{what}, point {point}: {faults[0]}", 1


def of_training(num_kills: int = NUM_KILLS) -> Iterator[tuple]:
    """Kills training at random write points until there have been `num_kills` kills."""
    rng, kills = random.Random(SEED), 0
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        lines = [json.dumps({"text": f"text {number} " * 9}) for number in range(40)]
        (root / "text.jsonl").write_text("\n".join(lines))
        whole = _child("training_kills", root / "whole", NUM_STEPS, 0, 0.0)
        if whole.returncode:
            raise RuntimeError(f"training failed: {whole.stderr[-2000:]}")
        points = int(whole.stdout.splitlines()[-1])
        expected = {step: arrays_of(root / "whole", step) for step in range(1, NUM_STEPS + 1)}
        run, newest = root / "0", 0
        while kills < num_kills:
            at = rng.randint(1, points), rng.uniform(0, LONGEST_DELAY_S)
            done = _child("training_kills", run, 2, *at)
            before, newest = newest, newest_step(run)
            is_wrong = newest < before or bool(
                newest and differing_bits(arrays_of(run, newest), expected[newest])
            )
            what = f"training, point {at[0]} of {points} (seed {SEED}): checkpoint {newest}"
            yield "kill9_differing", what, is_wrong
            if done.returncode == 0:  # it had fewer points left: another run begins
                run, newest = root / str(kills + 1000), 0
            elif done.returncode != -signal.SIGKILL:
                raise RuntimeError(f"training ended by itself: {done.stderr[-2000:]}")
            else:
                kills += 1


def newest_step(folder: pathlib.Path) -> int:
    """The newest complete checkpoint's step; 0 if there is none."""
    if not (folder / "checkpoints").is_dir():
        return 0
    with Checkpointer(RunFolder(folder), Retention(keep_last=NUM_STEPS)) as checkpointer:
        return checkpointer.latest_complete_step() or 0


def arrays_of(folder: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by name, records among them."""
    path = RunFolder(folder).checkpoints / str(step)
    leaves = named_leaves(read_items(path, {"params": None, "train_state": None}))
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def _child(module: str, *words) -> subprocess.CompletedProcess:
    command = [*python_words(), "-m", f"tests.promises.{module}", *map(str, words)]
    # This tests disks, not accelerators, and a mesh takes all devices that there are.
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
        MODEL, StorageSpec("disk", host_bytes=2**20), source=text, train_steps=NUM_STEPS,
        eval_every=NUM_STEPS, eval_batches=1, data_dir=str(folder.parent / "data"),
        retention=Retention(keep_last=keep, keep_best=0),
    )  # fmt: skip


def main(folder: pathlib.Path, keep: int, point: int, delay_s: float) -> None:
    """Trains, and prints how many write points there were."""
    points = Points(point or None, delay_s)
    train(training_job(folder, keep), RunFolder(folder), SilentReporter(0))
    print(points.number)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4]))
