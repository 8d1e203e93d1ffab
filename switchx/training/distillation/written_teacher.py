# SPDX-License-Identifier: Apache-2.0
"""A teacher's most probable tokens on a disk, in place of the teacher.

The loader is deterministic, so a student that is trained with the same task, seed and batches
reads the batches that the teacher has read. `logits_folder.py` describes the files.

The teacher's probabilities are those of its K tokens, divided by their sum.
Dims: B batch, L length, V vocabulary of the student, K tokens kept
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from switchx.data.features import Batch
from switchx.data.vocabularies import load_vocabulary, save_vocabulary
from switchx.fields import require
from switchx.partitioning.collectives import connect_processes
from switchx.training.distillation.logits_folder import (
    CHECKSUM,
    MANIFEST,
    LogitsReader,
    LogitsWriter,
    folder_of_all,
)
from switchx.training.distillation.soft_loss import Teacher, WrittenTeacher, taught_by
from switchx.training.distillation.student import (
    DistilledProgram,
    TaughtProgram,
    require_beside_step,
)
from switchx.training.evaluate import eval_step
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from switchx.whole_folders import write_manifest


def write_logits(
    job: TrainingJob,
    folder,
    top: int,
    devices=None,
    note: Callable[[str], None] = lambda text: None,
) -> int:
    """Writes the teacher's logits for a job's batches, those of steps 1 to `train_steps`.

    All processes call it, and each writes its own rows.

    Args:
        job: the student's job, with a `distillation` from a run folder.
        folder: the folder to create; nothing may exist there.
        top: K, the number of tokens kept at each position.
        note: function that is called with sentences about the progress, for the user.

    Returns:
        Bytes of the files written, in the first process; other processes do not know it.

    Raises:
        ValueError: the teacher or the job do not fit (`DistilledProgram`), or K is above the
            vocabulary.
    """
    V = job.model.vocab_size
    require(1 <= top <= V, f"--top={top} of {V} ids; use 1 to {V}")
    require(job.train_steps > 0, "TRAIN_STEPS=0: there are no batches to read; use at least 1")
    program = DistilledProgram(job, devices)
    connect_processes(program.mesh)

    @functools.partial(jax.jit, out_shardings=program.batch_sharding)
    def largest(params, batch):
        teacher = Teacher(params, program.teacher, job.distillation)
        return jax.lax.top_k(teacher.logits(batch)[..., :V].astype(jnp.float32), top)

    loader = job.loader(program.shard)
    own = program.shard.rows(job.batch_size)
    is_first, num_bytes = jax.process_index() == 0, 0
    with folder_of_all(folder) as partial, program.scope():
        written = _rows_to_write(program, job.batch_size)
        places = np.flatnonzero(np.isin(own, written))
        writer = LogitsWriter(partial, written)
        for number in range(1, job.train_steps + 1):
            batch = next(loader)
            logit_BLK, token_BLK = largest(program.teacher_params, program.place(batch))
            arrays = (_local_rows(each)[places] for each in (token_BLK, logit_BLK))
            writer.write({name: rows[places] for name, rows in batch.items()}, *arrays)
            if number % job.log_every == 0:
                note(f"{number} of {job.train_steps} batches")
        writer.end()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("switchx_logits")
        manifest = program.teacher_record | {
            "top": top,
            "vocab_size": V,
            "architecture": job.model.architecture,
            "batch_size": job.batch_size,
        }
        if is_first:
            save_vocabulary(load_vocabulary(program.teacher_folder.root), partial)
            write_manifest(partial, MANIFEST, manifest, CHECKSUM)
            num_bytes = sum(path.stat().st_size for path in partial.iterdir())
    return num_bytes


def _rows_to_write(program: TrainingProgram, batch_size: int) -> tuple[int, ...]:
    """This process's rows that no process before it has."""
    shard = program.shard
    has_part = np.isin(np.arange(shard.count), shard.parts)
    if jax.process_count() > 1:
        of_all = multihost_utils.process_allgather(has_part)
        has_part &= ~np.any(of_all[: jax.process_index()], axis=0)
    parts = tuple(map(int, np.flatnonzero(has_part)))
    return dataclasses.replace(shard, parts=parts).rows(batch_size) if parts else ()


