# SPDX-License-Identifier: Apache-2.0
"""The choice of a job's program, where its step is one compiled program."""

from switchx.training.expert_copies import CopiesProgram, has_copies, is_by_task, require_copies
from switchx.training.job import TrainingJob
from switchx.training.offload.host_program import HostProgram
from switchx.training.pipelined_program import PipelinedProgram
from switchx.training.program import TrainingProgram


def compiled_program(job: TrainingJob, devices=None) -> TrainingProgram:
    """The program of a job without a teacher: that of the special tier it asks for, if any.

    Experts that training has on a disk are on the devices here, for evaluation.

    Raises:
        ValueError: something in the job does not go together.
    """
    require_copies(job)
    if job.storage.experts == "host":
        return HostProgram(job, devices)
    if job.mesh.pipe > 1:
        return PipelinedProgram(job, devices)
    if has_copies(job.model) or is_by_task(job.model):
        return CopiesProgram(job, devices)
    return TrainingProgram(job, devices)
