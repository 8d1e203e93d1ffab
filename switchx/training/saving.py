# SPDX-License-Identifier: Apache-2.0
"""Saving of a run's state: when, where, and how much of it after a signal.

A run resumes from the newest state: a copy on the machines' disks (checkpoint/local_copies.py)
or a checkpoint in its folder. A preempted machine gets SIGTERM and is killed after a grace
period: a save that would not be done by then is not begun. It would cost the grace period and
leave nothing.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from switchx.checkpoint.checkpointer import Checkpointer
from switchx.checkpoint.local_copies import LocalCopies, renew_identity
from switchx.checkpoint.parts import DamagedCheckpoint
from switchx.checkpoint.retention import Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.models.config import ModelConfig
from switchx.training.step import TrainState
from switchx.training.stopping import StopRequest
from switchx.tree import Tree

logger = logging.getLogger(__name__)

# Step, state, and what the data iterators of all processes had read.
Resumed = tuple[int, TrainState, list]


class Saving:
    """The saves of one run. If several processes train, all of them call each method."""

    def __init__(
        self,
        run: RunFolder,
        retention: Retention,
        checkpointer: Checkpointer,
        stop: StopRequest,
        note: Callable[[str], None],
        is_new: bool,
    ):
        """Opens the folder of local copies, if there are to be any.

        Args:
            note: function that is called with sentences for the user.
            is_new: whether the run has no checkpoint. Copies of an earlier attempt, which may
                have had another configuration, are then forgotten.

        Raises:
            ValueError: that folder cannot be written to.
        """
        self._run, self._retention, self._note = run, retention, note
        self._checkpointer, self._stop = checkpointer, stop
        directory = retention.local_dir
        if is_new:
            renew_identity(run)
        self._copies = None if directory is None else LocalCopies(directory, run)
        if is_new and self._copies is not None:
            self._copies.forget(lambda step: True)

    def resume(self, abstract_state: Tree, model: ModelConfig) -> Resumed:
        """Step, state and data iterators of the newest copy or checkpoint.

        Raises:
            ValueError: none is left, or the checkpoint does not fit.
        """
        newest = self._checkpointer.latest_complete_step()
        found = None if self._copies is None else self._resume_copy(abstract_state, newest)
        if found is None:
            checkpoints = self._run.checkpoints
            logger.info("reading %s", checkpoints / str(newest))
            found = self._checkpointer.resume(abstract_state, model=model)
            self._note(f"resumed from step {found[0]} in {checkpoints / str(found[0])}")
        if self._copies is not None:
            self._copies.forget(lambda step: step > found[0])  # these steps are taken again
        return found

    def _resume_copy(
        self, like: Tree, newest: int | None
    ) -> tuple[int, TrainState, list] | None:
        while (step := self._copies.newest(like)) is not None and step > (newest or 0):
            try:
                found = step, *self._copies.restore(step, like)
            except DamagedCheckpoint as error:
                logger.warning("local copy of step %d is deleted: %s", step, error.fault)
                self._copies.forget(lambda each, step=step: each == step)
                continue
            self._note(f"resumed from step {step} in the copies of {self._retention.local_dir}")
            return found
        return None

    def save(self, step: int, state: TrainState, data_state: Any, metrics: dict | None) -> None:
        """Begins a checkpoint in the run folder; see `Checkpointer.save`."""
        logger.info("saving step %d", step)
        if jax.process_index() == 0:
            self._run.require_owned()  # before another's logs are overwritten
            self._run.put()  # logs until here
        self._checkpointer.save(step, state, data_state, metrics)

    def is_copied(self, step: int) -> bool:
        """Whether a local copy is due."""
        return self._copies is not None and step % self._retention.local_every == 0

    def copy(self, step: int, state: TrainState, data_state: Any) -> None:
        """Begins a local copy."""
        self._copies.save(step, state, data_state)

    def save_at_the_end(
        self, step: int, state: TrainState, data_state: Any, metrics: dict | None
    ) -> bool:
        """Saves an unsaved state if a signal's grace period suffices; returns whether it did.

        It is assumed to suffice if no save has been measured. Otherwise a local copy is made,
        if copies are kept.
        """
        left = self._seconds_left()
        needed = self._checkpointer.meter.seconds_to_save()
        # Process 0 measures saves, and any process may have got the signal first.
        own = np.float32(
            [np.inf if left is None else left, -np.inf if needed is None else needed]
        )
        of_all = multihost_utils.process_allgather(own).reshape(-1, 2)
        left, needed = float(of_all[:, 0].min()), float(of_all[0, 1])
        if needed <= left:
            self.save(step, state, data_state, metrics)
            return True
        text = (
            f"step {step} is not saved: a save takes {needed:.0f} s, and {max(left, 0):.0f} s "
            f"of Retention.grace_s={self._retention.grace_s} are left"
        )
        if self._copies is None:
            self._note(f"{text}. Save more often, or keep copies with Retention.local_dir")
        else:
            self._note(f"{text}; copied to {self._retention.local_dir}")
            self._copies.save(step, state, data_state)
        return False

    def _seconds_left(self) -> float | None:
        since, grace = self._stop.seconds, self._retention.grace_s
        return None if since is None or grace is None else grace - since

    def wait(self) -> None:
        """Returns when all saves that were begun are on the disk.

        Raises:
            SaveError: a checkpoint could not be written.
        """
        if self._copies is not None:
            self._copies.wait()
        self._checkpointer.wait()

    def close(self) -> None:
        """Waits for the last local copy."""
        if self._copies is not None:
            self._copies.close()
