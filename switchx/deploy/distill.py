# SPDX-License-Identifier: Apache-2.0
"""Distillation as a part of a deployment: the reduced model learns from a teacher.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1: the compression of the second step, a
student with fewer experts. It is trained like any run (`training/loop.py`), on the run's own
task with its own optimizer, schedule and batches, from step 0, on one device.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from switchx import api
from switchx.checkpoint.restore import checkpoint_fingerprint, choose_step
from switchx.checkpoint.retention import Retention
from switchx.checkpoint.run_folder import RunFolder, read_model_config
from switchx.data.vocabularies import load_vocabulary
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.distillation.soft_loss import Distillation, check_teacher
from switchx.training.job import InitConfig, TrainingJob
from switchx.training.loop import train
from switchx.training.offload.storage_spec import StorageSpec


@dataclasses.dataclass(frozen=True)
class CheckedTeacher:
    """A teacher that can teach the deployed model.

    Attributes:
        folder, step: run folder of the teacher, and step of its checkpoint.
        fingerprint: fingerprint of the teacher's model; after a change the reduced model is
            made again.
    """

    folder: str
    step: int
    fingerprint: str

    @classmethod
    def of(cls, model_dir: str, student: ModelConfig, student_run: RunFolder):
        """Reads its configuration, its vocabulary and its checkpoint's bytes.

        Raises:
            ValueError: there is no such teacher, or it cannot teach this student.
        """
        run = RunFolder(model_dir)
        check_teacher(student, read_model_config(run), str(run.root))
        step, vocabulary = choose_step(run), load_vocabulary(run.root)
        require(
            vocabulary.fingerprint() == load_vocabulary(student_run.root).fingerprint(),
            f"--teacher={model_dir} was trained with another vocabulary than "
            f"{student_run.root}; its token ids mean other things: give a teacher of the same",
        )
        return cls(str(run.where), step, checkpoint_fingerprint(run, step, vocabulary))


def distilled(
    teacher: CheckedTeacher,
    job: TrainingJob,
    config: ModelConfig,
    start: pathlib.Path,
    scratch: pathlib.Path,
    num_steps: int,
    note: Callable[[str], None],
) -> dict:
    """Trains a student for `num_steps` steps and returns its parameters.

    Args:
        job: the run's job; its mesh, stages, length buckets, storage and generated texts are
            not used.
        config: the student's configuration.
        start: run folder with the parameters from which the student starts.
        scratch: folder into which training writes.
    """
    switch = config.switch
    if switch is not None:  # on one device nothing is sent
        switch = dataclasses.replace(switch.with_dispatcher("auto"), num_replicas=0)
    job = dataclasses.replace(
        job,
        model=dataclasses.replace(config, switch=switch),
        distillation=Distillation(teacher.folder, teacher.step, starts_from_teacher=False),
        init_from=str(start),
        init=InitConfig(),  # the run's own was for its start
        lora=None,  # merged
        train_steps=num_steps,
        log_every=min(job.log_every, num_steps),
        eval_every=num_steps,
        checkpoint_every=num_steps,
        mesh=MeshSpec(data=1),
        step=dataclasses.replace(job.step, bucket_bytes=None),
        pipeline=ScheduleSpec(),
        storage=StorageSpec(),
        retention=Retention(),
        text_evaluation=None,
    )
    train(job, RunFolder(scratch), _Notes(note), devices=jax.devices()[:1])
    return api.load(scratch).params


class _Notes:
    """A training reporter that passes its lines to `note` (`training.loop.Reporter`)."""

    def __init__(self, note: Callable[[str], None]):
        self.note = note

    def begin(self, first_step: int, last_step: int) -> None:
        self.note(f"distilling, steps {first_step} to {last_step}")

    def stepped(self, step: int) -> None:
        pass

    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        self.note(
            f"step {step}: loss {metrics['loss']:.3f}, soft loss {metrics['soft_loss']:.3f}"
        )

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        self.note(f"step {step}: validation cross-entropy {metrics['cross_entropy']:.3f}")
