# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by Orbax: asynchronous, atomic, the newest few and the best kept.

`checkpoints/<step>/` appears by one rename when all of it, the manifest last, is on disk.
What is not whole is skipped with a warning and never deleted. See docs/checkpoints.md.
"""

import shutil
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from switchx.training.checkpoint_items import (
    data_file,
    encode_data_state,
    from_items,
    read_data_states,
    read_items,
    to_items,
)
from switchx.training.damaged import (
    MIB,
    UNFINISHED,
    damaged_bytes,
    set_aside,
    set_aside_unfinished,
)
from switchx.training.manifest import find_damage, read_manifest, write_manifest
from switchx.training.restore import checkpoint_paths, choose_step, first_complete
from switchx.training.retention import Retention, numbers_of
from switchx.training.run_folder import RunFolder
from switchx.tree import Tree, num_bytes

_EXPIRED = "expired"  # a deletion that is cut short is finished at the next start


class SaveError(OSError):
    """A checkpoint could not be written; the complete ones before it are intact."""


class Checkpointer:
    """Saves and restores the training state; for the one trainer that holds the run's lock.

    Not for several threads. Where several processes train, all of them call each method.
    """

    def __init__(self, run: RunFolder, retention: Retention):
        """Opens `run.checkpoints` and sets aside what is not whole there.

        Only sizes are compared here; `latest_complete_step` and `restore` read every byte.
        """
        self._run = run
        self._folder = run.checkpoints
        self._retention = retention
        self._saving: tuple[int, float | None, dict[str, float]] = (0, None, {})
        self._whole: int | None = None  # the step whose bytes were all read last
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_expired()
            set_aside_unfinished(self._folder)
            for path in checkpoint_paths(self._folder):
                if damage := find_damage(path, checksums=False):
                    set_aside(path, damage)
        multihost_utils.sync_global_devices("switchx_checkpoints_opened")
        manifests = [read_manifest(path) for path in checkpoint_paths(self._folder)]
        self._scores = {each.step: each.score for each in manifests if each.score is not None}
        self._manager = self._open_manager()

    def _open_manager(self) -> ocp.CheckpointManager:
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        every_process = ocp.options.MultiprocessingOptions(primary_host=None)
        handler = ocp.handlers.JsonCheckpointHandler(
            data_file(), multiprocessing_options=every_process
        )
        registry.add("data", ocp.args.JsonSave, handler)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention.policy(self._scores),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._write_manifest
            ),
            todelete_subdir=_EXPIRED,
            lightweight_initialize=True,  # reads nothing that no manifest covers
        )
        return ocp.CheckpointManager(self._folder, options=options, handler_registry=registry)

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
        self._saving = (step, score, numbers_of(metrics))
        # NumPy leaves are copied: their owner may write to them while Orbax reads.
        items = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf),
            to_items(state),
        )
        self._require_space(num_bytes(items))
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

    def restore(self, abstract_state: Tree, step: int | None = None) -> tuple[Tree, list]:
        """The state, and the states of the data iterators of all processes that saved it.

        Args:
            abstract_state: the state's structure, of arrays or ShapeDtypeStructs whose
                shardings say where the leaves go (without one: the first device). The mesh
                need not be the one that saved it.
            step: None is the newest complete checkpoint.

        Raises:
            ValueError: there is no such complete checkpoint; leaves are missing, extra, or
                of another shape or dtype (lists all).
        """
        step = self.latest_complete_step() if step is None else step
        if step is None or step != self._whole:
            step = choose_step(self._run, step)
        path = self._folder / str(step)
        items = read_items(path, to_items(abstract_state))
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
        step, score, metrics = self._saving
        write_manifest(self._folder / f"{step}{UNFINISHED}", step, score, metrics)

    def _clear_the_way(self, step: int) -> None:
        """Sets a damaged checkpoint of this step aside, which Orbax would delete."""
        path = self._folder / str(step)
        if first_complete([path] if path.exists() else [], set_aside) is not None:
            raise ValueError(
                f"step {step} has a complete checkpoint, {path}; save another step, or move "
                "that checkpoint away first"
            )
        if jax.process_index() == 0:
            set_aside_unfinished(self._folder, step)
        multihost_utils.sync_global_devices("switchx_checkpoint_way_cleared")
        self._manager.reload()

    def _require_space(self, expected_bytes: int) -> None:
        if shutil.disk_usage(self._folder).free < expected_bytes + MIB:
            raise self._save_error(f"it needs about {expected_bytes / MIB:.1f} MiB")

    def _save_error(self, reason: str) -> SaveError:
        step = self._saving[0]
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

    def _remove_expired(self) -> None:
        shutil.rmtree(self._folder / _EXPIRED, ignore_errors=True)
