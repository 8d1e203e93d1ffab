# SPDX-License-Identifier: Apache-2.0
"""What a signal leaves time for, and where a run goes on from."""

import dataclasses
import json
import logging

import pytest

from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.retention import Retention, rewind
from switchx.checkpoint.run_folder import RunFolder
from switchx.training.loop import train
from switchx.training.offload.storage_spec import StorageSpec
from tests.data.refusals import refused
from tests.training.jobs import (
    SPARSE,
    Events,
    killed_after,
    make_job,
    signalled_after,
    tiny_job,
)
from tests.training.saved_runs import saved_steps, steps_in
from tests.training.train_states import assert_same, damage

pytestmark = pytest.mark.usefixtures("steps_traced_once")


@pytest.fixture(scope="module")
def final(tmp_path_factory):
    """The parameters after four uninterrupted steps."""
    run = RunFolder(tmp_path_factory.mktemp("whole"))
    train(tiny_job(), run, Events())
    return restore_params(run.root)


def job_of(**retention):
    return tiny_job(retention=Retention(**retention))


def stopped_after(step: int, run: RunFolder, job) -> Events:
    """What is reported of a run that gets SIGTERM after a step."""
    events = Events(signalled_after(step))
    outcome = train(job, run, events)
    assert (outcome.step, outcome.is_finished) == (step, False)
    return events


def slow_saves(run: RunFolder, seconds: float) -> None:
    """As if the last save had taken so long."""
    cost = json.loads(run.last_save.read_text()) | {"seconds": seconds}
    run.last_save.write_text(json.dumps(cost))


def test_a_save_that_the_grace_does_not_suffice_for_is_not_begun(tmp_path, final):
    run = RunFolder(tmp_path)
    train(dataclasses.replace(tiny_job(), train_steps=2), run, Events())
    slow_saves(run, 1000.0)
    events = stopped_after(3, run, job_of(grace_s=30.0))
    (said,) = [note for note in events.notes if "is not saved" in note]
    assert said == (
        "step 3 is not saved: a save takes 1000 s, and 30 s of Retention.grace_s=30.0 are "
        "left. Save more often, or keep copies with Retention.local_dir"
    )
    assert saved_steps(run) == {2}
    assert not list(run.checkpoints.glob("3*"))
    train(tiny_job(), run, Events())
    assert_same(restore_params(run.root), final)


def test_the_copy_that_is_made_instead_is_gone_on_from(tmp_path, final):
    run, local = RunFolder(tmp_path / "run"), str(tmp_path / "local")
    train(dataclasses.replace(tiny_job(), train_steps=2), run, Events())
    slow_saves(run, 1000.0)
    job = job_of(grace_s=30.0, local_dir=local)
    events = stopped_after(3, run, job)
    assert any(note.endswith(f"are left; copied to {local}") for note in events.notes)
    assert saved_steps(run) == {2}
    events = Events()
    train(job, run, events)
    assert events[:2] == [
        ("note", f"resumed from step 3 in the copies of {local}"),
        ("begin", 3, 4),
    ]
    assert steps_in(run.metrics) == [1, 2, 3, 4]
    assert_same(restore_params(run.root), final)


def killed_at(step: int, run: RunFolder, job) -> None:
    """Trains as if it were killed before the state of that step is saved."""
    with pytest.raises(MemoryError):
        train(job, run, Events(killed_after(step)))


def copies_in(local) -> set[int]:
    return {int(each.name) for each in local.glob("run-*/process_0_of_1/*") if each.is_dir()}


@pytest.fixture
def copied(tmp_path):
    """A run with a checkpoint of step 2 and a copy of step 3; its job."""
    run = RunFolder(tmp_path / "run")
    job = job_of(local_dir=str(tmp_path / "local"), local_every=3)
    train(dataclasses.replace(job, train_steps=2), run, Events())
    killed_at(4, run, dataclasses.replace(job, train_steps=5))
    (arrays,) = (tmp_path / "local").glob("run-*/process_0_of_1/3/arrays.bin")
    return run, job, arrays


@pytest.mark.parametrize("has_copies", [True, False])
def test_copies_of_an_attempt_without_a_checkpoint_are_not_the_next_ones(
    has_copies, tmp_path, final
):
    run, local = RunFolder(tmp_path / "run"), tmp_path / "local"
    job = job_of(local_dir=str(local), local_every=1)
    first = dataclasses.replace(job, seed=1, train_steps=9, checkpoint_every=9)
    killed_at(5, run, first)
    assert copies_in(local) == {3, 4}
    killed_at(4, run, job if has_copies else tiny_job())  # after it has saved step 2
    assert copies_in(local) == ({1, 3} if has_copies else {3, 4})
    events = Events()
    train(job, run, events)
    found = f"3 in the copies of {local}" if has_copies else f"2 in {run.checkpoints / '2'}"
    assert events.notes == [f"resumed from step {found}"]
    assert_same(restore_params(run.root), final)


def test_a_damaged_copy_is_deleted_and_the_checkpoint_taken(copied, final, caplog):
    run, job, arrays = copied
    damage(arrays)
    events = Events()
    with caplog.at_level(logging.WARNING):
        train(job, run, events)
    assert events.notes[0] == f"resumed from step 2 in {run.checkpoints / '2'}"
    assert "local copy of step 3 is deleted: its array " in caplog.text
    assert_same(restore_params(run.root), final)


def test_a_run_that_is_rewound_forgets_its_copies(copied):
    run, job, arrays = copied
    rewind(run, 2)
    events = Events()
    train(dataclasses.replace(job, train_steps=2), run, events)
    assert events.notes == [f"resumed from step 2 in {run.checkpoints / '2'}"]
    assert not arrays.exists()


def test_copies_do_not_have_experts_that_are_on_a_disk():
    with refused("Retention.local_dir='a' with StorageSpec.experts='disk': a copy has "):
        make_job(
            SPARSE, retention=Retention(local_dir="a"), storage=StorageSpec("disk")
        ).require_storage({})
