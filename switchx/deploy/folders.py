# SPDX-License-Identifier: Apache-2.0
"""The folder of a deployment: one folder per step, each complete or absent, none made twice.

    1_fuse/ 2_reduce/ ...   what each step made; `step.json` is its manifest
    deploy.jsonl            what was made from which model, one line per finished step

A step's manifest says what it was made from (the checksum of the manifest before it; for the
first, the model's fingerprint), its settings, what was measured, and a SHA-256 of every file.
The folder gets its name when all of it is written, so a process may be killed anywhere: the
next one begins with the first step that is incomplete, or was made from something else or with
other settings.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from switchx.fields import require
from switchx.whole_folders import damages, git_commit, new_folder, read_manifest, write_manifest

MANIFEST = "step.json"
LOG = "deploy.jsonl"
CHECKSUM = "sha256"
HEADER = {"format": "switchx deployment step", "format_version": 1}


@dataclasses.dataclass(frozen=True)
class FinishedStep:
    """A step's folder, complete.

    Attributes:
        manifest: content of `step.json`; with `measured`, JSON that the step returned.
        is_new: whether this process made it.
    """

    path: pathlib.Path
    manifest: dict[str, Any]
    is_new: bool

    @property
    def measured(self) -> dict[str, Any]:
        return self.manifest["measured"]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a deployment.

    Attributes:
        settings: JSON of everything that determines what it makes, except its input.
        make: function (steps before it by name, folder to write into) -> measurements, JSON.
    """

    name: str
    settings: dict[str, Any]
    make: Callable[[dict[str, FinishedStep], pathlib.Path], dict[str, Any]]


def run_steps(
    folder: str | os.PathLike,
    source: dict[str, Any],
    steps: list[Step],
    note: Callable[[str], None] = lambda text: None,
) -> list[FinishedStep]:
    """Makes the missing steps of a deployment, in order.

    Args:
        source: `model_dir` and `fingerprint` of the model, and further facts about it.
        note: function that is told what is kept and what is made.

    Returns:
        All steps' folders.

    Raises:
        ValueError: the folder is of another model, is not that of a deployment, cannot be
            written, or another process is working on it.
    """
    root = require_deployment(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{root} cannot be made ({error.strerror}: {error.filename}); give an --output "
            "that this user may write"
        ) from error
    with _locked(root):
        _require_same_model(root, source)
        for partial in root.glob(".*.partial"):  # left by a killed process
            shutil.rmtree(partial)
        made: dict[str, FinishedStep] = {}
        made_of = source["fingerprint"]
        for number, step in enumerate(steps, 1):
            path = root / f"{number}_{step.name}"
            if (manifest := _whole(path, made_of, step)) is not None:
                note(f"{path.name} is whole")
                made[step.name] = FinishedStep(path, manifest, is_new=False)
            else:
                _remove_from(root, number, steps)
                note(f"making {path}")
                manifest = _make(root, path, made_of, step, made)
                made[step.name] = FinishedStep(path, manifest, is_new=True)
            made_of = manifest[CHECKSUM]
        return list(made.values())


def steps_done_twice(folder: str | os.PathLike) -> int:
    """Number of complete steps that were made again, from the same and with the same settings.

    Steps that were removed in between, because a setting or a byte before them had changed, do
    not count.
    """
    twice, made = 0, {}
    for entry in _entries(pathlib.Path(folder).expanduser() / LOG):
        if entry.get("event") == "done":
            key = entry["made_of"], entry["settings"]
            twice += made.get(entry["step"]) == key
            made[entry["step"]] = key
        elif entry.get("event") == "removed":
            made.pop(entry["step"], None)
    return twice


def require_deployment(folder: str | os.PathLike) -> pathlib.Path:
    """The path for a deployment, where nothing, an empty folder or a deployment may be.

    Raises:
        ValueError: something else is there.
    """
    root = pathlib.Path(folder).expanduser().absolute()
    is_free = not root.exists() or (root.is_dir() and not any(root.iterdir()))
    require(
        is_free or (root / LOG).is_file(),
        f"{root} exists and holds no deployment; give an --output that does not exist, or "
        "one that `switchx deploy` began",
    )
    return root


@contextlib.contextmanager
def _locked(root: pathlib.Path) -> Iterator[None]:
    """Locks the deployment; the system frees the lock when the process ends."""
    with (root / LOG).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is making {root}; wait for it, end it, or give another "
                "--output"
            ) from None
        yield


def _require_same_model(root: pathlib.Path, source: dict[str, Any]) -> None:
    sources = [entry for entry in _entries(root / LOG) if entry.get("event") == "source"]
    if sources:
        last = sources[-1]
        is_same = any(last[name] == source[name] for name in ("model_dir", "fingerprint"))
        require(
            is_same,
            f"{root} holds the deployment of another model, {last['model_dir']}; give another "
            f"--output for {source['model_dir']}, or remove that folder",
        )
    if not sources or sources[-1]["fingerprint"] != source["fingerprint"]:
        _append(root, {"event": "source"} | source)


def _whole(path: pathlib.Path, made_of: str, step: Step) -> dict[str, Any] | None:
    """The manifest of a step's folder, or None if the step has to be made."""
    try:
        manifest = read_manifest(path, MANIFEST, CHECKSUM)
    except (ValueError, OSError):
        return None
    wanted = HEADER | {"step": step.name, "made_of": made_of, "settings": step.settings}
    if any(manifest.get(name) != value for name, value in wanted.items()):
        return None
    return None if any(damages(path, manifest["files"], CHECKSUM)) else manifest


def _remove_from(root: pathlib.Path, first: int, steps: list[Step]) -> None:
    """Removes a step's folder and all folders made from it, the last first."""
    for number, step in reversed(list(enumerate(steps, 1))):
        path = root / f"{number}_{step.name}"
        if number >= first and path.exists():
            _append(root, {"event": "removed", "step": step.name})
            shutil.rmtree(path)


def _make(
    root, path, made_of: str, step: Step, made: dict[str, FinishedStep]
) -> dict[str, Any]:
    started = time.monotonic()
    _append(root, {"event": "begun", "step": step.name})
    with new_folder(path) as partial:
        measured = step.make(made, partial)
        content = HEADER | {
            "step": step.name,
            "made_of": made_of,
            "settings": step.settings,
            "measured": measured | {"seconds": time.monotonic() - started},
            "switchx": git_commit(),
        }
        write_manifest(partial, MANIFEST, content, CHECKSUM)
    done = {"event": "done", "step": step.name, "made_of": made_of}
    _append(root, done | {"settings": json.dumps(step.settings, sort_keys=True)})
    return read_manifest(path, MANIFEST, CHECKSUM)


def _append(root: pathlib.Path, entry: dict[str, Any]) -> None:
    """Appends a line on disk; one that a killed process left half-written is ended first."""
    with (root / LOG).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _entries(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a log."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry
