# SPDX-License-Identifier: Apache-2.0
"""The loop: its order, what it resumes, skips and refuses. Whole commands: integration."""

import dataclasses
import errno
import json
import logging
import shutil
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from switchx import tree
from switchx.checkpoint.manifest import numbers_of
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.retention import Retention, rewind
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.corpora.corpus import require_split
from switchx.data.features import batch_digest
from switchx.data.mixtures import Mixture
from switchx.models.config import SwitchConfig
from switchx.optim.schedules import InverseSquareRoot
from switchx.partitioning.mesh import MeshSpec
from switchx.routing_record import open_record
from switchx.training import loop
from switchx.training.loop import Outcome, evaluate_job, train
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.training.stopping import TrainingStopped
from tests.cases import slow
from tests.data.fakes import text_corpus
from tests.data.refusals import refused
from tests.training.jobs import (
    TASK,
    TINY,
    Events,
    killed_after,
    make_job,
    signalled_after,
    tiny_job,
    with_switch,
)
from tests.training.saved_runs import lines, saved_steps, steps_in
from tests.training.train_states import assert_same, damage

pytestmark = pytest.mark.usefixtures("steps_traced_once")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Four uninterrupted steps: the run folder and what was reported."""
    run, events = RunFolder(tmp_path_factory.mktemp("finished")), Events()
    outcome = train(tiny_job(), run, events)
    return run, events, outcome


def test_steps_logs_evaluations_and_checkpoints_come_in_order(finished):
    run, events, outcome = finished
    steps = {step: [("stepped", step), ("logged", step)] for step in (1, 2, 3, 4)}
    assert events == [
        *(("begin", 0, 4), ("evaluated", 0)),
        *(*steps[1], *steps[2], ("evaluated", 2)),
        *(*steps[3], *steps[4], ("evaluated", 4)),
    ]
    assert steps_in(run.metrics) == [1, 2, 3, 4]
    assert steps_in(run.validation) == [0, 2, 4]
    assert saved_steps(run) == {2, 4}
    last = lines(run.metrics)[-1]
    assert outcome == Outcome(4, True, outcome.last_metrics)
    assert last == {"step": 4} | outcome.last_metrics
    assert last["learning_rate"] == pytest.approx(1e-2)
    assert last["target_tokens"] == 8 * 8 and last["skipped_steps"] == 0


def test_the_last_step_is_logged_evaluated_and_saved_whatever_the_intervals(tmp_path):
    run, events = RunFolder(tmp_path), Events()
    train(tiny_job(train_steps=3, log_every=9, eval_every=9, checkpoint_every=9), run, events)
    assert events[-3:] == [("stepped", 3), ("logged", 3), ("evaluated", 3)]
    assert steps_in(run.metrics) == [3] and saved_steps(run) == {3}


def test_a_finished_run_takes_no_step_and_a_longer_one_goes_on(finished, tmp_path):
    run, events = RunFolder(tmp_path), Events()
    train(tiny_job(train_steps=2), run, Events())
    goodput = run.goodput.read_text()
    outcome = train(tiny_job(train_steps=2), run, events)
    resumed = f"resumed from step 2 in {run.checkpoints / '2'}"
    assert events == [("note", resumed), ("begin", 2, 2)]
    assert outcome == Outcome(2, True, {}) and run.goodput.read_text() == goodput
    events = Events()
    train(tiny_job(train_steps=4), run, events)
    assert events[:3] == [("note", resumed), ("begin", 2, 4), ("stepped", 3)]
    assert steps_in(run.metrics) == [1, 2, 3, 4] and steps_in(run.validation) == [0, 2, 4]
    assert_same(restore_params(run.root), restore_params(finished[0].root))


def test_a_log_on_a_full_disk_is_named(tmp_path, monkeypatch):
    def write(log, step, metrics):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop.MetricsLog, "write", write)
    with pytest.raises(
        OSError, match=r"^model_dir='.*': a log cannot be written \(No space.*\)"
    ):
        train(tiny_job(), RunFolder(tmp_path), Events())


def test_process_0_says_what_is_evaluated_again(finished, tmp_path, monkeypatch):
    """Another one that read an older log would wait in collectives that process 0 skips."""
    shutil.copytree(finished[0].root, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(loop, "gathered", lambda own: [[None, 2], *own])
    train(tiny_job(), RunFolder(tmp_path), events := Events())
    assert ("evaluated", 4) in events


def test_training_goes_on_from_the_checkpoint_that_a_run_is_rewound_to(finished, tmp_path):
    run, events = RunFolder(tmp_path / "run"), Events()
    shutil.copytree(finished[0].root, run.root)
    assert rewind(run, 2) == (2, ["4.superseded-1"])
    run.evaluations.write_text('{"step": 2}\n{"step": 4}\n')  # of `switchx eval --step=all`
    train(tiny_job(), run, events)
    assert steps_in(run.evaluations) == [2]
    assert events[:3] == [
        ("note", f"resumed from step 2 in {run.checkpoints / '2'}"),
        ("begin", 2, 4),
        ("stepped", 3),
    ]
    assert_same(restore_params(run.root), restore_params(finished[0].root))
    assert steps_in(run.metrics) == [1, 2, 3, 4] and steps_in(run.validation) == [0, 2, 4]


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(finished, tmp_path):
    run, events = RunFolder(tmp_path / "run"), Events()
    shutil.copytree(finished[0].root, run.root)
    for step in (2, 4):
        file = run.checkpoints / str(step) / "data" / "process_0_of_1.json"
        file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        with refused(
            f"no checkpoint in {run.checkpoints} is what was saved; all are kept<any>"
        ):
            train(tiny_job(), run, events)
    assert steps_in(run.metrics) == [1, 2, 3, 4] and events == []
    for step in (2, 4):
        (run.checkpoints / f"{step}.damaged-1").rename(run.checkpoints / f"{step}.unfinished-1")
    train(tiny_job(train_steps=1), run, events)  # as if both saves had been cut short
    assert steps_in(run.metrics) == [1]


def test_a_signal_saves_the_step_that_was_running(finished, tmp_path):
    run = RunFolder(tmp_path)

    job = tiny_job(retention=Retention(grace_s=1000.0))  # which a save does not take
    outcome = train(job, run, events := Events(signalled_after(3)))
    assert (outcome.step, outcome.is_finished) == (3, False)
    assert saved_steps(run) == {2, 3} and json.loads(run.last_save.read_text())["step"] == 3
    assert not any("is not saved" in note for note in events.notes)
    train(tiny_job(), run, Events())
    assert_same(restore_params(run.root), restore_params(finished[0].root))
    assert steps_in(run.metrics) == [1, 2, 3, 4]


SPARSE = dataclasses.replace(TINY, switch=SwitchConfig(2, every=1))


def samples_in(run: RunFolder) -> dict[str, tuple]:
    """The step of each record of a run's routing, and its batches."""
    found = {}
    for path in sorted(run.routing.iterdir()):
        record = open_record(path)
        found[path.name] = record.info.step, list(record.batches())
    return found


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Four uninterrupted steps of a model with a Switch layer."""
    run = RunFolder(tmp_path_factory.mktemp("sparse"))
    train(make_job(SPARSE), run, Events())
    return run


def test_every_evaluation_leaves_a_sample_of_its_routing(sparse, finished):
    samples = samples_in(sparse)
    assert list(samples) == [f"step_{step:06d}.parquet" for step in (0, 2, 4)]
    (_, first), *_ = samples.values()
    for step, (found, batches) in zip((0, 2, 4), samples.values(), strict=True):
        assert found == step and len(batches) == 2
        for batch, before in zip(batches, first, strict=True):
            assert batch.layers == ("decoder 0",) and batch.info.switch.num_experts == 2
            assert batch.rank_NBLR.shape == (1, 8, 8, 1)
            np.testing.assert_array_equal(batch.token_BL, before.token_BL)
    assert not finished[0].routing.exists()  # a dense model routes nothing


@pytest.mark.parametrize("stop_at", [slow(1), 3])
def test_a_resumed_run_has_the_samples_of_an_uninterrupted_one(stop_at, sparse, tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(MemoryError):
        train(make_job(SPARSE), run, Events(killed_after(stop_at)))
    # As if it had come further, and been killed while it wrote.
    ahead = run.routing / "step_000003.parquet"
    ahead.write_bytes(b"of an attempt that is taken back")
    (run.routing / ".step_000004.parquet.partial").write_bytes(b"half")
    train(make_job(SPARSE), run, Events())
    assert not ahead.exists()
    assert not [*run.routing.glob("*.partial")]
    got, want = samples_in(run), samples_in(sparse)
    assert got.keys() == want.keys()
    for name, (step, batches) in want.items():
        assert got[name][0] == step
        for mine, theirs in zip(got[name][1], batches, strict=True):
            for array in ("token_BL", "rank_NBLR", "prob_NBLR", "margin_NBL", "expert_NBLS"):
                np.testing.assert_array_equal(getattr(mine, array), getattr(theirs, array))


def test_goodput_counts_steps_that_are_taken_again(tmp_path):
    run, job = RunFolder(tmp_path), tiny_job(eval_every=9, eval_at_start=False)
    with pytest.raises(MemoryError):
        train(job, run, Events(killed_after(4)))
    before = json.loads(run.goodput.read_text())
    assert before["step"] == 3 and before["at_checkpoints"].keys() == {"0", "2"}
    start_s = time.perf_counter()
    train(job, run, Events())
    wall_s = time.perf_counter() - start_s
    after = json.loads(run.goodput.read_text())
    assert (after["restarts"], after["lost_steps"]) == (1, 1)
    assert before["seconds"]["restart"] == 0 < after["seconds"]["restart"]
    assert after["seconds"]["start"] == before["seconds"]["start"] > 0
    counted_s = sum(after["seconds"].values()) - sum(before["seconds"].values())
    # What comes after the last write, and closing: not counted.
    assert 0.5 * wall_s < counted_s <= wall_s + 0.01
    assert steps_in(run.validation) == [4]
    last = lines(run.metrics)[-1]
    assert last["goodput"]["lost_steps"] == 1 and last["step_time"]["median_s"] > 0


def test_a_run_killed_before_its_first_checkpoint_begins_its_logs_anew(finished, tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(MemoryError):
        train(tiny_job(), run, Events(killed_after(1)))
    assert steps_in(run.validation) == [0]
    train(tiny_job(), run, Events())
    assert steps_in(run.validation) == [0, 2, 4] and steps_in(run.metrics) == [1, 2, 3, 4]
    assert_same(restore_params(run.root), restore_params(finished[0].root))


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(steps)` puts NaN into the batches of these steps; gives the list of all batches.

    Evaluations, which place batches too, are left out.
    """
    place, placed = TrainingProgram.place, []

    def install(steps):
        def spoilt_place(self, batch):
            placed.append(batch)
            if len(placed) in steps:
                weights = batch["decoder_loss_weights"] * np.float32(np.nan)
                return place(self, batch | {"decoder_loss_weights": weights})
            return place(self, batch)

        monkeypatch.setattr(TrainingProgram, "place", spoilt_place)
        monkeypatch.setattr(
            "switchx.training.loop.evaluate_job",
            lambda *given, **named: {"neg_log_perplexity": -1.0},
        )
        return placed

    return install


