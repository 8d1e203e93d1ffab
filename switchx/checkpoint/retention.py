# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are kept, what happens to the others, and what saves may and do cost."""

import contextlib
import dataclasses
import heapq
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from switchx.checkpoint.manifest import MANIFEST, numbers_of, read_manifest
from switchx.checkpoint.parts import ChecksummedArrays
from switchx.checkpoint.restore import checkpoint_paths, choose_step
from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import check_choices, require, require_above_zero, require_at_least
from switchx.files import write_atomically
from switchx.object_store import Folder, is_address, remove

logger = logging.getLogger(__name__)

UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX  # `<step>` + this, while it is being written
# `<step>` + these, once set aside: saved but not whole; left by a save that was cut short.
DAMAGED, _CUT_SHORT = "*.damaged-*", "*.unfinished-*"
SET_ASIDE = f"{DAMAGED} and {_CUT_SHORT}"
MIB = 1 << 20
COSTS = ("cross_entropy", "dropped_fraction")  # metrics of evaluations whose smallest is best


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.

    Attributes:
        keep_last: number of newest checkpoints that are kept, at least 1.
        keep_best: number of best checkpoints that are kept, of those saved with an evaluation.
        keep_period: checkpoints whose step is a multiple of this are kept for good; None keeps
            none of them.
        best_metric: the metric that is compared. A task's metric of generated texts is
            `TASK/METRIC`, such as `glue_cola/matthews_corrcoef`.
        best_mode: whether the smallest or the largest value is best; None takes the smallest
            for cross-entropies and shares of dropped tokens, the largest for all others.
        local_dir: folder on a disk of each machine for copies of the state, from which a run
            resumes where they are newer than its checkpoints (local_copies.py); None for none.
        local_every: steps between two copies.
        grace_s: seconds from SIGTERM or Ctrl-C until the system kills the process: Slurm's
            `KillWait`, Kubernetes' `terminationGracePeriodSeconds`, 30 on a Google Cloud spot
            machine. A save that would take longer, judging by earlier ones, is not begun.
            None begins every save.
        save_deadline_s: seconds that writing one checkpoint may take before it is an error.
            A day means 73 MB/s for the 6.3 TB of a state of 1.6 trillion parameters
            (Switch-C), however many processes write. The loss of a process is noticed
            without this deadline.
    """

    keep_last: int = 3
    keep_best: int = 1
    keep_period: int | None = None
    best_metric: str = "neg_log_perplexity"
    best_mode: Literal["max", "min", None] = None
    local_dir: str | None = None
    local_every: int = 100
    grace_s: float | None = None
    save_deadline_s: int = 24 * 3600

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "keep_last", "keep_period")
        require_at_least(self, 0, "keep_best")
        require_at_least(self, 1, "local_every", "save_deadline_s")
        require_above_zero(self, "grace_s")

    def score(self, metrics: dict[str, Any] | None) -> float | None:
        """`best_metric`, signed so that higher is better.

        Returns:
            The score; None without metrics, or when the metric is not finite.

        Raises:
            ValueError: there are metrics, but not this one.
        """
        if metrics is None:
            return None
        named = numbers_of(metrics)
        if self.best_metric not in named:
            raise ValueError(
                f"Retention.best_metric={self.best_metric!r} is not among the metrics "
                f"{', '.join(named)}; use one of them"
            )
        value = named[self.best_metric]
        if not math.isfinite(value):
            return None
        return value if self.mode == "max" else -value

    @property
    def mode(self) -> str:
        """`best_mode`, or its default for the metric."""
        is_cost = self.best_metric.rpartition("/")[2] in COSTS
        return self.best_mode or ("min" if is_cost else "max")


@dataclasses.dataclass
class Preservation:
    """A retention in the form that Orbax asks for; `scores`, by step, may grow."""

    retention: Retention
    scores: dict[int, float]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Returns for each checkpoint whether it is kept, in Orbax' form."""
        del context
        kept = self.kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]

    def kept(self, steps: Sequence[int]) -> set[int]:
        """The steps among these whose checkpoints are kept."""
        scored = filter(self.scores.__contains__, steps)
        best = heapq.nlargest(self.retention.keep_best, scored, key=self.scores.get)
        kept = {*sorted(steps)[-self.retention.keep_last :], *best}
        period = self.retention.keep_period
        if period is not None:
            kept |= {step for step in steps if step % period == 0}
        return kept


@dataclasses.dataclass(frozen=True)
class SaveCost:
    """The cost of a finished save.

    Attributes:
        step: step of the checkpoint.
        blocking_seconds, seconds: seconds until `save` returned, and until `check` or `wait`
            found all files on the disk and renamed.
        bytes: bytes of all files of the checkpoint, including experts' records.
        process_hashed_bytes, process_written_bytes: bytes of arrays whose checksum this process
            computed, and of the files that it wrote for them.
    """

    step: int
    blocking_seconds: float
    seconds: float
    bytes: int
    process_hashed_bytes: int
    process_written_bytes: int

    def __str__(self) -> str:
        return (
            f"saved step {self.step}: {self.bytes / MIB:,.1f} MiB in {self.seconds:.1f} s, of "
            f"which training waited {self.blocking_seconds:.1f} s"
        )


