# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a state whose experts are records: both of one step, whenever it is killed."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.items import RECORDS
from switchx.checkpoint.run_folder import RunFolder
from switchx.storage.record import ArrayType, Record, RecordError, StoreError, StoreLayout
from switchx.storage.store import RecordStore
from switchx.tree import nested
from tests.processes import ROOT
from tests.training.train_states import assert_same, filled_state, shapes

NAME = "params/decoder/blocks/layer_1/ffn/experts/w_in_EDF"
LAYOUT = StoreLayout({"decoder 1": {NAME: ArrayType((64, 64), "float32")}}, num_experts=6)
KEEP = Retention(keep_last=2, keep_best=0)


class Stored:
    """Experts all of whose numbers are the step."""

    abstract = {NAME: jax.ShapeDtypeStruct((LAYOUT.num_experts, 64, 64), np.float32)}

    def __init__(self, folder: pathlib.Path):
        self.store = RecordStore(folder, LAYOUT)
        self.step = None

    def train(self, step: int) -> None:
        for key in range(LAYOUT.num_keys):
            self.store.write(key, Record({NAME: np.full((64, 64), step, np.float32)}, step))

    def save(self, folder: pathlib.Path) -> None:
        self.store.snapshot(folder)

    def restore(self, folder: pathlib.Path) -> None:
        self.store.restore(folder)
        records = [self.store.read(key).result() for key in range(LAYOUT.num_keys)]
        (self.step,) = {each.updates for each in records}
        assert all(np.all(each.arrays[NAME] == self.step) for each in records)

    def fill(self, leaves: dict[str, jax.Array], updates: int) -> None:
        self.step = updates
        for key, expert in enumerate(leaves[NAME]):
            self.store.write(key, Record({NAME: np.asarray(expert)}, updates))


def train(folder: str) -> None:
    """Steps and saves until it is killed."""
    run, experts = RunFolder(folder), Stored(pathlib.Path(folder) / "store")
    with Checkpointer(run, KEEP, experts) as checkpointer:
        step = checkpointer.latest_complete_step() or 0
        if step:
            checkpointer.restore(shapes(filled_state(0)), step)
            assert experts.step == step
        while True:
            step += 1
            print(step, flush=True)
            experts.train(step)
            checkpointer.save(step, filled_state(step), {"position": step})


def test_killed_at_any_moment_leaves_state_and_experts_of_one_step(tmp_path):
    code = f"import sys; from {__name__} import train; train(sys.argv[1])"
    newest = 0
    checkpoints = tmp_path / "checkpoints"
    for delay_s in (0.0, 0.05):
        # One that was killed while it linked records.
        (checkpoints / f"..{RECORDS}-7.0123abcd.partial").mkdir(parents=True)
        trainer = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        # It is about to save the third, so it has completed at least the first.
        assert [int(trainer.stdout.readline()) for _ in range(3)][0] == newest + 1
        time.sleep(delay_s)
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        experts = Stored(tmp_path / "store")
        with Checkpointer(RunFolder(tmp_path), KEEP, experts) as checkpointer:
            step = checkpointer.latest_complete_step()
            assert step > newest
            newest = step
            for each in checkpointer.steps:
                state, _ = checkpointer.restore(shapes(filled_state(0)), each)
                assert_same(state, filled_state(each))
                assert experts.step == each
        experts.store.close()
    assert not [each for each in os.listdir(checkpoints) if RECORDS in each]


@pytest.mark.parametrize(
    "fault", (StoreError(28, "no space for records"), RecordError("no space for records"))
)
def test_a_snapshot_that_fails_leaves_the_checkpoint_before(fault, tmp_path, monkeypatch):
    experts = Stored(tmp_path / "store")
    with Checkpointer(RunFolder(tmp_path), KEEP, experts) as checkpointer:
        experts.train(1)
        checkpointer.save(1, filled_state(1))
        experts.train(2)

        def full(folder):
            raise fault

        with monkeypatch.context() as patch:
            patch.setattr(experts, "save", full)
            with pytest.raises(OSError, match="checkpoint 2 could not .* no space for records"):
                checkpointer.save(2, filled_state(2))
        assert checkpointer.latest_complete_step() == 1
        checkpointer.save(2, filled_state(2))
        checkpointer.wait()
        checkpointer.restore(shapes(filled_state(0)), 1)
        assert experts.step == 1
    experts.store.close()


# An optimizer's count goes on from another run; one that has none has made 5 - 2 updates.
@pytest.mark.parametrize(("opt_state", "updates"), [({}, 3), ({"count": np.int32(7)}, 7)])
def test_experts_of_a_state_that_had_them_become_records(opt_state, updates, tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class State:
        step: jax.Array
        skipped: jax.Array
        params: dict
        opt_state: dict

    rng = np.random.default_rng(0)
    experts_EFD = rng.standard_normal((LAYOUT.num_experts, 64, 64), np.float32)
    with_experts = nested({NAME.removeprefix("params/"): experts_EFD, "norm": np.ones(4)})
    with Checkpointer(RunFolder(tmp_path), KEEP) as checkpointer:
        saved = State(np.int32(5), np.int32(2), with_experts, opt_state)
        checkpointer.save(5, jax.tree.map(jax.numpy.asarray, saved))
    stored = Stored(tmp_path / "store")
    without = State(np.int32(0), np.int32(0), {"norm": jax.numpy.zeros(4)}, opt_state)
    without = jax.tree.map(jax.numpy.asarray, without)
    with Checkpointer(RunFolder(tmp_path), KEEP, stored) as checkpointer:
        state, _ = checkpointer.restore(shapes(without))
    np.testing.assert_array_equal(state.params["norm"], np.ones(4))
    for key, expert_FD in enumerate(experts_EFD):
        record = stored.store.read(key).result()
        assert record.updates == updates
        np.testing.assert_array_equal(record.arrays[NAME], expert_FD)
    stored.store.close()