def _local_rows(array: jax.Array) -> np.ndarray:
    """The rows of an array, split along its rows, that this process's devices hold."""
    held = {each.index[0].start or 0: each.data for each in array.addressable_shards}
    return np.concatenate([np.asarray(held[start]) for start in sorted(held)])


def has_logits(folder) -> bool:
    """Whether a folder was written by `write_logits`."""
    return (pathlib.Path(folder).expanduser() / MANIFEST).is_file()


class WrittenTeacherProgram(TaughtProgram):
    """The programs of a job whose teacher's logits are on a disk."""

    def __init__(self, job: TrainingJob, devices=None):
        """Reads the manifest and the vocabulary, traces nothing.

        Raises:
            ValueError: the folder does not fit the job, or the job has settings that a student
                cannot have (`require_beside_step`).
        """
        require_beside_step(job)
        settings = job.distillation
        self._folder = pathlib.Path(job.distillation.teacher)
        self._folder = self._folder.expanduser().absolute()
        require(
            not settings.starts_from_teacher and settings.step is None,
            f"{self._folder} has a teacher's probabilities and none of its parameters; use "
            "Distillation.starts_from_teacher=False and step=None, and INIT_FROM to start from "
            "a run",
        )
        self._reader = LogitsReader(self._folder)
        self._about = self._reader.about
        for name, owner in (
            ("vocab_size", job.model),
            ("architecture", job.model),
            ("batch_size", job),
        ):
            own, theirs = getattr(owner, name), self._about.get(name)
            require(
                own == theirs,
                f"{name}={own!r} of the student, and {theirs!r} of the one that {self._folder} "
                "was written for; use that, or write it again",
            )
        require(
            load_vocabulary(self._folder).fingerprint() == job.vocabulary.fingerprint(),
            f"{self._folder} was written by another vocabulary than this job's; its token ids "
            "mean other things. Use the copy in that folder",
        )
        super().__init__(job, devices)

    def _steps(self):
        job = self.job
        self.slot_tables = self._initial_tables()
        train = functools.partial(
            self._train_step, seam=taught_by(WrittenTeacher(job.distillation))
        )
        evaluate = functools.partial(eval_step, job.model)
        return self._jitted(train, evaluate, *self._table_shardings)

    def place_for_training(self, batch: Batch) -> dict:
        """Places a training batch with the teacher's tokens and logits.

        Raises:
            ValueError: the teacher has not read this batch, or its file is damaged.
        """
        found = self._reader.read(batch, self.shard.rows(self.job.batch_size))
        added = {"teacher_token_ids": found["token_BLK"], "teacher_logits": found["logit_BLK"]}
        return self.place(batch | added)

    def abstract_batch(self, batch: dict) -> dict:
        """Shape structs of a batch with the teacher's tokens and logits."""
        shape = (*batch["decoder_target_tokens"].shape, self._about["top"])
        struct = functools.partial(jax.ShapeDtypeStruct, shape, sharding=self.batch_sharding)
        added = {"teacher_token_ids": jnp.int32, "teacher_logits": jnp.float32}
        return batch | {name: struct(dtype=dtype) for name, dtype in added.items()}

    @property
    def teacher_record(self) -> dict[str, Any]:
        """See `DistilledProgram.teacher_record`; with the number of tokens that were kept."""
        return {n: self._about[n] for n in ("teacher", "step", "fingerprint", "top")}

    @property
    def notes(self) -> tuple[str, ...]:
        teacher = self._about
        note = (
            f"teacher: the {teacher['top']} most probable tokens of {teacher['teacher']}, "
            f"checkpoint {teacher['step']}, in {self._folder}"
        )
        return (*super().notes, note)


def student_program(job: TrainingJob, devices=None) -> TrainingProgram:
    """The program of a job with a teacher: beside the student, or its logits on a disk.

    Raises:
        ValueError: the teacher does not exist, or does not fit the job.
    """
    is_written = has_logits(job.distillation.teacher)
    return (WrittenTeacherProgram if is_written else DistilledProgram)(job, devices)
