# SPDX-License-Identifier: Apache-2.0
"""A job with a teacher as programs: `TrainingProgram`'s methods, two models in a step.

Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961), section 4.2. The teacher's parameters
are split over the mesh by the rules of the student's. They are an argument of the step, and not
of the training state: no checkpoint has them.
"""

import dataclasses
import functools
import json
from typing import Any

import jax

from switchx import tree
from switchx.checkpoint.restore import (
    checkpoint_fingerprint,
    choose_step,
    restore_params,
)
from switchx.checkpoint.run_folder import RunFolder, read_model_config
from switchx.data.vocabularies import load_vocabulary
from switchx.fields import require
from switchx.files import write_atomically
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params, init_params
from switchx.models.stored_experts import TEACHER_IN_STORAGE
from switchx.moe.capacity import rows_of_groups
from switchx.partitioning.mesh import PIPE, MeshSpec
from switchx.training.distillation.soft_loss import (
    Teacher,
    check_teacher,
    taught_by,
    with_weights_of,
)
from switchx.training.evaluate import eval_step
from switchx.training.expert_copies_program import CopiesProgram
from switchx.training.job import TrainingJob, with_suited_dispatcher
from switchx.training.resume import require_vocabulary_of
from switchx.training.step import init_key


class TaughtProgram(CopiesProgram):
    """The programs of a student.

    Attributes:
        teacher_record: which model the teacher is, as recorded in the run's `taught_by.json`.
    """

    teacher_record: dict[str, Any]

    def write_records(self, run: RunFolder, *, is_new: bool) -> None:
        if is_new:
            record = json.dumps(self.teacher_record, indent=2) + "\n"
            write_atomically(run.taught_by, record.encode())


class DistilledProgram(TaughtProgram):
    """The programs of a job with a `distillation`.

    Attributes:
        teacher: configuration of the teacher as it is evaluated here: with a dispatcher that
            runs on every mesh, and without replicas.
        teacher_folder, teacher_step: run folder and checkpoint of the teacher.
    """

    def __init__(self, job: TrainingJob, devices=None):
        """Reads the teacher's configuration and the bytes of its checkpoint, traces nothing.

        Raises:
            ValueError: there is no such teacher, it cannot teach this student, or the job has
                stages, buckets or experts in storage; and as in `TrainingProgram`.
        """
        require_beside_step(job)
        settings = job.distillation
        self.teacher_folder = RunFolder(settings.teacher)
        self.teacher = teacher_config(job)
        require_vocabulary_of(self.teacher_folder, job, "Distillation.teacher")
        self.teacher_step = choose_step(self.teacher_folder, settings.step)
        super().__init__(job, devices)

    def _steps(self):
        job = self.job
        self._abstract_teacher = self.placed(abstract_params(self.teacher))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._abstract_teacher)

        def train_step(state, batch, teacher_params, *tables):
            teacher = Teacher(teacher_params, self.teacher, job.distillation)
            return self._train_step(state, batch, *tables, seam=taught_by(teacher))

        self.slot_tables = self._initial_tables()
        evaluate = functools.partial(eval_step, job.model)
        return self._jitted(train_step, evaluate, shardings, *self._table_shardings)

    @property
    def teacher_record(self) -> dict[str, Any]:
        """Which model the teacher is; a copy of it has the same `step` and `fingerprint`."""
        folder, step = self.teacher_folder, self.teacher_step
        fingerprint = checkpoint_fingerprint(folder, step, load_vocabulary(folder.root))
        return {"teacher": str(folder.where), "step": step, "fingerprint": fingerprint}

    @functools.cached_property
    def teacher_params(self) -> tree.Tree:
        """The teacher's parameters, read when first needed, each device its part."""
        return restore_params(
            self.teacher_folder.path,
            self.teacher_step,
            target=self._abstract_teacher,
            model=self.teacher,
        )

    @property
    def beside(self) -> tuple:
        """The teacher's parameters, and what is beside a student without a teacher."""
        return (self.teacher_params, *super().beside)

    @property
    def abstract_beside(self) -> tuple:
        """Shape structs of `beside`; the teacher's checkpoint is not read."""
        return (self._abstract_teacher, *super().abstract_beside)

    def started_params(self) -> tuple[tree.Tree, list[str]]:
        """Freshly drawn parameters with the teacher's among them, and the names of the latter.

        Raises:
            ValueError: see `distillation.with_weights_of`.
        """
        model, names = self.job.model, []

        def start(teacher_params):
            params = init_params(model, init_key(self.job.seed))
            params, taken = with_weights_of(model, params, self.teacher, teacher_params)
            names.extend(taken)
            return params

        start = jax.jit(start, out_shardings=self.shardings.params)
        return start(self.teacher_params), names

    @property
    def teacher_parameters(self) -> int:
        return tree.num_elements(self._abstract_teacher)

    @property
    def notes(self) -> tuple[str, ...]:
        note = (
            f"teacher: {self.teacher_parameters:,} parameters of "
            f"{self.teacher_folder.where}, checkpoint {self.teacher_step}"
        )
        return (*super().notes, note, *self._group_notes())

    def _group_notes(self) -> tuple[str, ...]:
        """Whether microbatches change what a sparse teacher drops."""
        job, parts = self.job, self.job.step.num_microbatches
        switch = self.teacher.switch
        if switch is None or switch.router.overflow == "dropless" or parts == 1:
            return ()

        def rows_of(model: ModelConfig) -> int | None:
            lengths = dataclasses.replace(job, model=model, distillation=None).sparse_lengths
            return rows_of_groups(model.switch, job.batch_size, lengths, parts)

        own = 1 if job.model.switch is None else rows_of(job.model) or 1
        theirs = rows_of(self.teacher)
        if theirs is not None and own % theirs == 0:
            return ()
        return (
            f"the teacher's routing groups of {switch.group_size} tokens are not "
            f"those of the whole batch in {parts} microbatches: it may drop other tokens",
        )


def require_beside_step(job: TrainingJob) -> None:
    """Raises ValueError if a job has stages, buckets or experts in storage."""
    job.require_storage({})
    for name, is_used in (
        (f"MeshSpec.{PIPE}={job.mesh.pipe}", job.mesh.pipe > 1),
        (f"StepConfig.bucket_bytes={job.step.bucket_bytes}", job.step.bucket_bytes),
    ):
        require(
            not is_used,
            f"TrainingJob.distillation with {name}: {TEACHER_IN_STORAGE}; leave out one "
            "of the two",
        )


def teacher_config(job: TrainingJob) -> ModelConfig:
    """The teacher of a job as it is evaluated beside the student.

    Raises:
        ValueError: there is no run folder, or its model cannot teach this one.
    """
    folder = RunFolder(job.distillation.teacher)
    teacher = as_teacher(read_model_config(folder), job.mesh)
    check_teacher(job.model, teacher, str(folder.where))
    longest = max(job.sequence_lengths)
    require(
        not teacher.has_length_limit or longest <= teacher.max_length,
        f"rows of {longest} tokens do not fit the {teacher.max_length} positions of the "
        f"teacher in {folder.where}; use shorter rows, or another teacher",
    )
    return teacher


def as_teacher(config: ModelConfig, mesh: MeshSpec) -> ModelConfig:
    """The model as it is evaluated beside a student on a mesh."""
    if config.switch is None or config.build is not None:
        return config
    switch = dataclasses.replace(config.switch.with_dispatcher("auto"), num_replicas=0)
    return with_suited_dispatcher(dataclasses.replace(config, switch=switch), mesh)
