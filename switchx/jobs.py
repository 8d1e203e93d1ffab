# SPDX-License-Identifier: Apache-2.0
"""`switchx.train`, which the command of the same name calls, too.

Every command reads a run folder that was trained from Python, and vice versa. In a notebook,
progress is a display; elsewhere it is shown as by the commands (`switchx/progress.py`).
"""

import contextlib
import importlib.util
import os
import shlex
from collections.abc import Sequence

import jax

from switchx.analysis.drops import training_note
from switchx.checkpoint.run_folder import RunFolder
from switchx.generated_evaluation import JobTexts
from switchx.gin_config.writing import job_gin, model_gin
from switchx.malloc import keep_freed_memory, return_freed_memory
from switchx.models.params import abstract_params
from switchx.moe.capacity import layer_groups
from switchx.progress import reporter_here
from switchx.training import loop
from switchx.training.compilation_cache import compiled_programs_kept
from switchx.training.job import TrainingJob, require_job
from switchx.training.telemetry.profiling import ProfiledSteps
from switchx.tree import num_elements
from switchx.whole_folders import git_commit


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C, a notebook's interrupt or SIGTERM ended training; the message says what is saved.

    Attributes:
        outcome: the `Outcome` so far.
    """

    def __init__(self, outcome: loop.Outcome, job: TrainingJob, folder: RunFolder):
        newest = outcome.step if outcome.saved is None else outcome.saved
        saved = f"the state is saved at step {newest} of {job.train_steps} in {folder.where}"
        if not newest:
            when = f"after step {outcome.step}" if outcome.step else "before its first step"
            saved = f"{when}; nothing is saved"
        elif newest != outcome.step:
            copies = job.retention.local_dir
            where = "not saved" if copies is None else f"copied to {copies} alone"
            saved = f"step {outcome.step} is {where}; {saved}"
        super().__init__(f"training was interrupted; {saved}; the same call goes on from there")
        self.outcome = outcome


def train(
    job: TrainingJob,
    model_dir: str | os.PathLike,
    *,
    configuration: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    reporter=None,
    profile: tuple[int, int] | None = None,
    started_s: float | None = None,
    stop_on_alarm: bool = False,
) -> loop.Outcome:
    """Trains a job in a run folder, from where its last complete checkpoint left off.

    It does what `switchx train` does: the folder gets checkpoints, metrics.jsonl, TensorBoard
    events, the configuration as a gin file and the commit. A second call with the same job
    continues to the same bits; `dataclasses.replace(job, train_steps=...)` trains longer.

    Args:
        job: job that `switchx.job_from_gin` returned, or built from its dataclasses. A class or
            a function of your own that it names has to be in a module, not in a notebook
            cell.
        model_dir: run folder; created if it does not exist, resumed if it does.
        configuration: gin text that builds the job; None writes one from the job's fields.
        devices: devices of the mesh; None uses all devices.
        reporter: object that shows progress, a `switchx.training.loop.Reporter`; None picks one
            for the environment: a display in a notebook, else lines on standard error, with a
            bar if that is a terminal.
        profile: (start, end): a `jax.profiler` trace of the steps after step `start` until
            `end` is written into the run folder.
        started_s: time when work began, by `time.perf_counter`, for goodput; None means now.
        stop_on_alarm: whether training is saved and ends at the first routing alarm.

    Returns:
        The last step, and the metrics of the last logged one.

    Raises:
        ValueError: the job, its data and the folder contradict each other; nothing was trained.
        TrainingInterrupted: a `KeyboardInterrupt`, raised once the state is saved. A second
            Ctrl-C waits only for a save and is a plain `KeyboardInterrupt`.
        SaveError, TrainingStopped: see `switchx.training.loop.train`.
    """
    require_job(job, "train")
    profiled = None if profile is None else ProfiledSteps(*profile)
    folder = RunFolder(model_dir)
    records = {
        folder.operative_config: configuration or job_gin(job),
        folder.model_gin: model_gin(job.model),
        folder.git_commit: git_commit() + "\n",
    }
    with contextlib.ExitStack() as stack:
        reporter = reporter or stack.enter_context(reporter_here())
        is_bounded = job.storage.host_bytes is not None
        reporter.note(return_freed_memory() if is_bounded else keep_freed_memory())
        reporter.note(f"a model of {num_elements(abstract_params(job.model)):,} parameters")
        if (num_processes := jax.process_count()) > 1:
            reporter.note(f"{num_processes} processes, {jax.device_count()} devices")
        stack.enter_context(compiled_programs_kept(folder.compiled, reporter.note))
        if note := _drops_of(job, folder):
            reporter.note(note)
        reporter.note(f"to watch it: {_watching(folder)}")
        outcome = loop.train(
            job,
            folder,
            reporter,
            records,
            devices,
            JobTexts,
            profiled,
            started_s,
            stop_on_alarm,
        )
    if not outcome.is_finished:
        raise TrainingInterrupted(outcome, job, folder)
    return outcome


def _watching(folder: RunFolder) -> str:
    """The shell command that starts TensorBoard on a run."""
    command = f"tensorboard --logdir={shlex.quote(str(folder.tensorboard))}"
    is_there = importlib.util.find_spec("tensorboard") is not None
    return command if is_there else f"pip install 'switchx[tensorboard]'; {command}"


def _drops_of(job: TrainingJob, folder: RunFolder) -> str | None:
    """A note on choices dropped at a job's capacity, from an earlier run; or None."""
    switch = job.model.switch
    earlier = folder if folder.is_begun else None
    if earlier is None and job.init_from is not None:
        earlier = RunFolder(job.init_from)
    if switch is None or earlier is None or jax.process_index():
        return None
    rows = job.batch_size // job.step.num_microbatches
    sizes = [layer_groups(switch, rows, length)[1] for length in job.sparse_lengths]
    return training_note(earlier.routing, job.model.sparse_layer_names, switch, max(sizes))
