# SPDX-License-Identifier: Apache-2.0
"""The training loop: build the program, start or resume, step, report, save."""

import contextlib
import dataclasses
import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from switchx.checkpoint.checkpointer import Checkpointer
from switchx.checkpoint.items import num_updates
from switchx.checkpoint.parts import gathered
from switchx.checkpoint.run_folder import RunFolder, require_shared
from switchx.data.features import Batch
from switchx.data.loader import TrainLoader, evaluation_batches, merge_states
from switchx.data.mixtures import as_mixture, evaluated_tasks
from switchx.data.tasks import OpenTask, open_task
from switchx.files import write_atomically
from switchx.training.evaluate import RoutingLog, RoutingSample, evaluated_sums
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from switchx.training.programs import program_of
from switchx.training.resume import check_same_run, flat_description
from switchx.training.saving import Saving
from switchx.training.start import (
    corpora_record,
    evaluator_of,
    first_params,
    first_state,
    require_apart,
)
from switchx.training.step import TrainState
from switchx.training.stopping import StopAgreement, TrainingStopped, diverged, stop_signals
from switchx.training.telemetry.goodput import Cause, CompileTime, Goodput, StepTimes
from switchx.training.telemetry.metric_writers import opened_writers, require_writers
from switchx.training.telemetry.metrics import (
    MetricsLog,
    SkippedBatches,
    cut_after,
    last_metrics,
    last_step,
    routing_metrics,
    token_metrics,
)
from switchx.training.telemetry.profiling import ProfiledSteps, StepProfiler
from switchx.training.telemetry.routing_alarms import Alarm, AlarmWatch
from switchx.training.telemetry.throughput import Interval, Stopwatch, counted_flops
from switchx.training.text_evaluation import TextEvaluator, TextLog

logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """The interface of an object that shows the progress of training to the user."""

    def begin(self, first_step: int, last_step: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def logged(self, step: int, metrics: dict[str, Any]) -> None: ...
    def evaluated(self, step: int, metrics: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a call of `train`.

    Attributes:
        step: the last step taken.
        is_finished: whether the job's last step was taken, evaluated and saved; false when a
            signal ended it early.
        last_metrics: metrics of the last logged step of this call; empty if it logged none.
        saved: step of the newest checkpoint, 0 without one; None if it is `step`. It is an
            earlier step if a signal's grace period was too short for a save.
    """

    step: int
    is_finished: bool
    last_metrics: dict[str, Any]
    saved: int | None = None


def train(
    job: TrainingJob,
    run: RunFolder,
    reporter: Reporter,
    records: dict[Path, str] | None = None,
    devices: Sequence[jax.Device] | None = None,
    text_evaluator: Callable[[TrainingJob, jax.sharding.Mesh, dict], TextEvaluator]
    | None = None,
    profile: ProfiledSteps | None = None,
    started_s: float | None = None,
    stop_on_alarm: bool = False,
) -> Outcome:
    """Trains `job` in a run folder, from where its last complete checkpoint left off.

    Args:
        records: texts to keep in the run folder (the operative configuration, the commit),
            written once it is certain that the folder is this job's.
        devices: devices of the mesh, some from each process; None uses all devices.
        text_evaluator: function of the job, the mesh and the decoding defaults that returns
            the `TextEvaluator` for `TrainingJob.text_evaluation`.
        profile: steps to trace into the run folder.
        started_s: time at which this process began to work, by `time.perf_counter`; None means
            now.
        stop_on_alarm: whether the first alarm of `TrainingJob.alarms` that is raised ends
            training.

    Raises:
        ValueError: the job, its data and the run folder contradict each other; nothing changed.
        SaveError: a checkpoint could not be written; earlier ones are intact.
        TrainingStopped: too many steps in a row were not finite, or there was an alarm; the
            state is saved.
    """
    started_s = time.perf_counter() if started_s is None else started_s
    require_writers(job.metric_writers)
    if profile is not None:
        profile.require_within(job.train_steps)
    job.check_best_metric()
    if not run.is_begun:
        job.check_vocabulary()
    require_apart(job, run)
    is_new = not (run.is_in_store or run.where.exists())
    run.create()
    require_shared(run)
    is_first = jax.process_index() == 0  # the only process that locks the folder
    with (
        _full_disk_named(run),
        run.locked(is_new) if is_first else contextlib.nullcontext(),
        stop_signals() as stop,
        CompileTime() as compiled,
    ):
        if run.is_begun:  # before anything in it is touched
            job = check_same_run(run, job)
        program = program_of(job, run, devices)
        evaluator = evaluator_of(job, run, program.mesh, text_evaluator)
        program.require_memory()
        for note in program.notes:
            reporter.note(note)
        with program.scope(), Checkpointer(run, job.retention, program.experts) as checkpointer:
            step = checkpointer.latest_complete_step()
            first = first_params(job, program) if step is None else None
            saving = Saving(
                run, job.retention, checkpointer, stop, reporter.note, is_new=step is None
            )
            logger.info("opening the data")
            loader = job.loader(program.shard)
            with contextlib.closing(saving), contextlib.closing(loader):
                # Opened once: later evaluations read the same data, even if the files change.
                evaluated = open_evaluated(job)
                if step is None:
                    state = first_state(job, program, first, run, reporter.note)
                else:
                    step, state, data = saving.resume(program.abstract_state, job.model)
                    loader.restore(merge_states(data))
                if is_first:
                    program.write_records(run, is_new=step is None)
                records = corpora_record(job, run, reporter.note) | (records or {})
                for path, text in records.items() if is_first else ():
                    write_atomically(path, text.encode())
                profiler = StepProfiler(profile, step or 0, run.profile)
                if profiler.note is not None:
                    reporter.note(profiler.note)
                is_stopping = StopAgreement(stop, program.mesh)
                goodput = Goodput(run.goodput, compiled, started_s)
                loop = _Loop(
                    job,
                    run,
                    program,
                    checkpointer,
                    saving,
                    loader,
                    evaluated,
                    reporter,
                    is_stopping,
                    evaluator,
                    goodput,
                    profiler,
                    stop_on_alarm,
                )
                return loop.train(state)


@contextlib.contextmanager
def _full_disk_named(run: RunFolder) -> Iterator[None]:
    """Says where space ran out: the error from a write to an open log names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"model_dir={str(run.path)!r}: {error.filename or 'a log'} cannot be written "
            f"({error.strerror}); make room there, then run the same command to go on from the "
            "last checkpoint, which is intact"
        ) from error


class _EvaluationCut(Exception):
    """Training has to stop before an evaluation is complete."""


@dataclasses.dataclass
class _Loop:
    """The steps of one call of `train`, and the state that they keep from step to step.

    Attributes:
        evaluated: tasks to evaluate, with their splits.
        pending: the step that was started last, its batch and its metrics, not yet read.
        stopped_by: the alarm that ends training.
        evaluated_step: the step of the newest evaluation in the log; None without one.
    """

    job: TrainingJob
    run: RunFolder
    program: TrainingProgram
    checkpointer: Checkpointer
    saving: Saving
    loader: TrainLoader
    evaluated: Sequence[OpenTask]
    reporter: Reporter
    is_stopping: StopAgreement
    text_evaluator: TextEvaluator | None
    goodput: Goodput
    profiler: StepProfiler
    stop_on_alarm: bool
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    interval: Interval = dataclasses.field(default_factory=lambda: Interval(0.0))
    pending: tuple | None = None
    skipped_in_a_row: int = 0
    stopped_by: Alarm | None = None
    evaluated_step: int | None = None
    last_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)

    def train(self, state: TrainState) -> Outcome:
        """Opens the logs, and steps until the last step of the job, or until a signal."""
        # A run that starts over evaluates step 0 again.
        run, after = self.run, int(state.step) or -1
        self.skipped = SkippedBatches(run.skipped_batches)
        self.log = MetricsLog(run.metrics, run.tensorboard, after)
        self.validation = MetricsLog(run.validation, run.tensorboard / "validation", after)
        if jax.process_index() == 0:  # entries of checkpoints that this run writes again
            cut_after(run.evaluations, after)
        self.routing = RoutingLog(run.routing, after)
        self.alarms = None
        if self.job.alarms is not None:
            self.alarms = AlarmWatch(self.job.alarms, self.job.model, run, after)
        self.texts = None
        if self.text_evaluator is not None:
            spec, board = self.job.text_evaluation, self.validation
            self.texts = TextLog(spec, self.text_evaluator, run, board, after)
        evaluation = last_metrics(run.validation, after, self.job.eval_every)
        evaluated = [evaluation, last_step(run.validation, after)]
        # As process 0 read it: on a network file system, others may see an older file.
        evaluation, self.evaluated_step = gathered([evaluated])[0]
        if evaluation:
            self._balance(evaluation)
        writers = opened_writers(self.job.metric_writers, run, flat_description(self.job))
        with (
            contextlib.closing(self.log),
            contextlib.closing(self.validation),
            writers as self.write,
            contextlib.closing(StepTimes()) as self.step_times,
        ):
            try:
                return self._steps(state)
            finally:
                self.profiler.stop()

    def _steps(self, state: TrainState) -> Outcome:
        step, job = int(state.step), self.job
        self.reporter.begin(step, job.train_steps)
        if step < job.train_steps:
            self.goodput.begin(step)
        if step == 0 and job.train_steps > 0 and job.eval_at_start:
            logger.info("compiling and evaluating, before the first step")
            self._evaluate(step, state)
        evaluation, is_cut = None, False
        if step > 0 and self._is_evaluated_after(step) and self.evaluated_step != step:
            is_cut = self._evaluate(step, state) is None  # which the stopped run did not finish
        if step < job.train_steps:
            logger.info("compiling the training step")
        saved = step if step in self.checkpointer.steps else None
        self.watch.start()
        self.goodput.goes_on_with("step")
        while step < job.train_steps and not self.is_stopping():
            self.profiler.before(step + 1, settle=self._account)
            self.step_times.begins_wait()
            batch = next(self.loader)
            self.goodput.waited_for_data(self.step_times.data_wait_s())
            compiled_s = self.goodput.compiled_s
            with self.profiler.marked(step + 1):
                state, metrics = self.program.train_step(
                    state, self.program.place_for_training(batch), *self.program.beside
                )
            self.step_times.dispatched(metrics.loss, self.goodput.compiled_s > compiled_s)
            self._account()  # for the previous step, while this one runs
            step += 1
            self.pending = (step, batch, metrics)
            if self.profiler.ends_after(step):
                with self._apart("profile"):
                    self.profiler.stop()
            if self.skipped_in_a_row + 1 >= job.max_skipped_in_a_row:
                self._account()
            self.reporter.stepped(step)
            is_last, evaluation = step == job.train_steps, None
            if step % job.log_every == 0 or is_last:
                self._log(step, state)
            is_saved = step % job.checkpoint_every == 0 or is_last
            if self.saving.is_copied(step) and not is_saved:
                with self._apart("checkpoint"):
                    self.saving.copy(step, state, self.loader.state())
            if self._is_evaluated_after(step):
                evaluation = self._evaluate(step, state)
                is_cut = evaluation is None
            # After a signal, the remaining grace period decides, below.
            if is_saved and not self.is_stopping():
                self._save(step, state, evaluation)
                saved = step
            self.checkpointer.check()
            self._stop_if_diverged(step, state, saved)
        self._account()
        with self._apart("checkpoint"):
            data = self.loader.state()
            if step not in (saved, 0) and self.saving.save_at_the_end(
                step, state, data, evaluation
            ):
                self.goodput.saved(step, self.checkpointer.steps)
            self.saving.wait()
        self.goodput.write(step)
        if self.stopped_by is not None:
            raise TrainingStopped(
                f"alarm at step {self.stopped_by.step}: {self.stopped_by.text}; the state is "
                f"saved at step {step}, and the same command goes on from there, past this "
                "alarm; docs/routing_statistics.md says what alarms mean"
            )
        newest = max(self.checkpointer.steps, default=0)
        saved = None if newest == step else newest
        is_finished = step >= job.train_steps and not is_cut and saved is None
        return Outcome(step, is_finished, self.last_metrics, saved)

    def _is_evaluated_after(self, step: int) -> bool:
        return step % self.job.eval_every == 0 or step == self.job.train_steps

    @contextlib.contextmanager
    def _apart(self, cause: Cause) -> Iterator[None]:
        """Counts the time spent in the context under `cause`, not as training."""
        self._account()  # the step still running belongs to training
        self.watch.stop()
        with self.goodput.during(cause):
            yield
        self.watch.start()
        self.step_times.goes_on()

    def _account(self) -> None:
        """Waits for the last step that was started, and adds its metrics to the interval."""
        if self.pending is None:
            return
        (step, batch, metrics), self.pending = self.pending, None
        metrics = jax.device_get(metrics)
        segments = [rows for name, rows in batch.items() if name.endswith("segment_ids")]
        tokens = sum(int(np.count_nonzero(rows)) for rows in segments)
        examples = int(np.sum(np.max(batch["decoder_segment_ids"], axis=1)))
        # Rates cover all rows; those of other processes are assumed to be as full as these.
        others = self.program.shard.count / len(self.program.shard.parts)
        self.interval.add(metrics, round(tokens * others), round(examples * others))
        self.skipped_in_a_row = int(metrics.skipped_in_a_row)
        if metrics.is_skipped:
            self.reporter.note(self.skipped.keep(step, batch, metrics))

    def _log(self, step: int, state: TrainState) -> None:
        self._account()
        seconds = self.watch.read()
        metrics = self.interval.metrics(seconds, counted_flops(self.job))
        metrics["learning_rate"] = float(self.job.schedule(max(num_updates(state) - 1, 0)))
        metrics["train_seconds"] = seconds
        if self.program.experts is not None:
            metrics["storage"] = self.program.experts.metrics()
        if (cost := self.checkpointer.meter.last) is not None:
            metrics["checkpoint"] = dataclasses.asdict(cost)
            self.checkpointer.meter.last = None
        if any(self.loader.counts().values()):
            metrics["data"] = self.loader.counts()
        metrics["step_time"] = self.step_times.metrics()
        metrics["goodput"] = self.goodput.metrics()
        self.log.write(step, metrics)
        self.write("train", step, metrics)
        self.goodput.write(step)
        self.reporter.logged(step, metrics)
        self._alarm(step, metrics)
        self.last_metrics = metrics
        self.interval = Interval(seconds)
        self.step_times.goes_on()

    def _alarm(self, step: int, metrics: dict[str, Any]) -> None:
        raised = [] if self.alarms is None else self.alarms.raised_by(step, metrics)
        for alarm in raised:
            self.reporter.note(f"step {step:>5}  alarm: {alarm.text}")
            self.log.write_text(step, f"alarms/{alarm.kind}", alarm.text)
        if raised and self.stop_on_alarm and step < self.job.train_steps:
            self.stopped_by = raised[0]
            self.is_stopping.request()

    def _evaluate(self, step: int, state: TrainState) -> dict[str, Any] | None:
        """Metrics of the evaluation, which are also written to the logs.

        None if training has to stop before the evaluation ends: nothing of it is kept, and the
        resumed run evaluates first.
        """
        with self._apart("evaluation"):
            sample = RoutingSample(self.job.model, len(self.evaluated))
            params = state.evaluated_params
            try:
                metrics = evaluate_job(
                    self.job,
                    self.program,
                    params,
                    sample,
                    change=self._unless_stopping,
                    tasks=self.evaluated,
                )
            except _EvaluationCut:
                self.reporter.note(f"the evaluation after step {step} is left to the next run")
                return None
            if self.texts is not None:
                metrics["texts"] = self.texts.evaluate(
                    self.program.whole_params(params), step, self.watch.read()
                )
            # Fails as early as step 0 if no metric has the name that `retention` selects by.
            self.job.retention.score(metrics)
            self.validation.write(step, metrics)
            self.write("validation", step, metrics)
            if self.texts is not None:
                self.texts.write_peaks()
            self.routing.write(step, sample)
            self.reporter.evaluated(step, metrics)
            if step % self.job.eval_every == 0:  # not just where a run happens to end
                self._balance(metrics)
        self.evaluated_step = step
        return metrics

    def _unless_stopping(self, batch: Batch) -> Batch:
        """The batch; raises if training has to stop, at the same batch in all processes."""
        if self.is_stopping():
            raise _EvaluationCut
        return batch

    def _balance(self, evaluation: dict[str, Any]) -> None:
        """Passes the experts' load, summed over all tasks, to the program's `balance`.

        A resumed run passes the same numbers: it reads them from the evaluation log.
        """
        per_task = evaluation.get("tasks", {"": evaluation}).values()
        loads = [each["routing"]["load"] for each in per_task if "routing" in each]
        if loads:
            self.program.balance(np.sum(np.array(loads, np.float64), axis=0))

    def _save(self, step: int, state: TrainState, evaluation: dict[str, Any] | None) -> None:
        with self._apart("checkpoint"):
            self.saving.save(step, state, self.loader.state(), evaluation)
            self.goodput.saved(step, self.checkpointer.steps)

    def _stop_if_diverged(self, step: int, state: TrainState, saved: int | None) -> None:
        if self.skipped_in_a_row < self.job.max_skipped_in_a_row:
            return
        if saved != step:
            self._save(step, state, None)
        self.checkpointer.wait()
        skipped = self.skipped.last(self.skipped_in_a_row)
        raise diverged(self.run.path, step, self.skipped_in_a_row, skipped)


