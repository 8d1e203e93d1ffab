# SPDX-License-Identifier: Apache-2.0
"""The training loop, read from top to bottom: build, start or resume, step, report, save."""

import dataclasses
import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from switchx.data.batches import Shard
from switchx.data.features import Batch, batch_digest
from switchx.data.loader import TrainLoader, evaluation_batches
from switchx.data.mixtures import as_mixture
from switchx.data.saved_vocabulary import load_vocabulary
from switchx.planner.model_cost import train_flops
from switchx.training.checkpoints import Checkpointer
from switchx.training.evaluate import evaluate
from switchx.training.interval import Interval, Stopwatch
from switchx.training.job import TrainingJob
from switchx.training.metrics import MetricsLog
from switchx.training.program import TrainingProgram
from switchx.training.restore import restore_by_name, restore_params
from switchx.training.run_config import check_same_run, write_run_config
from switchx.training.run_folder import RunFolder
from switchx.training.state import TrainState

logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """Shows progress to a person; the loop does not care how."""

    def begin(self, first_step: int, last_step: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def logged(self, step: int, metrics: dict[str, Any]) -> None: ...
    def evaluated(self, step: int, metrics: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


class TrainingStopped(RuntimeError):
    """Training cannot go on; the state is saved and the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Attributes:
        step: the last step taken, saved in a checkpoint.
        is_finished: false when a signal ended it early.
        last_metrics: of the last logged step of this call; empty if it logged none.
    """

    step: int
    is_finished: bool
    last_metrics: dict[str, Any]


def train(
    job: TrainingJob, run: RunFolder, reporter: Reporter, records: dict[Path, str] | None = None
) -> Outcome:
    """Trains `job` in a run folder, from where its last complete checkpoint left off.

    Args:
        records: texts to keep in the run folder (the operative configuration, the commit),
            written once it is certain that the folder is this job's.

    Raises:
        ValueError: the job, its data or the run folder do not fit; nothing was changed.
        SaveError: a checkpoint could not be written; earlier ones are intact.
        TrainingStopped: too many steps in a row were not finite; the state is saved.
    """
    job.check_vocabulary()
    run.create()
    with run.locked(), stop_signals() as stop:
        program = TrainingProgram(job)
        with program.scope(), Checkpointer(run, job.retention) as checkpointer:
            loader = _open_loader(job)
            state = _start_or_resume(job, run, program, checkpointer, loader, reporter)
            for path, text in (records or {}).items():
                path.write_text(text, encoding="utf-8")
            return _Loop(job, run, program, checkpointer, loader, reporter, stop).run(state)


def _open_loader(job: TrainingJob) -> TrainLoader:
    return TrainLoader(
        job.source,
        job.batches,
        seed=job.seed,
        data_dir=job.data_dir,
        shard=Shard(jax.process_index(), jax.process_count()),
        prefetch=job.prefetch,
    )


def _start_or_resume(job, run, program, checkpointer, loader, reporter) -> TrainState:
    """The state to go on from: the newest complete checkpoint's, or a fresh one."""
    if run.config.exists():
        check_same_run(run, job)
    elif any(run.checkpoints.glob("[0-9]*")):
        raise ValueError(
            f"model_dir={str(run.path)!r} has checkpoints but no config.json; restore it, or "
            "give another model_dir"
        )
    step = checkpointer.latest_complete_step()
    if step is not None:
        state, data_state = checkpointer.restore(program.restore_target(), step)
        loader.restore(data_state)
        reporter.note(f"resumed from step {step} in {run.checkpoints / str(step)}")
        return state
    params = None
    if job.init_from is not None:
        source = RunFolder(job.init_from)
        _check_init_vocabulary(job, source)
        target = program.restore_target().params
        params, text = restore_by_name(target, restore_params(source.root))
        reporter.note(f"{text} from {source.root}; optimizer and step are fresh")
    if jax.process_index() == 0:
        write_run_config(run, job)
    return program.init_state(params)


def _check_init_vocabulary(job: TrainingJob, source: RunFolder) -> None:
    if load_vocabulary(source.root).fingerprint() != job.vocabulary.fingerprint():
        raise ValueError(
            f"init_from={str(source.path)!r} was trained with another vocabulary than this "
            "job's; its token ids mean other things. Use the copy in that folder"
        )


class _Loop:
    """The steps of one call of `train`."""

    def __init__(self, job, run, program, checkpointer, loader, reporter, stop):
        self.job, self.run_folder, self.program = job, run, program
        self.checkpointer, self.loader = checkpointer, loader
        self.reporter, self.stop = reporter, stop
        self.flops_per_step = train_flops(job.model, *job.sequence_lengths) * job.batch_size
        self.pending = None
        self.skipped: list[dict] = []
        self.skipped_in_a_row = 0
        self.last_metrics: dict[str, Any] = {}

    def run(self, state: TrainState) -> Outcome:
        first_step = step = int(state.step)
        logged_until = first_step or -1  # a run begun again evaluates step 0 again
        folder = self.run_folder
        self.log = MetricsLog(folder.metrics, folder.tensorboard, logged_until)
        self.validation = MetricsLog(
            folder.validation, folder.tensorboard / "validation", logged_until
        )
        self.reporter.begin(first_step, self.job.train_steps)
        self.watch = Stopwatch()
        self.interval = Interval(0.0)
        if step == 0 and self.job.train_steps > 0:
            self._evaluate(step, state)
        saved = step if step in self.checkpointer.steps else None
        self.watch.start()
        while step < self.job.train_steps and not self.stop.is_set():
            batch = next(self.loader)
            state, metrics = self.program.train_step(state, self.program.place(batch))
            self._account()  # of the step before, while this one runs
            step += 1
            self.pending = (step, batch, metrics)
            if self.skipped_in_a_row + 1 >= self.job.max_skipped_in_a_row:
                self._account()
            self.reporter.stepped(step)
            is_last = step == self.job.train_steps
            if step % self.job.log_every == 0 or is_last:
                self._log(step)
            evaluation = None
            if step % self.job.eval_every == 0 or is_last:
                evaluation = self._evaluate(step, state)
            if step % self.job.checkpoint_every == 0 or is_last:
                self._save(step, state, evaluation)
                saved = step
            self.checkpointer.check()
            self._stop_if_hopeless(step, state, saved)
        self._account()
        if saved != step and step > 0:
            self._save(step, state, None)
        self.checkpointer.wait()
        self.log.close()
        self.validation.close()
        return Outcome(step, step >= self.job.train_steps, self.last_metrics)

    def _account(self) -> None:
        """Takes in the metrics of the last step that was started; waits for it."""
        if self.pending is None:
            return
        (step, batch, metrics), self.pending = self.pending, None
        metrics = jax.device_get(metrics)
        segments = [rows for name, rows in batch.items() if name.endswith("segment_ids")]
        tokens = sum(int(np.count_nonzero(rows)) for rows in segments)
        examples = int(np.sum(np.max(batch["decoder_segment_ids"], axis=1)))
        processes = jax.process_count()
        self.interval.add(metrics, tokens * processes, examples * processes)
        self.skipped_in_a_row = int(metrics.skipped_in_a_row)
        if metrics.is_skipped:
            self._record_skipped(step, batch, metrics)

    def _record_skipped(self, step: int, batch: Batch, metrics) -> None:
        identity = {
            "step": step,
            "batch": batch_digest(batch),
            "loss": repr(float(metrics.loss)),
            "grad_norm": repr(float(metrics.grad_norm)),
        }
        self.skipped.append(identity)
        self.reporter.note(
            f"step {step} is skipped: loss {identity['loss']}, gradient norm "
            f"{identity['grad_norm']}, batch {identity['batch']}; no parameter changed"
        )
        folder = self.run_folder.skipped_batches
        folder.mkdir(exist_ok=True)
        name = f"{step}.{jax.process_index()}"
        (folder / f"{name}.json").write_text(json.dumps(identity) + "\n")
        np.savez_compressed(folder / f"{name}.npz", **batch)

    def _log(self, step: int) -> None:
        self._account()
        seconds = self.watch.read()
        metrics = self.interval.metrics(seconds, self.flops_per_step)
        metrics["learning_rate"] = float(self.job.schedule(step - 1))
        metrics["train_seconds"] = seconds
        if any(self.loader.counts().values()):
            metrics["data"] = self.loader.counts()
        if jax.process_index() == 0:
            self.log.write(step, metrics)
        self.reporter.logged(step, metrics)
        self.last_metrics = metrics
        self.interval = Interval(seconds)

    def _evaluate(self, step: int, state: TrainState) -> dict[str, Any]:
        self.watch.stop()
        metrics = evaluate_job(self.job, self.program, state.params)
        if jax.process_index() == 0:
            self.validation.write(step, metrics)
        self.reporter.evaluated(step, metrics)
        self.watch.start()
        return metrics

    def _save(self, step: int, state: TrainState, evaluation: dict[str, Any] | None) -> None:
        self.watch.stop()
        self.checkpointer.save(step, state, self.loader.state(), evaluation)
        self.watch.start()

    def _stop_if_hopeless(self, step: int, state: TrainState, saved: int | None) -> None:
        if self.skipped_in_a_row < self.job.max_skipped_in_a_row:
            return
        if saved != step:
            self._save(step, state, None)
        self.checkpointer.wait()
        recent = self.skipped[-self.skipped_in_a_row :]
        batches = ", ".join(f"{each['step']}: {each['batch']}" for each in recent)
        raise TrainingStopped(
            f"{self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite "
            f"(batches {batches}, kept in {self.run_folder.skipped_batches}); the state is "
            f"saved at step {step}. Use a lower learning rate or clip_norm, or resume from an "
            "earlier checkpoint"
        )


def evaluate_job(job: TrainingJob, program: TrainingProgram, params) -> dict[str, Any]:
    """Validation metrics: of all tasks together, and under `tasks` of each if several."""
    tasks = as_mixture(job.source).tasks
    shard = Shard(jax.process_index(), jax.process_count())

    def batches(task) -> Iterator[dict]:
        for batch in evaluation_batches(
            task, job.batches, data_dir=job.data_dir, shard=shard, num_batches=job.eval_batches
        ):
            yield program.place(batch)

    per_task = {task.name: evaluate(program.eval_step, params, batches(task)) for task in tasks}
    if len(tasks) == 1:
        return per_task[tasks[0].name]
    tokens = sum(metrics["target_tokens"] for metrics in per_task.values())
    overall = {
        name: sum(each[name] * each["target_tokens"] for each in per_task.values()) / tokens
        for name in ("neg_log_perplexity", "cross_entropy", "accuracy")
    }
    return overall | {"target_tokens": tokens, "tasks": per_task}


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set; a second Ctrl-C interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number, frame):
        stop.set()
        signal.signal(signal.SIGINT, previous[signal.SIGINT])

    previous = {s: signal.signal(s, request) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
