# SPDX-License-Identifier: Apache-2.0
"""The choice of a job's program: the plain one, or that of the special tier it asks for."""

import dataclasses
import logging
from typing import Any

from switchx.checkpoint.restore import checkpoint_paths, choose_step
from switchx.checkpoint.run_folder import RunFolder
from switchx.fields import require
from switchx.object_store import read_json_object
from switchx.partitioning.collectives import connect_processes
from switchx.training.adapter_program import AdapterProgram
from switchx.training.distillation.student import DistilledProgram
from switchx.training.distillation.written_teacher import (
    WrittenTeacherProgram,
    has_logits,
    student_program,
)
from switchx.training.expert_copies_program import (
    CopiesProgram,
    has_copies,
    is_by_task,
    require_copies,
)
from switchx.training.job import TrainingJob
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.host_program import HostProgram
from switchx.training.pipelined_program import PipelinedProgram
from switchx.training.program import TrainingProgram

logger = logging.getLogger(__name__)


def program_of(job: TrainingJob, run: RunFolder, devices) -> TrainingProgram:
    """The program that trains a job, with the processes of its mesh connected.

    Raises:
        ValueError: settings of the job do not go together, or the run began with a teacher
            that no longer exists.
    """
    if job.lora is not None:
        program = AdapterProgram(job, run, devices)
    elif job.distillation is not None:
        program = _student_program(job, run, devices)
    elif job.storage.experts == "disk":
        program = LayeredProgram(job, run, devices)
    else:
        program = compiled_program(job, devices)
    connect_processes(program.mesh)
    return program


def compiled_program(job: TrainingJob, devices=None) -> TrainingProgram:
    """The program of a job without a teacher: that of the special tier it asks for, if any.

    Experts that training keeps on a disk are on the devices here, for evaluation, and adapters
    are merged.

    Raises:
        ValueError: settings of the job do not go together.
    """
    require_copies(job)
    if job.storage.experts == "host":
        return HostProgram(job, devices)
    if job.mesh.pipe > 1:
        return PipelinedProgram(job, devices)
    if has_copies(job.model) or is_by_task(job.model):
        return CopiesProgram(job, devices)
    return TrainingProgram(job, devices)


def _student_program(
    job: TrainingJob, run: RunFolder, devices
) -> DistilledProgram | WrittenTeacherProgram:
    """The student's program, with the teacher of the run's checkpoints if there are any."""
    recorded = _teacher_of(run) if checkpoint_paths(run.checkpoints) else None
    if recorded is None:
        return student_program(job, devices)
    where = f"{run.where} was taught by checkpoint {recorded['step']} of {recorded['teacher']}"
    way_out = (
        "put it back, or train in another model_dir; INIT_FROM="
        f"{str(run.path)!r} with Distillation.starts_from_teacher=False keeps what was learnt"
    )
    teacher = job.distillation.teacher
    if not has_logits(teacher):
        try:
            choose_step(RunFolder(teacher), recorded["step"])
        except ValueError as error:
            raise ValueError(f"{where}, which is not there: {error}; {way_out}") from error
        settings = dataclasses.replace(job.distillation, step=recorded["step"])
        job = dataclasses.replace(job, distillation=settings)
    program = student_program(job, devices)
    # A copy elsewhere is the same teacher.
    current = program.teacher_record | {"teacher": recorded["teacher"]}
    require(current == recorded, f"{where}, and {teacher} has another teacher now; {way_out}")
    return program


def _teacher_of(run: RunFolder) -> dict[str, Any] | None:
    """The record of the teacher that `first_state` wrote; None in older runs, which have none.

    Raises:
        ValueError: the record cannot be read.
    """
    if not run.taught_by.exists():
        logger.warning(
            "%s does not say which checkpoint of the teacher it began with: it goes on with "
            "the one that Distillation.step means now",
            run.where,
        )
        return None
    try:
        content = read_json_object(run.taught_by)
        if not {"teacher", "step", "fingerprint"} <= content.keys():
            raise ValueError("it names no teacher")
        return content
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run.taught_by} cannot be read ({error}); without that file the run goes on with "
            "the checkpoint that Distillation.step means now"
        ) from error
