# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by Orbax: asynchronous, atomic, the newest few and the best kept.

`checkpoints/<step>/` appears by one rename when all of it, the manifest last, is on disk.
What is damaged or half-written is skipped with a warning and never deleted: the trainer that is
about to write moves it to `<step>.damaged-<n>`, since Orbax deletes what is in its way. See
docs/checkpoints.md.
"""

import dataclasses
import heapq
import logging
import math
import os
import pathlib
import shutil
from typing import Any, Literal, Protocol, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from switchx.checkpoint.items import (
    EXPERTS,
    Manifest,
    abstract,
    data_file,
    encode_data_state,
    find_damage,
    from_items,
    has_records,
    item_name,
    numbers_of,
    read_data_states,
    read_items,
    read_manifest,
    to_items,
    write_manifest,
)
from switchx.checkpoint.restore import (
    checkpoint_paths,
    choose_step,
    first_complete,
    restore_items,
)
from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import check_choices, require_at_least
from switchx.models.config import ModelConfig
from switchx.storage.record import StoreError
from switchx.tree import Tree, named_leaves, nested, num_bytes

logger = logging.getLogger(__name__)

UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX  # `<step>` + this, while it is being written
MIB = 1 << 20
_EXPIRED = "expired"  # a deletion that is cut short is finished at the next start


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.

    Attributes:
        keep_last: so many of the newest, at least 1.
        keep_best: so many of the best among those saved with an evaluation.
        best_metric, best_mode: the metric that is compared, and which end of it is best. A
            task's metric of generated texts is `TASK/METRIC`, as `glue_cola/matthews_corrcoef`.
    """

    keep_last: int = 3
    keep_best: int = 1
    best_metric: str = "neg_log_perplexity"
    best_mode: Literal["max", "min"] = "max"

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "keep_last")
        require_at_least(self, 0, "keep_best")

    def score(self, metrics: dict[str, Any] | None) -> float | None:
        """`best_metric`, signed so that higher is better.

        Returns:
            None without metrics, or when the metric is not finite.

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
        return value if self.best_mode == "max" else -value


@dataclasses.dataclass
class _Preservation:
    """A retention as Orbax asks for it; `scores` by step may grow."""

    retention: Retention
    scores: dict[int, float]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        del context
        steps = [info.step for info in checkpoints]
        scored = filter(self.scores.__contains__, steps)
        best = heapq.nlargest(self.retention.keep_best, scored, key=self.scores.get)
        kept = {*sorted(steps)[-self.retention.keep_last :], *best}
        return [step in kept for step in steps]


class SaveError(OSError):
    """A checkpoint could not be written; the complete ones before it are intact."""


class Experts(Protocol):
    """Experts that are not in the training state, but in storage.

    Attributes:
        abstract: what they are in a state that has them, by name, as ShapeDtypeStructs with
            shardings on the host.
    """

    abstract: dict[str, jax.ShapeDtypeStruct]

    def save(self, folder: pathlib.Path) -> None:
        """Keeps them as they are in a new folder, this process' part of them where there are
        several; raises StoreError where it cannot."""

    def restore(self, folder: pathlib.Path) -> None:
        """Takes those of `save`."""

    def fill(self, leaves: dict[str, jax.Array], updates: int) -> None:
        """Takes those of a state that has them, by name, after so many updates."""


class Checkpointer:
    """Saves and restores the training state; for the one trainer that holds the run's lock.

    Not for several threads. Where several processes train, all of them call each method.
    """

    def __init__(self, run: RunFolder, retention: Retention, experts: Experts | None = None):
        """Opens `run.checkpoints` and sets aside what is not whole there.

        Only sizes are compared here; `latest_complete_step` and `restore` read every byte.

        Args:
            experts: that are saved with a state and restored with it; None where all are in it.
        """
        self._run, self._folder, self._retention = run, run.checkpoints, retention
        self._experts = experts
        self._saving = Manifest(0, None, {})  # of the save that is under way
        self._whole: int | None = None  # the step whose bytes were all read last
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_expired()
            self._set_aside_unfinished("*")
            # Links to records, of saves that were cut short.
            for path in self._folder.glob(f".{EXPERTS}*"):
                shutil.rmtree(path)
            for path in checkpoint_paths(self._folder):
                if damage := find_damage(path, checksums=False):
                    set_aside(path, damage)
        multihost_utils.sync_global_devices("switchx_checkpoints_opened")
        manifests = [read_manifest(path) for path in checkpoint_paths(self._folder)]
        self._scores = {each.step: each.score for each in manifests if each.score is not None}
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        every_process = ocp.options.MultiprocessingOptions(primary_host=None)
        handler = ocp.handlers.JsonCheckpointHandler(
            data_file(), multiprocessing_options=every_process
        )
        registry.add("data", ocp.args.JsonSave, handler)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Preservation(self._retention, self._scores),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._write_manifest
            ),
            todelete_subdir=_EXPIRED,
            lightweight_initialize=True,  # reads nothing that no manifest covers
        )
        self._manager = ocp.CheckpointManager(
            self._folder, options=options, handler_registry=registry
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps with a checkpoint, the one being written among them, ascending."""
        return tuple(sorted(self._manager.all_steps()))

    def save(
        self,
        step: int,
        state: Tree,
        data_state: Any = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Copies the state to the host, and writes it in the background.

        The state may be donated as soon as this returns. Waits for the save before.

        Args:
            step: names the checkpoint.
            state: a pytree of arrays with an attribute or entry `params`.
            data_state: of this process' data iterator, bytes or anything that JSON takes.
            metrics: of an evaluation at this step, for keep-best.

        Raises:
            ValueError: this step has a complete checkpoint.
            SaveError: there is no space, or the save before failed.
        """
        self.wait()
        self._clear_the_way(step)
        score = self._retention.score(metrics)
        named = numbers_of(metrics or {}).items()
        finite = {name: value for name, value in named if math.isfinite(value)}
        self._saving = Manifest(step, score, finite)
        # NumPy leaves are copied: their owner may write to them while Orbax reads.
        items = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf),
            to_items(state),
        )
        expected = num_bytes(items)
        if shutil.disk_usage(self._folder).free < expected + MIB:
            raise self._save_error(f"it needs about {expected / MIB:.1f} MiB")
        if self._experts is not None:
            try:
                self._experts.save(self._saved_experts(step))
            except StoreError as error:
                raise self._save_error(error.strerror or str(error)) from error
            # Process 0 moves the parts of all into the checkpoint.
            multihost_utils.sync_global_devices("switchx_experts_saved")
        if score is not None:
            self._scores[step] = score
        arguments = {item: ocp.args.StandardSave(tree) for item, tree in items.items()}
        arguments["data"] = ocp.args.JsonSave(encode_data_state(data_state))
        try:
            self._manager.save(step, args=ocp.args.Composite(**arguments), force=True)
        except Exception as error:
            raise self._save_error(str(error)) from error

    def check(self) -> None:
        """Raises the error of a save that has failed; cheap, for every step."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when the checkpoint being written is complete on disk.

        Raises:
            SaveError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._save_error(str(error)) from error
        if jax.process_index() == 0:
            self._remove_expired()

    def latest_complete_step(self) -> int | None:
        """The newest checkpoint that is whole; damaged ones before it are set aside."""
        self._whole = first_complete(checkpoint_paths(self._folder), set_aside)
        self._manager.reload()
        return self._whole

    def restore(
        self, abstract_state: Tree, step: int | None = None, *, model: ModelConfig | None = None
    ) -> tuple[Tree, list]:
        """The state, and the states of the data iterators of all processes that saved it.

        Args:
            abstract_state: the state's structure, of arrays or ShapeDtypeStructs whose
                shardings say where the leaves go (without one: the first device). The mesh
                need not be the one that saved it.
            step: None is the newest complete checkpoint.
            model: whose state it is, where its layers may be scanned and the checkpoint's
                unrolled, or the other way round. None where they are the same.

        Raises:
            ValueError: there is no such complete checkpoint; leaves are missing, extra, or
                of another shape or dtype (lists all).
        """
        step = self.latest_complete_step() if step is None else step
        if step is None or step != self._whole:
            step = choose_step(self._run, step)
        path = self._folder / str(step)
        targets = named_leaves(jax.tree.map(abstract, to_items(abstract_state)))
        if self._experts is not None and has_records(path):
            self._experts.restore(path / EXPERTS)
            items = read_items(path, nested(targets))
        else:
            experts = {} if self._experts is None else self._experts.abstract
            of_items = {item_name(name): leaf for name, leaf in experts.items()}
            items = restore_items(path, nested(targets | of_items), model)
            if experts:
                leaves = named_leaves(items)
                updates = int(items["train_state"]["step"] - items["train_state"]["skipped"])
                self._experts.fill({n: leaves[item_name(n)] for n in experts}, updates)
        return from_items(items, abstract_state), read_data_states(path)

    def close(self) -> None:
        """Waits for the last save and ends Orbax' threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _write_manifest(self) -> None:
        """Called by Orbax' thread on process 0 when all is written and nothing renamed."""
        folder = self._folder / f"{self._saving.step}{UNFINISHED}"
        if self._experts is not None:
            self._saved_experts(self._saving.step).rename(folder / EXPERTS)
        write_manifest(folder, self._saving)

    def _saved_experts(self, step: int) -> pathlib.Path:
        """Where the snapshot of experts is until the rest of the checkpoint is written."""
        return self._folder / f".{EXPERTS}-{step}"

    def _clear_the_way(self, step: int) -> None:
        """Sets a damaged checkpoint of this step aside, which Orbax would delete."""
        path = self._folder / str(step)
        if first_complete([path] if path.exists() else [], set_aside) is not None:
            raise ValueError(
                f"step {step} has a complete checkpoint, {path}; save another step, or move "
                "that checkpoint away first"
            )
        if jax.process_index() == 0:
            self._set_aside_unfinished(str(step))
            shutil.rmtree(self._saved_experts(step), ignore_errors=True)
        multihost_utils.sync_global_devices("switchx_checkpoint_way_cleared")
        self._manager.reload()

    def _save_error(self, reason: str) -> SaveError:
        step = self._saving.step
        self._scores.pop(step, None)
        reason = " ".join(reason.split()).replace(f"{self._folder}/", "")
        complete = [path.name for path in reversed(checkpoint_paths(self._folder))]
        free_mib = shutil.disk_usage(self._folder).free / MIB
        damaged_mib = damaged_bytes(self._folder) / MIB
        return SaveError(
            f"checkpoint {step} could not be written to {self._folder}: {reason[-400:]}; the "
            f"disk has {free_mib:.1f} MiB free. Intact: {', '.join(complete) or 'none'}. Make "
            f"room or mend the disk ({damaged_mib:.1f} MiB are in *.damaged-* there), then run "
            "the same command to resume"
        )

    def _set_aside_unfinished(self, steps: str) -> None:
        """Renames what saves that were cut short left behind."""
        for path in sorted(self._folder.glob(f"{steps}{UNFINISHED}")):
            set_aside(path, "its save did not finish")

    def _remove_expired(self) -> None:
        shutil.rmtree(self._folder / _EXPIRED, ignore_errors=True)


def set_aside(path: pathlib.Path, damage: str) -> None:
    """Renames one checkpoint; `damage` says why, for the warning."""
    stem, number = path.name.removesuffix(UNFINISHED), 1
    while (target := path.with_name(f"{stem}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
    logger.warning(
        "checkpoint %s is skipped: %s. It is kept as %s; all %s take %.1f MiB and are yours to "
        "delete",
        path,
        damage,
        target.name,
        path.with_name("*.damaged-*"),
        damaged_bytes(path.parent) / MIB,
    )


def damaged_bytes(checkpoints: pathlib.Path) -> int:
    """Bytes of everything that was set aside."""
    return sum(os.lstat(path).st_size for path in checkpoints.glob("*.damaged-*/**/*"))