def test_a_step_that_is_not_finite_is_counted_named_and_kept(spoil, tmp_path):
    placed = spoil({2})
    run, events = RunFolder(tmp_path), Events()
    schedule = InverseSquareRoot(base=0.1, warmup_steps=1)
    outcome = train(tiny_job(schedule=schedule), run, events)
    digest = batch_digest(placed[1])
    assert events.notes == [
        f"step 2 is skipped: loss nan, gradient norm nan, batch {digest}; no parameter changed"
    ]
    assert {path.name for path in run.skipped_batches.iterdir()} == {"2.0.json", "2.0.npz"}
    logged = lines(run.metrics)
    assert [line["skipped_steps"] for line in logged] == [0, 1, 0, 0]
    assert logged[1]["loss"] is None
    # Updates so far are 1, 1, 2, 3: the schedule counts those that were made.
    rates = [0.1, 0.1, 0.1, 0.1 / 2**0.5]
    assert [line["learning_rate"] for line in logged] == pytest.approx(rates)
    assert outcome.is_finished


def test_too_many_in_a_row_stop_training_with_the_state_saved(spoil, tmp_path):
    placed = spoil({1, 3, 4, 5})
    run, events = RunFolder(tmp_path), Events()
    job = tiny_job(train_steps=20, checkpoint_every=20, max_skipped_in_a_row=3)
    with pytest.raises(TrainingStopped) as caught:
        train(job, run, events)
    batches = ", ".join(f"{step}: {batch_digest(placed[step - 1])}" for step in (3, 4, 5))
    assert str(caught.value) == (
        "3 steps in a row had a loss or gradient that is not finite (batches "
        f"{batches}, kept in {run.skipped_batches}); the state is saved at step 5. Train "
        "with a lower learning rate or clip_norm in a new model_dir, with "
        f"INIT_FROM={str(run.path)!r} and INIT_STEP=5 or that of an earlier checkpoint"
    )
    assert saved_steps(run) == {5} and len(events.notes) == 4
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(restore_params(run.root)))