def open_evaluated(job: TrainingJob) -> list[OpenTask]:
    """The tasks that the job evaluates, opened on their evaluation splits.

    Raises:
        ValueError: as in `open_task`.
    """
    features = job.evaluated_batches.features
    return [
        open_task(task, task.evaluation_split, job.data_dir, features)
        for task in evaluated_tasks(job.source)
    ]


def evaluate_job(
    job: TrainingJob,
    program: TrainingProgram,
    params,
    sample: RoutingSample | None = None,
    change: Callable[[Batch], Batch] = lambda batch: batch,
    tasks: Sequence[OpenTask] | None = None,
) -> dict[str, Any]:
    """Validation metrics of all tasks together, and of each under `tasks` if there are several.

    Args:
        sample: collector of the routing of each task's tokens; None collects nothing.
        change: function applied to each batch of this process, in order, before evaluation.
        tasks: the evaluated tasks; None opens them.
    """
    tasks = tasks or open_evaluated(job)
    per_task = {}
    total = None
    for task_id, opened in enumerate(tasks):
        batches = evaluation_batches(
            opened,
            job.evaluated_batches,
            shard=program.shard,
            num_batches=job.eval_batches,
            task_id=task_id if as_mixture(job.source).rows else None,
        )
        batches = map(program.place, map(change, batches))
        sums = evaluated_sums(program.eval_step, params, batches, sample)
        per_task[opened.task.name] = token_metrics(sums[0]) | routing_metrics(sums[1])
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    if len(tasks) == 1:
        return per_task[tasks[0].task.name]
    overall = token_metrics(total[0]) | routing_metrics(total[1])
    overall.pop("routing", None)  # reported for each layer, by task
    return overall | {"tasks": per_task}
