# SPDX-License-Identifier: Apache-2.0
"""The start of a run: the parameters that it begins with, its data, and its records."""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import jax

from switchx.checkpoint.restore import (
    checkpoint_fingerprint,
    choose_step,
    restore_params,
)
from switchx.checkpoint.run_folder import RunFolder, read_decoding, read_rescaled
from switchx.data.downstream.templates import Templates
from switchx.data.mixtures import accounts_of, splits_read
from switchx.fields import describe, require
from switchx.files import write_atomically
from switchx.models.params import init_params
from switchx.object_store import is_address
from switchx.partitioning.mesh import MeshSpec
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.distillation.student import DistilledProgram
from switchx.training.initialize import Source
from switchx.training.job import TrainingJob
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.program import TrainingProgram
from switchx.training.resume import check_same_model, write_run_config
from switchx.training.step import StepConfig, TrainState, init_key
from switchx.training.text_evaluation import TextEvaluator
from switchx.tree import Tree, named_leaves

logger = logging.getLogger(__name__)


class FirstParams(Protocol):
    """Parameters of another model that a new run starts from.

    Attributes:
        notes: sentences for the user, complete once `state` was called.
        listing: JSON of the source of each parameter, for the run folder.
    """

    notes: tuple[str, ...]
    listing: str

    def state(self) -> TrainState:
        """The state at step 0."""


def first_params(job: TrainingJob, program: TrainingProgram) -> FirstParams | None:
    """Parameters of the run `init_from`, or drawn ones with the teacher's among them; or None.

    Args:
        program: the job's program, as `program_of` returns it.

    Raises:
        ValueError: the parameters do not exist, are of another vocabulary, or do not fit.
    """
    if job.distillation is not None and job.distillation.starts_from_teacher:
        return _TeachersParams(program)
    return None if job.init_from is None else Source(job, program)


def first_state(
    job: TrainingJob,
    program: TrainingProgram,
    first: FirstParams | None,
    run: RunFolder,
    note: Callable[[str], None],
) -> TrainState:
    """The state at step 0, drawn or from another run.

    Writes the job's description into the run folder; reports and records what came from where.
    """
    if jax.process_index() == 0:
        write_run_config(run, job)
    logger.info("reading or drawing the parameters, beginning the optimizer")
    if first is None:
        return program.init_state(None)
    state = first.state()
    for text in first.notes:
        note(text)
    if jax.process_index() == 0:
        write_atomically(run.initialization, first.listing.encode())
    return state


def require_apart(job: TrainingJob, run: RunFolder) -> None:
    """Requires that a run does not write where its corpora or another run read.

    Raises:
        ValueError: the folder lies among the texts, or in another run's checkpoints.
    """
    if run.is_in_store:
        return
    here = run.where.resolve()
    for task, _ in splits_read(job.source):
        is_table = isinstance(task.corpus, Templates)  # whose folder is not searched further
        named = task.corpus.source if is_table else getattr(task.corpus, "path", None)
        names = [named] if isinstance(named, (str, os.PathLike)) else named or ()
        for name in names:
            folder = Path(os.path.expanduser(name)).resolve()
            is_read = folder == here or (folder in here.parents and not is_table)
            is_hidden = is_read and any(
                part.startswith(".") for part in here.relative_to(folder).parts
            )
            require(
                is_address(name) or not folder.is_dir() or not is_read or is_hidden,
                f"model_dir={str(run.path)!r} lies in the data of task {task.name!r}, {name}, "
                "which would have the run's own files; give a folder elsewhere",
            )
    outer = next((e for e in here.parents if RunFolder(e).operative_config.exists()), None)
    require(
        outer is None or outer / "checkpoints" not in (here, *here.parents),
        f"model_dir={str(run.path)!r} lies in the checkpoints of the run {outer}; give that "
        "run, or a folder elsewhere",
    )


def corpora_record(job: TrainingJob, run: RunFolder, note: Callable) -> dict[Path, str]:
    """Reports what is read of the data's files, and returns it for the run folder."""
    accounts = accounts_of(job.source, job.data_dir)
    for account in accounts:
        note(str(account))
    return {run.corpora: json.dumps([*map(dataclasses.asdict, accounts)], indent=2)}