class OneSplit(type(TASK.corpus)):
    """The same records, for training alone."""

    def open(self, split, data_dir):
        require_split(self.name, split, ["train"])
        return super().open(split, data_dir)


def test_a_validation_split_that_does_not_exist_is_refused_before_the_first_step(tmp_path):
    events = Events()
    source = dataclasses.replace(TASK, corpus=OneSplit(TASK.corpus.records))
    with refused("list has no split 'validation'"):
        train(tiny_job(source=source, eval_every=1000), RunFolder(tmp_path), events)
    assert events == [] and not (tmp_path / "config.json").exists()


opened = []


class Counted(type(TASK.corpus)):
    """The same records; says which splits are opened."""

    def open(self, split, data_dir):
        opened.append(split)
        return super().open(split, data_dir)


def test_evaluations_read_what_was_there_when_the_run_began(tmp_path):
    """Files may be added to a folder of texts while a run reads it."""
    opened.clear()
    source = dataclasses.replace(TASK, corpus=Counted(TASK.corpus.records))
    run = RunFolder(tmp_path)
    train(tiny_job(source=source, train_steps=4, eval_every=2), run, Events())
    assert steps_in(run.validation) == [0, 2, 4]
    assert opened.count("validation") == 2  # to be read, and for the record of what is there


