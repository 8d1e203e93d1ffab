# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's description of itself: its step, its score and its files.

`manifest.json` is written last, by process 0, from what every process listed (parts.py). A
checkpoint that has none, or whose files are not those listed in it, is not whole.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

from switchx import whole_folders
from switchx.checkpoint.items import RECORDS, has_records, items_of
from switchx.checkpoint.parts import LISTS, MANIFEST, list_names, read_lists
from switchx.object_store import Folder, files_in
from switchx.storage.snapshot import Snapshot

# Orbax changes these after the manifest is written; nothing is read from them.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")
# Most bytes of a file without numbers of arrays, such as one of Orbax' descriptions, that has a
# checksum and is read before the arrays are, both when resuming and when verifying.
_SMALL_BYTES = 1 << 20
_OF_NUMBERS = "/d/"  # in the paths of Orbax' storage


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: number of training steps.
        score: score that keep-best compares, higher is better; None without an evaluation.
        metrics: the evaluation's numbers.
        metric, mode: name of the number that gives the score, and whether `max` or `min` is
            best; None in older checkpoints.
        files: path below the checkpoint -> bytes and CRC-32. The CRC-32 is None where that of
            the arrays' values is in a list (parts.py), and in older checkpoints for Orbax' own
            descriptions.
    """

    step: int
    score: float | None
    metrics: dict[str, float]
    files: dict[str, list[int | None]] = dataclasses.field(default_factory=dict)
    metric: str | None = None
    mode: str | None = None


def scores_by(metric: str, mode: str, manifests: Iterable[Manifest]) -> dict[int, float]:
    """Finite scores of checkpoints by step, higher is better, all by the same metric."""
    sign = 1 if mode == "max" else -1
    numbers = {each.step: each.metrics.get(metric, math.nan) for each in manifests}
    return {step: sign * number for step, number in numbers.items() if math.isfinite(number)}


def scores_of(manifests: Iterable[Manifest]) -> dict[int, float]:
    """Scores of a run's checkpoints by step, in the metric of the newest one that has a score:
    a run may have been continued with another `Retention.best_metric`."""
    manifests = sorted(manifests, key=lambda each: each.step)
    newest = next((each for each in manifests[::-1] if each.score is not None), None)
    if newest is not None and newest.metric is not None:
        return scores_by(newest.metric, newest.mode, manifests)
    return {each.step: each.score for each in manifests if each.score is not None}


def numbers_of(metrics: dict[str, Any]) -> dict[str, float]:
    """An evaluation's numbers by name, as checkpoints store them and keep-best names them.

    Numbers of `tasks` are named `tasks/NAME/accuracy`, those of generated texts by task and
    metric alone, `glue_cola/matthews_corrcoef`. Lists (by layer) are left out; None, a number
    that could not be computed, becomes NaN.
    """
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            prefix = "" if name == "texts" else f"{name}/"
            numbers |= {f"{prefix}{inner}": x for inner, x in numbers_of(value).items()}
        elif isinstance(value, Real) and not isinstance(value, bool):
            numbers[name] = float(value)
        elif value is None:
            numbers[name] = math.nan
    return numbers


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Joins the processes' lists with names and sizes of the files that no process listed.

    These files are flushed to the disk, as the processes did with their own. Only the lists are
    read.

    Raises:
        ValueError: a process left no list, or a damaged one.
    """
    content = dataclasses.asdict(manifest)
    known: dict[str, list[int | None]] = {}
    for item in items_of(folder):
        _, listed = read_lists(folder / item)
        known |= {f"{item}/{name}": [size, None] for name, size in listed.items()}
        for name in list_names(folder / item):
            data = (folder / item / LISTS / name).read_bytes()
            known[f"{item}/{LISTS}/{name}"] = [len(data), zlib.crc32(data)]
    if has_records(folder):
        files = Snapshot(folder / RECORDS).files
        known |= {f"{RECORDS}/{name}": list(each) for name, each in files.items()}
    for name in files_in(folder):
        if name not in known:
            known[name] = [whole_folders.flush(folder / name), None]
    for name, entry in known.items():
        if entry[1] is None and entry[0] <= _SMALL_BYTES and _OF_NUMBERS not in name:
            entry[1] = zlib.crc32((folder / name).read_bytes())
    whole_folders.write_manifest(
        folder, MANIFEST, content, "crc32", left_out=_COMMIT_FILES, known=known
    )


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        ValueError: the manifest is missing, damaged, or of another step; the message is a
            clause that says which.
    """
    content = whole_folders.read_manifest(folder, MANIFEST, "crc32")
    # A later version may write more.
    names = [field.name for field in dataclasses.fields(Manifest) if field.name in content]
    try:
        manifest = Manifest(**{name: content[name] for name in names})
        numbers = [manifest.score or 0, *manifest.metrics.values()]
        if not all(isinstance(number, Real) for number in numbers):
            raise TypeError
    except (TypeError, AttributeError):
        raise ValueError(f"its {MANIFEST} is damaged") from None
    if str(manifest.step) != folder.name:
        raise ValueError(f"its {MANIFEST} is of step {manifest.step}")
    return manifest


def damages(folder: Folder, *, must_be_read: bool = False) -> Iterator[str]:
    """Yields faults of a checkpoint's files, a clause each: files that are missing or have the
    wrong size, and small ones, except experts', whose contents have changed."""
    try:
        files = read_manifest(folder).files
    except (ValueError, OSError) as error:
        is_passing = isinstance(error, OSError) and not whole_folders.is_damage(error)
        if must_be_read and is_passing:
            raise
        yield str(error) if isinstance(error, ValueError) else f"it cannot be read ({error})"
        return
    small = {name: entry for name, entry in files.items() if _is_small(name, entry)}
    rest = {name: entry for name, entry in files.items() if name not in small}
    yield from whole_folders.damages(folder, rest, None, must_be_read=must_be_read)
    yield from whole_folders.damages(folder, small, "crc32", must_be_read=must_be_read)


def _is_small(name: str, entry) -> bool:
    is_pair = isinstance(entry, list | tuple) and len(entry) == 2 and type(entry[0]) is int
    return is_pair and entry[0] <= _SMALL_BYTES and not name.startswith(f"{RECORDS}/")


def find_damage(folder: Folder) -> str | None:
    """The first fault of a checkpoint, or None if it is whole.

    Raises:
        OSError: it cannot be read now, which says nothing about whether it is damaged.
    """
    return next(damages(folder, must_be_read=True), None)
