# SPDX-License-Identifier: Apache-2.0
"""How a run starts: which program trains it, and which parameters it begins with."""

from collections.abc import Callable

import jax

from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.training.distilled_logits import WrittenTeacherProgram, has_logits
from switchx.training.distilled_program import DistilledProgram
from switchx.training.host_program import compiled_program
from switchx.training.job import TrainingJob
from switchx.training.layered import LayeredProgram
from switchx.training.program import TrainingProgram
from switchx.training.resume import require_vocabulary_of
from switchx.tree import Tree, named_leaves, num_bytes


def program_of(job: TrainingJob, run: RunFolder, devices) -> TrainingProgram:
    """The program that a job is trained by.

    Raises:
        ValueError: something in the job does not go together.
    """
    if job.distillation is not None:
        is_written = has_logits(job.distillation.teacher)
        return (WrittenTeacherProgram if is_written else DistilledProgram)(job, devices)
    if job.storage.experts == "disk":
        return LayeredProgram(job, run, devices)
    return compiled_program(job, devices)


def initial_params(
    job: TrainingJob, program: TrainingProgram, note: Callable[[str], None]
) -> Tree | None:
    """The parameters that a new run starts from, None to draw them.

    Those of the run `init_from`, or drawn ones with the teacher's among them.

    Args:
        program: of `program_of`.
        note: told what came from where.

    Raises:
        ValueError: they are not there, of another vocabulary, or do not fit.
    """
    if job.distillation is not None and job.distillation.starts_from_teacher:
        params, names = program.started_params()
        note(
            f"{len(names)} of {len(named_leaves(params))} parameter arrays are the "
            "teacher's, the others are drawn"
        )
        return params
    if job.init_from is None:
        return None
    source = RunFolder(job.init_from)
    require_vocabulary_of(source, job, "init_from")
    target = program.abstract_params
    params = restore_params(source.root, target=target, model=job.model)
    note(
        f"restored {len(jax.tree.leaves(params))} parameter arrays, {num_bytes(params)} bytes, "
        f"from {source.root}; optimizer and step are fresh"
    )
    return params
