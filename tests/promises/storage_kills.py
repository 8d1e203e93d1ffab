# SPDX-License-Identifier: Apache-2.0
"""A process that keeps records and is killed at the n-th of its write points, for each n.

`python -m tests.promises.storage_kills FOLDER STRIDE` prints how many points there are, and
what was wrong after which. Write points are the calls that change files, as Python's audit
events name them, and every read, write and wait of the store, so that tensorstore is killed
while it writes. Each attempt is a fork of this process, which has no threads and has not
imported JAX: nothing is imported again.
"""

import json
import os
import pathlib
import signal
import sys
import threading

import numpy as np

from switchx.storage.record import ArrayType, Record, RecordError, StoreLayout
from switchx.storage.store import RecordStore

_ARRAYS = {
    "params/w_DF": ArrayType((3, 5), "float32"),
    "mu/w_DF": ArrayType((3, 5), "bfloat16"),
}
LAYOUT = StoreLayout({"encoder 1": _ARRAYS, "decoder 3": _ARRAYS}, num_experts=3)
KEYS = range(LAYOUT.num_keys)
EVENTS = ("os.link", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def record(key: int, updates: int) -> Record:
    """The record of a key after so many updates, whose numbers identify it."""
    rng = np.random.default_rng([key, updates])
    arrays = {name: rng.normal(size=a.shape).astype(a.dtype) for name, a in _ARRAYS.items()}
    return Record(arrays, updates)


def is_same(one: Record, other: Record) -> bool:
    """Whether two records have equal arrays, to the bit, and updates."""
    return one.updates == other.updates and all(
        one.arrays[name].tobytes() == other.arrays[name].tobytes() for name in _ARRAYS
    )


class Points:
    """Counts write points, and kills the process at one of them, or a moment after it."""

    def __init__(self, last: int | None, delay_s: float = 0.0):
        self.number = 0
        self._last, self._delay_s = last, delay_s
        sys.addaudithook(self._hear)

    def pass_one(self) -> None:
        self.number += 1
        if self.number == self._last and self._delay_s:
            threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self.number == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, event: str, arguments: tuple) -> None:
        if event in EVENTS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            self.pass_one()


def train(folder: pathlib.Path, points: Points, done: int) -> None:
    """Makes four updates, each with a snapshot, keeps the two newest; restores in between.

    Args:
        done: file descriptor that gets a byte for each snapshot once it is complete.
    """
    with RecordStore(folder / "store", LAYOUT) as store:
        for updates in range(1, 5):
            for key in KEYS:
                store.write(key, record(key, updates))
                points.pass_one()
            store.read(0)
            store.snapshot(folder / f"snapshot_{updates}")
            os.write(done, b".")
            points.pass_one()
            if updates == 2:
                store.restore(folder / "snapshot_2")
            if updates > 2:
                old = folder / f"snapshot_{updates - 2}"
                # As a checkpointer does: first it is no snapshot, then it is deleted.
                old.rename(folder / "expired")
                for path in sorted((folder / "expired").rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                (folder / "expired").rmdir()


def differing(folder: pathlib.Path, num_done: int) -> list[str]:
    """What is wrong with the newest snapshot after a kill."""
    paths = sorted(folder.glob("snapshot_*"))
    newest = int(paths[-1].name.removeprefix("snapshot_")) if paths else 0
    # The last snapshot may be complete although its byte was not written.
    if newest not in (num_done, num_done + 1):
        return [f"the newest snapshot is {newest}, {num_done} were done"]
    with RecordStore(folder / "store", LAYOUT) as store:
        for path in paths:
            updates = int(path.name.removeprefix("snapshot_"))
            try:
                store.restore(path)
                if not all(is_same(store.read(k).result(), record(k, updates)) for k in KEYS):
                    return [f"{path.name} differs"]
            except RecordError as error:
                return [str(error)]
    return []


def attempt(folder: pathlib.Path, last: int | None) -> tuple[int, list[str]]:
    """Points passed (0 where it was killed), and what is wrong afterwards."""
    folder.mkdir()
    read_end, write_end = os.pipe()
    if not (child := os.fork()):
        points = Points(last)
        train(folder, points, write_end)
        os.write(write_end, b"=%d" % points.number)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        dots, _, number = file.read().partition("=")
    os.waitpid(child, 0)
    return int(number or 0), in_child(lambda: differing(folder, len(dots)))


def in_child(function) -> list[str]:
    """What a function returns in a fork of this process."""
    read_end, write_end = os.pipe()
    if not (child := os.fork()):
        os.write(write_end, json.dumps(function()).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else ["the check died"]


def main(folder: pathlib.Path, stride: int) -> None:
    """Prints the number of points and what was wrong, by point."""
    number, wrong = attempt(folder / "whole", None)
    faults = {"whole": wrong} if wrong else {}
    for last in range(1, number + 1, stride):
        passed, wrong = attempt(folder / str(last), last)
        if passed or wrong:
            faults[last] = wrong or ["it was not killed"]
    print(json.dumps({"points": number, "faults": faults}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
