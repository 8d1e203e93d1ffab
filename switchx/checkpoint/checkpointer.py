# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with Orbax: asynchronous and atomic, keeping the newest few and the best.

`checkpoints/<step>/` appears by one rename when all of it, the manifest last, is on disk.
A damaged or half-written one is skipped with a warning, never deleted: the trainer renames it
before it writes (`set_aside`), as Orbax deletes anything in its way. See docs/checkpoints.md.
"""

import contextlib
import math
import pathlib
import shutil
import time
from typing import Any, Protocol, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from switchx.checkpoint.adapter_run import AdapterRecord
from switchx.checkpoint.items import (
    RECORDS,
    abstract,
    data_file,
    encode_data_state,
    from_items,
    has_records,
    item_name,
    num_updates,
    read_data_states,
    read_items,
    require_records_unchanged,
    to_items,
)
from switchx.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    find_damage,
    numbers_of,
    read_manifest,
    scores_by,
    write_manifest,
)
from switchx.checkpoint.parts import ChecksummedArrays, DamagedCheckpoint, SaveArrays
from switchx.checkpoint.restore import (
    checkpoint_paths,
    choose_step,
    first_complete,
    restore_items,
)
from switchx.checkpoint.retention import (
    MIB,
    SET_ASIDE,
    UNFINISHED,
    Preservation,
    Retention,
    SaveMeter,
    damaged_bytes,
    require_none_damaged,
    set_aside,
)
from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.object_store import Folder, free_bytes, remove
from switchx.tree import Tree, named_leaves, nested, num_bytes

_EXPIRED = "expired"  # a deletion that was cut short is finished at the next start


class SaveError(OSError):
    """A checkpoint could not be written; the complete ones before it are intact."""


class Experts(Protocol):
    """Experts that are kept in storage, not in the training state.

    Attributes:
        abstract: leaves of the experts in a state that has them, by name, as ShapeDtypeStructs
            with shardings on the host.
    """

    abstract: dict[str, jax.ShapeDtypeStruct]

    def save(self, folder: pathlib.Path) -> None:
        """Saves the experts as they are in a new folder; of several processes, each saves its
        part. Raises StoreError or RecordError where it cannot."""

    def restore(self, folder: pathlib.Path) -> None:
        """Takes the experts that `save` saved."""

    def fill(self, leaves: dict[str, jax.Array], updates: int) -> None:
        """Takes the experts of a state that has them, by name, after `updates` updates."""


class Checkpointer:
    """Saves and restores the training state, for the one trainer that holds the run's lock.

    It is not thread-safe. Where several processes train, all of them call each method.
    """

    def __init__(self, run: RunFolder, retention: Retention, experts: Experts | None = None):
        """Opens `run.checkpoints` and sets incomplete checkpoints aside.

        Names and sizes are compared here and in `latest_complete_step`, values in `restore`.

        Args:
            experts: experts that are saved and restored along with the state; None where the
                state has all experts.
        """
        require(
            experts is None or not run.is_in_store,
            f"model_dir={str(run.path)!r} is in a store, where records of experts cannot be "
            "linked; give a folder, or use StorageSpec.experts='device' or 'host'",
        )
        self._run, self._folder, self._retention = run, run.checkpoints, retention
        self._experts = experts
        self._saving = Manifest(0, None, {})  # of the save in progress
        self._is_saving = False  # a save was begun whose end `wait` has not seen
        self._is_alone = False  # one of several processes, it could not write its part
        self._fault: Exception | None = None  # of what Orbax' thread did here after writing
        if jax.process_index() == 0:
            if not run.is_in_store:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._set_aside_unfinished("*")
            # Links to records left behind by saves that were cut short.
            for pattern in (f".{RECORDS}*", f"..{RECORDS}-*.partial"):  # of `new_folder`
                for path in self._folder.glob(pattern):
                    shutil.rmtree(path)
            for path in checkpoint_paths(self._folder):
                if damage := find_damage(path):
                    set_aside(path, damage)
        multihost_utils.sync_global_devices("switchx_checkpoints_opened")
        manifests = map(read_manifest, checkpoint_paths(self._folder))
        # By this retention's metric, whichever one they were saved with.
        self._scores = scores_by(retention.best_metric, retention.mode, manifests)
        self._preservation = Preservation(self._retention, self._scores)
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        every_process = ocp.options.MultiprocessingOptions(primary_host=None)
        handler = ocp.handlers.JsonCheckpointHandler(
            data_file(), multiprocessing_options=every_process
        )
        registry.add("data", ocp.args.JsonSave, handler)
        self._arrays = ChecksummedArrays()
        self.meter = SaveMeter(run.last_save, self._arrays)
        for item in ("params", "train_state", "average"):
            registry.add(item, SaveArrays, self._arrays)
        options = ocp.CheckpointManagerOptions(
            async_options=ocp.options.AsyncOptions(
                timeout_secs=retention.save_deadline_s,
                post_finalization_callback=self._write_manifest,
            ),
            lightweight_initialize=True,  # reads nothing that is not covered by a manifest
        )
        if run.is_in_store:  # no renames: written in place, deleted by `_remove_expired`
            mode = ocp.options.AtomicityMode.COMMIT_FILE
            options.atomicity_options = ocp.options.AtomicityOptions(mode=mode)
        else:
            options.preservation_policy = self._preservation
            options.todelete_subdir = _EXPIRED
        self._manager = ocp.CheckpointManager(
            self._folder, options=options, handler_registry=registry
        )
        if jax.process_index() == 0:
            self._remove_expired()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that have a checkpoint, including the one being written, in ascending order."""
        steps = set(self._manager.all_steps())
        if self._run.is_in_store:  # also whole if killed before Orbax' last file
            steps |= {int(path.name) for path in self._whole()}
        return tuple(sorted(steps))

    def _whole(self) -> list[Folder]:
        """The checkpoints that have a manifest, newest first."""
        return [path for path in checkpoint_paths(self._folder) if (path / MANIFEST).exists()]

    def save(
        self,
        step: int,
        state: Tree,
        data_state: Any = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        """Copies the state to the host, and writes it in the background.

        The state may be donated as soon as this returns. It waits for the previous save.

        Args:
            step: step that names the checkpoint.
            state: a pytree of arrays with an attribute or entry `params`.
            data_state: state of this process' data iterator, bytes or anything that JSON takes.
            metrics: metrics of an evaluation at this step, for keep-best.

        Raises:
            ValueError: this step already has a complete checkpoint.
            SaveError: there is no space, or the previous save failed.
        """
        self.wait()
        self._clear_the_way(step)
        score = self._retention.score(metrics)
        named = numbers_of(metrics or {}).items()
        finite = {name: value for name, value in named if math.isfinite(value)}
        retention = self._retention
        best_by = {"metric": retention.best_metric, "mode": retention.mode}
        self._saving = Manifest(step, score, finite, **best_by if score is not None else {})
        with self.meter.beginning():
            # NumPy leaves are copied: their owner may write to them while Orbax reads them.
            items = jax.tree.map(
                lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf),
                to_items(state),
            )
            expected = num_bytes(items) + MIB  # for the files that describe them
            if free_bytes(self._folder) < expected:
                raise self._save_error(f"it needs about {expected / MIB:.1f} MiB")
            if self._experts is not None:
                try:
                    self._experts.save(self._saved_experts(step))
                except (OSError, ValueError) as error:  # no space, or a damaged record
                    reason = getattr(error, "strerror", None) or str(error)
                    raise self._save_error(reason) from error
                # Process 0 moves all processes' parts into the checkpoint.
                multihost_utils.sync_global_devices("switchx_experts_saved")
            if score is not None:
                self._scores[step] = score
            arguments = {item: SaveArrays(tree) for item, tree in items.items()}
            arguments["data"] = ocp.args.JsonSave(encode_data_state(data_state))
            self._is_saving, self._fault = True, None
            try:
                self._manager.save(step, args=ocp.args.Composite(**arguments), force=True)
            except Exception as error:
                raise self._save_error(str(error)) from error

    def check(self) -> None:
        """Raises the error of a save that has failed; cheap enough to call every step."""
        if not self._is_saving:
            return  # `wait` lists the checkpoints, in a store over the network
        if self._arrays.has_failed() or self._fault or not self._is_writing():
            self.wait()

    def wait(self) -> None:
        """Returns when the checkpoint being written is complete on disk.

        Raises:
            SaveError: the checkpoint could not be written.
        """
        try:
            self._arrays.wait(self._retention.save_deadline_s)
        except Exception as error:
            self._is_alone = jax.process_count() > 1
            if not self._is_alone:
                with contextlib.suppress(Exception):  # the same error again
                    self._manager.wait_until_finished()
            raise self._save_error(str(error)) from error
        while self._is_writing() and self._fault is None:
            time.sleep(0.01)
        if self._fault is not None and jax.process_count() > 1:
            self._is_alone = True  # Orbax waits for the others, and they wait for this one
            raise self._save_error(str(self._fault)) from self._fault
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._save_error(str(error)) from error
        if jax.process_index() == 0:
            self._remove_expired()
        self._is_saving = False
        self.meter.finished(self._folder / str(self._saving.step))

    def _is_writing(self) -> bool:
        """Whether Orbax' thread runs; its own flag stays set if the thread never began."""
        thread = self._manager._finalize_thread
        return thread.map(lambda each: each is not None and each.is_alive())

    def latest_complete_step(self) -> int | None:
        """Step of the newest checkpoint whose files exist; None if no save has finished yet.

        Newer ones that are not whole are set aside.

        Raises:
            ValueError: there were checkpoints, but none is left.
        """
        step = first_complete(checkpoint_paths(self._folder), set_aside)
        self._manager.reload()
        if step is None:
            require_none_damaged(self._folder)
        return step

    def resume(
        self, abstract_state: Tree, *, model: ModelConfig | None = None
    ) -> tuple[int, Tree, list]:
        """Restores the step, state and data iterators of the newest undamaged checkpoint.

        Checkpoints that turn out to be damaged while they are read are set aside.

        Args:
            abstract_state, model: see `restore`.

        Raises:
            ValueError: there is no checkpoint, none is left, or one does not fit.
        """
        while True:
            step = choose_step(self._run, self.latest_complete_step())
            try:
                return step, *self.restore(abstract_state, step, model=model)
            except DamagedCheckpoint as error:
                if jax.process_index() == 0:
                    set_aside(self._folder / str(step), error.fault)
                multihost_utils.sync_global_devices("switchx_checkpoint_set_aside")

    def restore(
        self, abstract_state: Tree, step: int | None = None, *, model: ModelConfig | None = None
    ) -> tuple[Tree, list]:
        """Restores the state, and the data iterators' states of all processes that saved it.

        Args:
            abstract_state: the state's structure, of arrays or ShapeDtypeStructs whose
                shardings say where the leaves go (without one: the first device). The mesh
                need not be the one that saved it.
            step: step of the checkpoint; None is the newest complete one.
            model: configuration of the state's model, where its layers may be scanned and the
                checkpoint's unrolled, or vice versa; None where the layouts are the same.

        Raises:
            ValueError: there is no such complete checkpoint; leaves are missing, extra, or
                of another shape or dtype (the message lists them all).
            DamagedCheckpoint: the arrays that were read differ from those that were saved.
        """
        step = self.latest_complete_step() if step is None else step
        path = self._folder / str(choose_step(self._run, step))
        targets = named_leaves(jax.tree.map(abstract, to_items(abstract_state)))
        if self._experts is not None and has_records(path):
            require_records_unchanged(path)
            self._experts.restore(path / RECORDS)
            items = read_items(path, nested(targets))
        else:
            experts = {} if self._experts is None else self._experts.abstract
            of_items = {item_name(name): leaf for name, leaf in experts.items()}
            spec = getattr(AdapterRecord.read(self._run), "spec", None)
            items = restore_items(path, nested(targets | of_items), model, spec)
            if experts:
                leaves, updates = named_leaves(items), num_updates(items["train_state"])
                self._experts.fill({n: leaves[item_name(n)] for n in experts}, updates)
        return from_items(items, abstract_state), read_data_states(path)

    def close(self) -> None:
        """Waits for the last save and ends Orbax' threads."""
        if self._is_alone:
            return  # its threads wait for processes that wait for this one, which must end
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _write_manifest(self) -> None:
        """Called by Orbax' thread on process 0 when all is written and nothing yet renamed."""
        try:
            self._run.require_owned()
            suffix = "" if self._run.is_in_store else UNFINISHED
            folder = self._folder / f"{self._saving.step}{suffix}"
            if self._experts is not None:
                self._saved_experts(self._saving.step).rename(folder / RECORDS)
            write_manifest(folder, self._saving)
        except Exception as error:
            self._fault = error
            raise

    def _saved_experts(self, step: int) -> Folder:
        """Folder of the experts' snapshot until the rest of the checkpoint is written."""
        return self._folder / f".{RECORDS}-{step}"

    def _clear_the_way(self, step: int) -> None:
        """Sets aside a damaged checkpoint of this step, which Orbax would delete."""
        path = self._folder / str(step)
        if first_complete([path] if path.exists() else [], set_aside) is not None:
            raise ValueError(
                f"step {step} has a complete checkpoint, {path}; save another step, or move "
                "that checkpoint away first"
            )
        if jax.process_index() == 0:
            self._run.require_owned()
            self._set_aside_unfinished(str(step))
            shutil.rmtree(self._saved_experts(step), ignore_errors=True)
        multihost_utils.sync_global_devices("switchx_checkpoint_way_cleared")
        self._manager.reload()

    def _save_error(self, reason: str) -> SaveError:
        step = self._saving.step
        self._scores.pop(step, None)
        self.meter.failed()
        if "imed out" in reason or not reason:
            deadline = self._retention.save_deadline_s
            reason += f" (Retention.save_deadline_s={deadline}; a larger one waits longer)"
        reason = " ".join(reason.split()).replace(f"{self._folder}/", "")
        complete = [path.name for path in reversed(self._whole())]
        what = f"checkpoint {step} could not be written to {self._folder}: {reason[-400:]}"
        intact = f"Intact: {', '.join(complete) or 'none'}"
        if self._run.is_in_store:
            return SaveError(f"{what}. {intact}. Run the same command to resume")
        free_mib = free_bytes(self._folder) / MIB
        damaged_mib = damaged_bytes(self._folder) / MIB
        return SaveError(
            f"{what}; the disk has {free_mib:.1f} MiB free. {intact}. Make room or mend the "
            f"disk ({damaged_mib:.1f} MiB are in {SET_ASIDE} there), then run the same command "
            "to resume"
        )

    def _set_aside_unfinished(self, steps: str) -> None:
        """Renames what was left behind by saves that were cut short."""
        for path in sorted(self._folder.glob(f"{steps}{UNFINISHED}")):
            set_aside(path, "its save did not finish")

    def _remove_expired(self) -> None:
        if not self._run.is_in_store:
            shutil.rmtree(self._folder / _EXPIRED, ignore_errors=True)
            return
        try:
            self._run.require_owned()
        except ValueError:
            return  # another trainer's, whose scores decide which are the best
        steps = [int(path.name) for path in self._whole()]
        for step in set(steps) - self._preservation.kept(steps):
            remove(self._folder / str(step), MANIFEST)
        self._manager.reload()
