# SPDX-License-Identifier: Apache-2.0
"""How a run starts: which program trains it, and which parameters it begins with."""

import json
from typing import Protocol

from switchx.checkpoint.run_folder import RunFolder
from switchx.training.distilled_logits import student_program
from switchx.training.distilled_program import DistilledProgram
from switchx.training.host_program import compiled_program
from switchx.training.initialize import Source
from switchx.training.job import TrainingJob
from switchx.training.layered import LayeredProgram
from switchx.training.program import TrainingProgram
from switchx.training.step import TrainState
from switchx.tree import named_leaves


def program_of(job: TrainingJob, run: RunFolder, devices) -> TrainingProgram:
    """The program that a job is trained by.

    Raises:
        ValueError: something in the job does not go together.
    """
    if job.distillation is not None:
        return student_program(job, devices)
    if job.storage.experts == "disk":
        return LayeredProgram(job, run, devices)
    return compiled_program(job, devices)


class FirstParams(Protocol):
    """Parameters of another model that a new run starts from.

    Attributes:
        notes: what a person should be told, once `state` was called.
        listing: JSON of what came from where, for the run folder.
    """

    notes: tuple[str, ...]
    listing: str

    def state(self) -> TrainState:
        """The state at step 0."""


def first_params(job: TrainingJob, program: TrainingProgram) -> FirstParams | None:
    """Those of the run `init_from`, or drawn ones with the teacher's among them; or None.

    Args:
        program: of `program_of`.

    Raises:
        ValueError: they are not there, of another vocabulary, or do not fit.
    """
    if job.distillation is not None and job.distillation.starts_from_teacher:
        return _TeachersParams(program)
    return None if job.init_from is None else Source(job, program)


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
        return json.dumps({"teacher": str(teacher), "parameters": taken}, indent=2) + "\n"