def evaluator_of(
    job: TrainingJob, run: RunFolder, mesh: jax.sharding.Mesh, make
) -> TextEvaluator | None:
    """The `TextEvaluator` for the job's evaluations, from `make`; None without text evaluation.

    It decodes by the defaults that the run has, or that it takes from where it begins.

    Raises:
        ValueError: the job has text evaluation, and `make` is None.
    """
    if job.text_evaluation is None:
        return None
    require(
        make is not None,
        "TrainingJob.text_evaluation generates texts, and train was given nothing that does; "
        "give text_evaluator=switchx.generated_evaluation.JobTexts",
    )
    first = job.init_from if job.lora is None else job.lora.base
    has_own = (run.config if first is None else run.initialization).is_file()
    folder = run if has_own else first and RunFolder(first)
    return make(job, mesh, {} if folder is None else read_decoding(folder))


class _TeachersParams:
    def __init__(self, program: DistilledProgram):
        self._program = program

    def state(self) -> TrainState:
        params, self._taken = self._program.started_params()
        self._names = list(named_leaves(params))
        return self._program.init_state(params)

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"{len(self._taken)} of {len(self._names)} parameter arrays are the teacher's, the "
            "others are drawn",
        )

    @property
    def listing(self) -> str:
        taken = {name: name if name in self._taken else None for name in self._names}
        teacher = self._program.job.distillation.teacher
        content = {"teacher": str(teacher), "parameters": taken}
        if rescaled := read_rescaled(RunFolder(teacher)):
            content["rescaled"] = rescaled
        return json.dumps(content, indent=2) + "\n"


def params_of_job(
    job: TrainingJob,
    model_dir: str | os.PathLike | None,
    step: int | Literal["best"] | None,
    mesh: MeshSpec | None,
) -> tuple[TrainingJob, Tree, int, str]:
    """Parameters for using a job's model outside of its training.

    Args:
        model_dir: run folder that has them; None takes those that training begins with.
        step: the step of a checkpoint in it; None is the newest complete one.
        mesh: the mesh over which the parameters are split; None uses the default device.

    Returns:
        The job, with the vocabulary of the folder; the parameters, their step, and a
        fingerprint of both and of the model's configuration.

    Raises:
        ValueError: the folder, the step or the source does not fit the job; a step without a
            folder; the parameters would be a teacher's.
    """
    # Settings only for training get their defaults: they may not fit these devices.
    alone = {"step": StepConfig(), "pipeline": ScheduleSpec(), "storage": StorageSpec()}
    init = dataclasses.replace(job.init, optimizer=False)
    used = dataclasses.replace(job, mesh=mesh or MeshSpec(), init=init, **alone)
    program = TrainingProgram(used, None if mesh else jax.local_devices()[:1])
    description = json.dumps(describe(job.model), sort_keys=True)
    if model_dir is not None:
        run = RunFolder(model_dir)
        job = check_same_model(run, job)
        step = choose_step(run, step)
        target = program.abstract_params
        params = restore_params(run.path, step, target=target, model=job.model)
        origin = checkpoint_fingerprint(run, step, job.vocabulary)
        return job, params, step, _fingerprint(description, origin)
    require(
        step is None,
        f"step={step!r} without model_dir; of INIT_FROM, give INIT_STEP={step!r}",
    )
    require(
        job.distillation is None or not job.distillation.starts_from_teacher,
        "TrainingJob.distillation: a student that starts from its teacher gets its parameters "
        "in training; give the model_dir of its run, or DISTILLATION=None",
    )
    require(
        job.lora is None,
        "TrainingJob.lora without model_dir: before training the model is its base; give the "
        "model_dir of the run of adapters, or LORA=None with INIT_FROM",
    )
    job.check_vocabulary()
    if job.init_from is None:
        at = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_params)
        draw = jax.jit(init_params, static_argnums=0, out_shardings=at)
        params, origin = draw(job.model, init_key(job.seed)), f"seed {job.seed}"
    else:
        source = Source(used, program)
        weights = checkpoint_fingerprint(RunFolder(job.init_from), source.step, None)
        params = source.params()
        origin = f"{source.listing} {weights} seed {job.seed}"
    return job, params, 0, _fingerprint(description, origin, job.vocabulary.fingerprint())


def _fingerprint(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
