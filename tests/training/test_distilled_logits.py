# SPDX-License-Identifier: Apache-2.0
"""Logits on a disk: what is written, that students learn the same of it, what is refused."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.data.loader import TrainLoader
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.data.vocabularies import save_vocabulary
from switchx.partitioning.mesh import MeshSpec
from switchx.training.distillation.logits_folder import LogitsReader
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.distillation.written_teacher import (
    WrittenTeacherProgram,
    has_logits,
    write_logits,
)
from switchx.training.loop import train
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import program_of
from switchx.training.step import StepConfig
from tests.data.refusals import refused
from tests.training.jobs import DENSE, SPARSE, Events, make_job, make_params, run_model
from tests.training.saved_runs import lines, save_run
from tests.training.train_states import damage

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

STEPS, ONE = 3, jax.devices()[:1]


def job_of(teacher, **changes):
    settings = Distillation(str(teacher), soft_weight=0.5, starts_from_teacher=False)
    fields = {"model": DENSE, "train_steps": STEPS, "distillation": settings}
    return make_job(**(fields | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A sparse teacher's run, all of its logits and the four largest of each place."""
    base = tmp_path_factory.mktemp("teacher")
    run = save_run(base / "run", SPARSE)
    num_bytes = {
        top: write_logits(job_of(run), base / f"top_{top}", top, ONE) for top in (384, 4)
    }
    for top, number in num_bytes.items():
        assert number >= STEPS * 8 * 8 * top * 8  # rows, length, K, an id and a logit
        assert has_logits(base / f"top_{top}") and not has_logits(run)
    return base


def test_files_are_the_largest_logits_of_the_batches(folders):
    job = job_of(folders / "run")
    batch = next(TrainLoader(job.source, job.batches, seed=job.seed))
    written = LogitsReader(folders / "top_4").read(batch, range(8))
    np.testing.assert_array_equal(
        written["token_BLK"], np.load(folders / "top_4/0000001_0.npz")["token_BLK"]
    )
    # Some rows, as another process would have them.
    part = {name: rows[[2, 5]] for name, rows in batch.items()}
    of_part = LogitsReader(folders / "top_4").read(part, (2, 5))
    np.testing.assert_array_equal(of_part["logit_BLK"], written["logit_BLK"][[2, 5]])
    logits_BLV, _ = run_model(SPARSE, make_params(SPARSE, seed=9), batch, is_training=False)
    expected = np.sort(np.asarray(logits_BLV), axis=-1)[..., ::-1][..., :4]
    np.testing.assert_allclose(written["logit_BLK"], expected, rtol=1e-4, atol=1e-5)
    chosen = np.take_along_axis(np.asarray(logits_BLV), written["token_BLK"], axis=-1)
    np.testing.assert_allclose(chosen, expected, rtol=1e-4, atol=1e-5)
    about = json.loads((folders / "top_4/teacher.json").read_text())
    assert (about["step"], about["top"], about["vocab_size"]) == (9, 4, 384)
    assert re.fullmatch("[0-9a-f]{64}", about["fingerprint"])


def losses(job, folder) -> list[tuple[float, float]]:
    train(job, RunFolder(folder), events := Events(), devices=ONE)
    assert any(each[0] == "note" and "checkpoint 9" in each[1] for each in events)
    return [(line["loss"], line["soft_loss"]) for line in lines(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_all_logits_teach_what_the_teacher_teaches(folders, tmp_path):
    by_teacher = losses(job_of(folders / "run"), tmp_path / "a")
    by_file = losses(job_of(folders / "top_384"), tmp_path / "b")
    assert len(by_file) == STEPS
    np.testing.assert_allclose(by_file, by_teacher, rtol=1e-4)
    by_four = losses(job_of(folders / "top_4"), tmp_path / "c")
    assert not np.allclose(by_four, by_teacher, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # given ones
def test_a_mesh_and_microbatches_take_the_step_of_one_device(folders):
    found = []
    for mesh, parts in ((MeshSpec(), 1), (MeshSpec(data=2, model=2), 2)):
        job = job_of(folders / "top_4", mesh=mesh, step=StepConfig(num_microbatches=parts))
        program = WrittenTeacherProgram(job, jax.devices()[: mesh.num_devices(1)])
        batch = next(TrainLoader(job.source, job.batches, seed=job.seed))
        with program.scope():
            state = program.init_state(make_params(DENSE))
            _, metrics = program.train_step(state, program.place_for_training(batch))
            found.append((metrics.loss, metrics.sums.soft_loss, metrics.grad_norm))
    np.testing.assert_allclose(found[0], found[1], rtol=2e-5)


def test_what_does_not_fit_is_refused(folders, tmp_path):
    top = folders / "top_4"
    wide = dataclasses.replace(DENSE, vocab_size=383)
    settings = Distillation(str(top))
    for said, job in (
        ("starts_from_teacher=False and step=None", job_of(top, distillation=settings)),
        ("vocab_size=383 of the student, and 384", job_of(top, model=wide)),
        ("batch_size=16 of the student, and 8 of the one that", job_of(top, batch_size=16)),
        (
            "<any>distillation=<any>with StorageSpec.experts='disk'<any>",
            job_of(top, storage=StorageSpec("disk")),
        ),
    ):
        with refused(said):
            WrittenTeacherProgram(job, ONE)
    for name, value in (("seed", 1), ("train_steps", STEPS + 1)):
        job = job_of(top, **{name: value})
        loader = TrainLoader(job.source, job.batches, seed=job.seed)
        *_, last = [next(loader) for _ in range(job.train_steps)]
        with refused("has no logits of this batch"):
            WrittenTeacherProgram(job, ONE).place_for_training(last)
    with refused("--top=385 of 384 ids"):
        write_logits(job_of(folders / "run"), tmp_path / "x", 385, ONE)
    with refused(f"{top} exists"):
        write_logits(job_of(folders / "run"), top, 4, ONE)


def test_a_run_goes_on_with_the_logits_that_it_began_with(folders, tmp_path):
    run, job = RunFolder(tmp_path), job_of(folders / "top_4")
    (run.checkpoints / "1").mkdir(parents=True)
    run.config.write_text("{}")
    record = WrittenTeacherProgram(job, ONE).teacher_record
    assert (record["step"], record["top"]) == (9, 4)
    run.taught_by.write_text(json.dumps(record | {"teacher": "moved"}))
    assert program_of(job, run, ONE).teacher_record == record
    other = record | {"fingerprint": "of another run"}
    for there in (other, record | {"top": 5}):
        run.taught_by.write_text(json.dumps(there))
        with refused(f"{folders / 'top_4'} has another teacher now"):
            program_of(job, run, ONE)
    run.taught_by.write_text("{}")
    with refused("taught_by.json cannot be read (it names no teacher)"):
        program_of(job, run, ONE)


def test_damaged_folders_are_refused(folders, tmp_path):
    copy = tmp_path / "copy"
    write_logits(job_of(folders / "run", train_steps=1), copy, 4, ONE)
    job = job_of(copy)
    program = WrittenTeacherProgram(job, ONE)
    batch = next(TrainLoader(job.source, job.batches, seed=job.seed))
    damage(copy / "0000001_0.npz")
    with refused(f"{copy / '0000001_0.npz'} is damaged"):
        program.place_for_training(batch)
    save_vocabulary(TokenIdVocabulary(384), copy)
    with refused("was written by another vocabulary"):
        WrittenTeacherProgram(job, ONE)
    (copy / "teacher.json").write_text("{}")
    with refused("its teacher.json is damaged"):
        WrittenTeacherProgram(job, ONE)
