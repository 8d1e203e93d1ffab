# SPDX-License-Identifier: Apache-2.0
"""A teacher's most probable tokens on a disk, in the place of the teacher.

The loader is deterministic, so a student that is trained by the same task, seed and batches
reads the batches that the teacher has read: a folder has a file for each, named by its digest.

    teacher.json       whose they are: fingerprint, step, K, vocabulary size; every file's size
    <digest>.npz       token_BLK int32, logit_BLK float32, the largest first
    vocabulary.*       the teacher's, as a run folder has it

The teacher's probabilities are those of its K tokens, divided by their sum.
Dims: B batch, L length, V vocabulary of the student, K tokens kept
"""

import functools
import io
import pathlib
import zipfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from switchx.checkpoint.restore import checkpoint_fingerprint
from switchx.data.data_dir import write_atomically
from switchx.data.features import Batch, batch_digest
from switchx.data.loader import TrainLoader
from switchx.data.vocabularies import load_vocabulary, save_vocabulary
from switchx.fields import require
from switchx.manifest import new_folder, read_manifest, write_manifest
from switchx.training.distillation import Teacher, WrittenTeacher
from switchx.training.distilled_program import DistilledProgram, require_beside_step
from switchx.training.evaluate import eval_step
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from switchx.training.step import train_step

MANIFEST = "teacher.json"
CHECKSUM = "crc32"


def write_logits(
    job: TrainingJob,
    folder,
    top: int,
    devices=None,
    note: Callable[[str], None] = lambda text: None,
) -> int:
    """Writes the teacher's logits of a job's batches, of steps 1 to `train_steps`.

    Args:
        job: of the student, with a `distillation` from a run folder.
        folder: to make; nothing may be there.
        top: K, tokens kept of each place.
        note: told what is done.

    Returns:
        Bytes of files.

    Raises:
        ValueError: the teacher or the job do not fit (`DistilledProgram`), there are several
            processes, or K is above the vocabulary.
    """
    V = job.model.vocab_size
    require(1 <= top <= V, f"--top={top} of {V} ids; use 1 to {V}")
    require(job.train_steps > 0, "TRAIN_STEPS=0: there are no batches to read; use at least 1")
    _require_one_process()
    program = DistilledProgram(job, devices)

    @jax.jit
    def largest(params, batch):
        teacher = Teacher(params, program.teacher, job.distillation)
        return jax.lax.top_k(teacher.logits(batch)[..., :V].astype(jnp.float32), top)

    loader = TrainLoader(
        job.source, job.batches, seed=job.seed, data_dir=job.data_dir, shard=program.shard,
        prefetch=job.prefetch,
    )  # fmt: skip
    run, step = program.teacher_folder, program.teacher_step
    vocabulary = load_vocabulary(run.root)
    with new_folder(folder) as partial, program.scope():
        save_vocabulary(vocabulary, partial)
        for number in range(1, job.train_steps + 1):
            batch = next(loader)
            logit_BLK, token_BLK = largest(program.teacher_params, program.place(batch))
            file = io.BytesIO()
            np.savez(file, token_BLK=np.asarray(token_BLK), logit_BLK=np.asarray(logit_BLK))
            write_atomically(partial / f"{batch_digest(batch)}.npz", file.getvalue())
            if number % job.log_every == 0:
                note(f"{number} of {job.train_steps} batches")
        about = {
            "teacher": str(run.root),
            "step": step,
            "fingerprint": checkpoint_fingerprint(run, step, vocabulary),
            "top": top,
            "vocab_size": V,
            "architecture": job.model.architecture,
        }
        files = write_manifest(partial, MANIFEST, about, CHECKSUM)["files"]
    return sum(size for size, _ in files.values())


def has_logits(folder) -> bool:
    """Whether a folder is one of `write_logits`."""
    return (pathlib.Path(folder).expanduser() / MANIFEST).is_file()


class WrittenTeacherProgram(TrainingProgram):
    """The programs of a job whose teacher's logits are on a disk."""

    def __init__(self, job: TrainingJob, devices=None):
        """Reads the manifest and the vocabulary, traces nothing.

        Raises:
            ValueError: the folder does not fit the job, or the job has what no student has
                (`require_beside_step`).
        """
        require_beside_step(job)
        settings, self._folder = job.distillation, pathlib.Path(job.distillation.teacher)
        self._folder = self._folder.expanduser().absolute()
        require(
            not settings.starts_from_teacher and settings.step is None,
            f"{self._folder} has a teacher's probabilities and none of its parameters; use "
            "Distillation.starts_from_teacher=False and step=None, and INIT_FROM to start from "
            "a run",
        )
        _require_one_process()
        try:
            self._about = read_manifest(self._folder, MANIFEST, CHECKSUM)
        except ValueError as error:
            raise ValueError(f"{self._folder}: {error}; write it again") from error
        for name in ("vocab_size", "architecture"):
            here, there = getattr(job.model, name), self._about[name]
            require(
                here == there,
                f"{name}={here!r} of the student, and {there!r} of the one that {self._folder} "
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
        train = functools.partial(
            train_step, job.model, job.loss, job.step, self.optimizer,
            teacher=WrittenTeacher(job.distillation),
        )  # fmt: skip
        return self._jitted(train, functools.partial(eval_step, job.model))

    def place_for_training(self, batch: Batch) -> dict:
        """With the teacher's tokens and logits.

        Raises:
            ValueError: the teacher has not read this batch, or its file is damaged.
        """
        path = self._folder / f"{batch_digest(batch)}.npz"
        require(
            path.name in self._about["files"],
            f"{self._folder} has no logits of this batch: it was written for another task, "
            "seed, BATCH_SIZE or lengths, or for fewer than TRAIN_STEPS; use those, or write "
            "it again",
        )
        try:
            with np.load(path) as arrays:
                added = {"teacher_token_ids": arrays["token_BLK"]}
                added["teacher_logits"] = arrays["logit_BLK"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged ({error}); write it again") from error
        return self.place(batch | added)

    def abstract_batch(self, batch: dict) -> dict:
        """With those of the teacher's tokens and logits."""
        shape = (*batch["decoder_target_tokens"].shape, self._about["top"])
        struct = functools.partial(jax.ShapeDtypeStruct, shape, sharding=self.batch_sharding)
        added = {"teacher_token_ids": jnp.int32, "teacher_logits": jnp.float32}
        return batch | {name: struct(dtype=dtype) for name, dtype in added.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        about = self._about
        said = (
            f"teacher: the {about['top']} most probable tokens of {about['teacher']}, "
            f"checkpoint {about['step']}, in {self._folder}"
        )
        return (*super().notes, said)


def student_program(job: TrainingJob, devices=None) -> TrainingProgram:
    """The program of a job with a teacher: beside the student, or its logits on a disk.

    Raises:
        ValueError: the teacher is not there, or does not fit the job.
    """
    is_written = has_logits(job.distillation.teacher)
    return (WrittenTeacherProgram if is_written else DistilledProgram)(job, devices)


def _require_one_process() -> None:
    require(
        jax.process_count() == 1,
        f"{jax.process_count()} processes: each reads a part of a batch, and logits are kept "
        "of whole ones; use one process, or the teacher itself",
    )