def test_records_are_written_only_into_a_folder_of_this_job(finished, tmp_path):
    run = finished[0]
    with pytest.raises(ValueError, match="belongs to another configuration"):
        train(tiny_job(seed=5), run, Events(), {run.git_commit: "other"})
    assert not run.git_commit.exists()
    fresh = RunFolder(tmp_path)
    train(tiny_job(train_steps=0), fresh, Events(), {fresh.git_commit: "this"})
    assert fresh.git_commit.read_text() == "this"


def test_checkpoints_without_a_configuration_are_refused(tmp_path):
    run = RunFolder(tmp_path)
    (run.checkpoints / "2").mkdir(parents=True)
    (run.checkpoints / "2" / "file").write_text("of a user")
    with refused(f"model_dir={str(tmp_path)!r} has checkpoints but no config.json"):
        train(tiny_job(), run, Events())


def test_an_attempt_that_saved_nothing_may_be_set_right(tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(MemoryError):
        train(tiny_job(batch_size=16), run, Events(killed_after(1)))
    assert run.config.exists()
    train(tiny_job(train_steps=1), run, Events())
    assert json.loads(run.config.read_text())["batch_size"] == 8
    assert steps_in(run.validation) == [0, 1]


def test_each_device_reads_its_part_of_the_parameters_of_another_run(
    finished, tmp_path, monkeypatch
):
    """No process and no device has a whole array that the mesh splits, not even on the way."""
    asked = []
    restore = ocp.StandardCheckpointer.restore

    def recorded(self, directory, target):
        asked.append(target)
        return restore(self, directory, target)

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", recorded)
    job = tiny_job(init_from=str(finished[0].path), train_steps=0, mesh=MeshSpec(fsdp=4))
    train(job, RunFolder(tmp_path), Events())
    wanted = tree.named_leaves(compiled_program(job).shardings.params)
    got = {name: leaf.sharding for name, leaf in tree.named_leaves(asked[0]).items()}
    assert got.keys() == wanted.keys()
    split = [name for name, sharding in got.items() if not sharding.is_fully_replicated]
    assert len(split) > 4
    for name, leaf in tree.named_leaves(asked[0]).items():
        assert leaf.sharding.is_equivalent_to(wanted[name], leaf.ndim), name


def test_an_evaluation_of_several_tasks_weighs_them_by_tokens():
    other = dataclasses.replace(TASK, name="digits", corpus=text_corpus("0123456789"))
    model = with_switch(SPARSE, eval_capacity_factor=0.5)
    job = make_job(model, source=Mixture((TASK, other)), eval_batches=1)
    program = compiled_program(job)
    with program.scope():
        metrics = evaluate_job(job, program, program.init_state().params)
        counts = {name for name in numbers_of(metrics) if name.endswith("target_tokens")}
        assert {*job.evaluated_metrics} == numbers_of(metrics).keys() - counts
        alone = evaluate_job(
            dataclasses.replace(job, source=other), program, program.init_state().params
        )
        # Other tasks may be evaluated than are learnt.
        apart = dataclasses.replace(job, source=Mixture((TASK,), evaluation=(other,)))
        assert evaluate_job(apart, program, program.init_state().params) == alone
    letters, digits = metrics["tasks"]["letters"], metrics["tasks"]["digits"]
    assert digits == alone and digits["target_tokens"] < letters["target_tokens"] == 64
    tokens = letters["target_tokens"] + digits["target_tokens"]
    assert metrics["target_tokens"] == tokens
    # Every target token is routed, so that drops weigh alike.
    assert letters["dropped_fraction"] != digits["dropped_fraction"]
    for name in ("neg_log_perplexity", "cross_entropy", "accuracy", "dropped_fraction"):
        total = sum(task[name] * task["target_tokens"] for task in (letters, digits))
        assert metrics[name] == pytest.approx(total / tokens)


def test_a_model_beyond_the_memory_is_refused_before_it_is_drawn(tmp_path):
    model = dataclasses.replace(TINY, d_ff=10**12)
    with refused("parameters and optimizer need <any> GiB, and a cpu device has <any> GiB"):
        train(make_job(model), RunFolder(tmp_path), Events())


# What a signal leaves time for, and where a run goes on from.


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


def test_a_save_that_the_grace_does_not_suffice_for_is_not_begun(tmp_path, finished):
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
    assert_same(restore_params(run.root), restore_params(finished[0].root))


def test_the_copy_that_is_made_instead_is_gone_on_from(tmp_path, finished):
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
    assert_same(restore_params(run.root), restore_params(finished[0].root))


def test_the_grace_decides_where_a_save_was_due_too(tmp_path):
    run, local = RunFolder(tmp_path / "run"), tmp_path / "local"
    train(tiny_job(train_steps=2), run, Events())
    slow_saves(run, 1000.0)
    job = dataclasses.replace(job_of(grace_s=30.0, local_dir=str(local)), train_steps=6)
    stopped_after(4, run, job)
    assert (saved_steps(run), copies_in(local)) == ({2}, {4})


def test_a_last_step_that_the_grace_does_not_save_is_not_the_end(tmp_path):
    class Signalled(Events):
        def evaluated(self, step, metrics):
            signalled_after(4)(step)

    run = RunFolder(tmp_path)
    train(tiny_job(train_steps=2), run, Events())
    slow_saves(run, 1000.0)
    outcome = train(job_of(grace_s=30.0), run, Signalled())
    assert (outcome.step, outcome.is_finished, outcome.saved) == (4, False, 2)
    assert saved_steps(run) == {2}


def test_a_first_save_is_begun_however_little_grace_is_left(tmp_path):
    """No save was measured: none is known not to fit."""
    stopped_after(1, run := RunFolder(tmp_path), job_of(grace_s=1e-9))
    assert saved_steps(run) == {1}


@pytest.mark.parametrize("step", [2, 4])
def test_a_signal_ends_an_evaluation_and_the_next_run_begins_with_it(tmp_path, finished, step):
    run = RunFolder(tmp_path)
    events = stopped_after(step, run, tiny_job())
    assert f"the evaluation after step {step} is left to the next run" in events.notes
    assert max(saved_steps(run)) == step and step not in steps_in(run.validation)
    events = Events()
    assert train(tiny_job(), run, events).is_finished
    assert ("evaluated", step) == events[2]
    whole = finished[0].validation.read_text().splitlines()
    assert [
        json.loads(line)["neg_log_perplexity"]
        for line in run.validation.read_text().splitlines()
    ] == [json.loads(line)["neg_log_perplexity"] for line in whole]
    assert_same(restore_params(run.root), restore_params(finished[0].root))


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
    has_copies, tmp_path, finished
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
    assert_same(restore_params(run.root), restore_params(finished[0].root))


def test_a_damaged_copy_is_deleted_and_the_checkpoint_taken(copied, finished, caplog):
    run, job, arrays = copied
    damage(arrays)
    events = Events()
    with caplog.at_level(logging.WARNING):
        train(job, run, events)
    assert events.notes[0] == f"resumed from step 2 in {run.checkpoints / '2'}"
    assert "local copy of step 3 is deleted: its array " in caplog.text
    assert_same(restore_params(run.root), restore_params(finished[0].root))


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