class SaveMeter:
    """Measures the cost of saves; keeps the last save's seconds for processes that resume.

    Attributes:
        last: cost of the last save that finished here, to be logged.
    """

    def __init__(self, path: pathlib.Path, arrays: ChecksummedArrays):
        """Reads the file.

        Args:
            path: path of the file.
            arrays: the handler that counts bytes.
        """
        self._path, self._arrays = path, arrays
        self.last: SaveCost | None = None
        self._begun: tuple[float, int, int] | None = None  # time, and bytes up to then
        self._blocking_seconds = 0.0
        try:
            self._longest_seconds = float(json.loads(path.read_text())["seconds"])
        except (OSError, ValueError, TypeError, KeyError):
            self._longest_seconds = None  # the run has saved nothing, or its file is cut short

    def begin(self) -> None:
        """Notes that a save begins."""
        arrays = self._arrays
        self._begun = time.monotonic(), arrays.hashed_bytes, arrays.written_bytes

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Notes that a save begins; after the context, training goes on beside the writing."""
        self.begin()
        try:
            yield
        except BaseException:  # including a second Ctrl-C
            self.failed()
            raise
        self._blocking_seconds = time.monotonic() - self._begun[0]

    def failed(self) -> None:
        """Notes that the save that was begun, if any, will not finish."""
        self._begun = None

    def finished(self, path: Folder) -> None:
        """Notes that the checkpoint that was begun, if any, is whole; process 0 measures it."""
        if self._begun is None:
            return
        (begun, hashed, written), self._begun = self._begun, None
        if jax.process_index() > 0:
            return  # on a network file system, may not see the new name yet
        self.last = SaveCost(
            int(path.name),
            self._blocking_seconds,
            time.monotonic() - begun,
            sum(size for size, _ in read_manifest(path).files.values()),
            self._arrays.hashed_bytes - hashed,
            self._arrays.written_bytes - written,
        )
        self._longest_seconds = max(self._longest_seconds or 0.0, self.last.seconds)
        write_atomically(self._path, json.dumps(dataclasses.asdict(self.last)).encode())
        logger.info("%s", self.last)

    def seconds_to_save(self) -> float | None:
        """Estimated seconds until another save would finish, after the one in progress.

        Each save is taken to last as long as the longest measured one; None if none was.
        """
        longest = self._longest_seconds
        if longest is None or self._begun is None:
            return longest
        return longest + max(0.0, longest - (time.monotonic() - self._begun[0]))


def set_aside(path: Folder, damage: str) -> None:
    """Renames a checkpoint; `damage` says why, for the warning.

    The new name says whether its save had finished: `<step>.damaged-<n>`, or
    `<step>.unfinished-<n>`. A store cannot rename: there, what was left by a save that was cut
    short is deleted.

    Raises:
        ValueError: the checkpoint is in a store, and has a manifest.
    """
    if is_address(path):
        if (path / MANIFEST).exists():
            raise ValueError(
                f"checkpoint {path} is not whole: {damage}. A store cannot rename it: move it "
                "away or delete it, then run the same command to go on from an older one, or "
                "from step 0 where there is none"
            )
        logger.warning("checkpoint %s is deleted: its save did not finish", path)
        remove(path, MANIFEST)
        return
    name = _renamed(path, "unfinished" if path.name.endswith(UNFINISHED) else "damaged")
    logger.warning(
        "checkpoint %s is skipped: %s. It is kept as %s; %s there take %.1f MiB and are yours "
        "to delete",
        path,
        damage,
        name,
        SET_ASIDE,
        damaged_bytes(path.parent) / MIB,
    )


def require_none_damaged(checkpoints: Folder) -> None:
    """Checks, where no checkpoint is left, that there was none: only then may a run begin.

    Raises:
        ValueError: a saved checkpoint was set aside.
    """
    is_first = jax.process_index() == 0  # other processes may not see the new names yet
    # A manifest is written last: without one, as earlier versions name some, none was saved.
    damaged = np.bool_(
        is_first and any((path / MANIFEST).exists() for path in checkpoints.glob(DAMAGED))
    )
    require(
        not multihost_utils.broadcast_one_to_all(damaged),
        f"no checkpoint in {checkpoints} is what was saved; all are kept as {DAMAGED}. Give "
        "another model_dir to begin again; where those are moved away, training begins again "
        "in this one and its logs are lost",
    )


def rewind(run: RunFolder, step: int | Literal["best"]) -> tuple[int, list[str]]:
    """Makes a checkpoint the newest one, so that training goes on from it.

    Later checkpoints are renamed to `<step>.superseded-<n>`, so that the same training command,
    started again and again, goes back only once.

    Returns:
        The checkpoint's step, and the new names of the later ones.

    Raises:
        ValueError: there is no such complete checkpoint; a trainer holds the folder; it is in
            a store.
    """
    require(
        not run.is_in_store,
        f"{run.where} is in a store, which cannot rename the checkpoints after step {step}; "
        "delete them, or train another folder with INIT_FROM and INIT_STEP",
    )
    chosen = choose_step(run, step)
    with run.locked():
        run.identity.unlink(missing_ok=True)  # local copies are of the training being undone
        later = [path for path in checkpoint_paths(run.checkpoints) if int(path.name) > chosen]
        # Newest first: a call that is cut short leaves a run that can go on.
        return chosen, [_renamed(path, "superseded") for path in later]


def _renamed(path: Folder, reason: str) -> str:
    stem, number = path.name.removesuffix(UNFINISHED), 1
    while (target := path.with_name(f"{stem}.{reason}-{number}")).exists():
        number += 1
    path.rename(target)
    return target.name


def damaged_bytes(checkpoints: Folder) -> int:
    """Bytes of everything that was set aside."""
    if is_address(checkpoints):
        return 0
    return sum(
        os.lstat(path).st_size
        for pattern in (DAMAGED, _CUT_SHORT)
        for path in checkpoints.glob(f"{pattern}/**/*")
    )
