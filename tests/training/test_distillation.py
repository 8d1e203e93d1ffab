# SPDX-License-Identifier: Apache-2.0
"""Distillation: the soft loss and its gradients against NumPy, meshes, the loop, refusals.

Dims: B batch, L length, V vocabulary
"""

import dataclasses
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.checkpoint.checkpointer import Checkpointer
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.retention import Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.data.vocabularies import save_vocabulary
from switchx.models.config import SwitchConfig
from switchx.models.unroll import unrolled
from switchx.partitioning.mesh import MeshSpec
from switchx.training.distillation import student
from switchx.training.distillation.soft_loss import (
    Distillation,
    Teacher,
    WrittenTeacher,
    distilled_sums,
    soft_loss,
    taught_by,
    with_weights_of,
)
from switchx.training.distillation.student import DistilledProgram
from switchx.training.loop import train
from switchx.training.losses import LossConfig
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig, gradients, init_state
from tests.compare import assert_close, slopes
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    LOSS,
    SPARSE,
    SWITCH,
    Events,
    make_batch,
    make_job,
    make_params,
)
from tests.training.saved_runs import lines, save_run

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

PLAIN = LossConfig(layer_reduction="mean", z_loss=0.0)
FEWER = dataclasses.replace(SPARSE, switch=dataclasses.replace(SWITCH, num_experts=2))


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def oracle(logits, teacher, targets, weights, s: float, T: float) -> tuple[float, float]:
    """The mixture and its soft part, in float64."""
    teacher = teacher[..., : logits.shape[-1]]
    log_p, log_q = log_softmax(teacher / T), log_softmax(logits / T)
    soft = T**2 * np.sum(np.sum(np.exp(log_p) * (log_p - log_q), -1) * weights)
    own = np.take_along_axis(log_softmax(logits), targets[..., None], -1)[..., 0]
    return (1 - s) * -np.sum(own * weights) + s * soft, soft


@pytest.fixture(scope="module")
def rows():
    """Logits of a student of 7 ids and of a teacher of 9, targets, weights with padding."""
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, 3, 7)) * 2, rng.normal(size=(2, 3, 9)) * 3
    return (
        student,
        teacher,
        rng.integers(0, 7, (2, 3), np.int32),
        np.array([[1.0, 1, 0], [1, 0.5, 1]]),
    )


@pytest.mark.parametrize(("s", "T"), [(0.25, 1.0), (0.6, 3.0), (1.0, 0.5)])
def test_loss_and_raw_gradient_are_those_of_float64(rows, s, T):
    student, teacher, targets, weights = rows
    batch = {"decoder_target_tokens": targets, "decoder_loss_weights": weights}
    settings = Distillation("teacher", soft_weight=s, temperature=T)
    # All tokens of a teacher, as they would be on a disk.
    order = np.argsort(-teacher[..., :7], axis=-1)
    batch["teacher_token_ids"] = order.astype(np.int32)
    largest = np.take_along_axis(teacher, order, -1)
    batch["teacher_logits"] = largest.astype(np.float32)

    def loss(logits_BLV):
        sums = distilled_sums(logits_BLV, batch, PLAIN, WrittenTeacher(settings))
        return sums.loss, sums

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(student.astype(np.float32))
    expected, soft = oracle(student, teacher, targets, weights, s, T)
    np.testing.assert_allclose([value, sums.soft_loss], [expected, soft], rtol=2e-6)
    arrays = student.astype(np.float32), teacher.astype(np.float32), weights, T
    np.testing.assert_allclose(soft_loss(*arrays), soft, rtol=2e-6)
    found = slopes(lambda z: oracle(z, teacher, targets, weights, s, T)[0], student)
    np.testing.assert_allclose(gradient, found, atol=2e-6)
    # By hand: (1 - s) (q - target) + s T (q_T - p_T).
    q, q_T = np.exp(log_softmax(student)), np.exp(log_softmax(student / T))
    p_T = np.exp(log_softmax(teacher[..., :7] / T))
    by_hand = (1 - s) * (q - np.eye(7)[targets]) + s * T * (q_T - p_T)
    np.testing.assert_allclose(gradient, by_hand * weights[..., None], atol=2e-6)


def test_a_student_that_is_its_teacher_costs_nothing_and_certain_teachers_are_finite():
    logits = np.array([[[0.0, 200.0, -200.0]]], np.float32)
    assert float(soft_loss(logits, logits, np.ones((1, 1)), 1.0)) == 0
    value, gradient = jax.value_and_grad(soft_loss)(-logits, logits, np.ones((1, 1)), 1.0)
    assert np.isfinite(value) and np.isfinite(gradient).all() and value == 400


@pytest.fixture(scope="module")
def taught():
    """A sparse teacher of a dense student, and the raw gradients of a step."""
    batch, params = make_batch(DENSE, 8), make_params(DENSE, seed=1)
    settings = Distillation("teacher", soft_weight=0.5, temperature=2.0)
    teacher = Teacher(make_params(SPARSE), SPARSE, settings)

    @jax.jit
    def whole(teacher):
        key = jax.random.key(0)
        return gradients(
            DENSE, LOSS, StepConfig(), params, batch, key=key, seam=taught_by(teacher)
        )

    return batch, params, teacher, whole


@pytest.mark.slow  # two programs; the loss and its gradient: above
def test_the_teacher_changes_what_is_learnt_and_is_not_differentiated(taught):
    batch, params, teacher, whole = taught
    grads, value, sums, _ = whole(teacher)
    logits = teacher.logits(batch)
    assert logits.shape == (*batch["decoder_target_tokens"].shape, DENSE.vocab_size)

    def by_teacher(teacher_params):
        return jnp.sum(dataclasses.replace(teacher, params=teacher_params).logits(batch))

    of_teacher = jax.grad(by_teacher)(teacher.params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(of_teacher))
    assert float(sums.soft_loss) > 1
    alone, hard, plain, _ = gradients(
        DENSE, LOSS, StepConfig(), params, batch, key=jax.random.key(0)
    )
    assert plain.soft_loss is None
    tokens = float(sums.tokens)
    mixed = 0.5 * float(hard) + 0.5 * float(sums.soft_loss) / tokens
    np.testing.assert_allclose(value, mixed, rtol=1e-6)
    assert not np.allclose(
        grads["decoder"]["norm"]["scale_D"], alone["decoder"]["norm"]["scale_D"]
    )


@pytest.mark.slow  # a step of microbatches: test_distilled_logits.py
def test_microbatches_are_the_whole_batch(taught):
    batch, params, teacher, whole = taught
    expected = whole(teacher)
    found = gradients(
        DENSE, LOSS, StepConfig(num_microbatches=4), params, batch,
        key=jax.random.key(0), seam=taught_by(teacher),
    )  # fmt: skip
    assert_close(found, expected, rtol=2e-5, atol=1e-6)


def test_students_start_with_weights_of_layers_without_experts():
    scanned = dataclasses.replace(DENSE, scan_layers=True)
    teacher = dataclasses.replace(SPARSE, scan_layers=True, vocab_size=400)
    own, theirs = make_params(scanned, seed=1), make_params(teacher, seed=2)
    params, taken = with_weights_of(scanned, own, teacher, theirs)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, own)
    found, drawn, given = (
        tree.named_leaves(unrolled(config, each)[1])
        for config, each in ((scanned, params), (scanned, own), (teacher, theirs))
    )
    fresh = {f"decoder/blocks/layer_1/ffn/{name}" for name in ("w_in_DF", "w_out_FD")}
    assert set(taken) == found.keys() - fresh
    for name in fresh:
        np.testing.assert_array_equal(found[name], drawn[name])
    for name in taken:
        rows = slice(DENSE.vocab_size) if name == "embedding/embedding_VD" else ...
        np.testing.assert_array_equal(found[name], given[name][rows])
    # Fewer experts: all but experts and routers.
    params, taken = with_weights_of(FEWER, make_params(FEWER), teacher, theirs)
    assert set(taken) == {name for name in given if "E" not in name.rpartition("_")[2]}
    wide = dataclasses.replace(DENSE, d_ff=48)
    with refused("start from the teacher's weights: <any>ffn/w_in_DF [16, 48], [16, 24] there"):
        with_weights_of(wide, make_params(wide), teacher, theirs)


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("teacher") / "run", SPARSE)


def trained(folder, teacher, train_steps: int, **settings):
    """Lines of the metrics, and notes, of a student of some steps."""
    job = make_job(
        DENSE, train_steps=train_steps, eval_every=200, checkpoint_every=200,
        distillation=Distillation(teacher, step=9, **settings),
    )  # fmt: skip
    events = Events()
    outcome = train(job, RunFolder(folder), events, devices=jax.devices()[:1])
    assert outcome.is_finished
    assert any("checkpoint 9" in note for note in events.notes)
    return lines(folder / "metrics.jsonl"), events.notes


ALONE = {"soft_weight": 1.0, "starts_from_teacher": False}


@pytest.mark.slow
def test_twenty_steps_come_nearer_to_the_teacher_and_are_gone_on_with(teacher_run, tmp_path):
    trained(tmp_path / "student", teacher_run, 10, **ALONE)
    logged, notes = trained(tmp_path / "student", teacher_run, 20, **ALONE)
    assert any("resumed from step 10" in note for note in notes)
    soft = [line["soft_loss"] for line in logged]
    assert len(soft) == 20 and np.mean(soft[-3:]) < 0.9 * np.mean(soft[:3])
    # No teacher is in the checkpoint, and evaluation knows none.
    params = restore_params(tmp_path / "student")
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, make_params(DENSE))
    assert "soft_loss" not in lines(tmp_path / "student/validation.jsonl")[-1]
    job = make_job(DENSE, train_steps=20, eval_every=200, checkpoint_every=200)
    with refused("distillation: {<any>} there, None here"):
        train(job, RunFolder(tmp_path / "student"), Events(), devices=jax.devices()[:1])


@pytest.mark.slow  # trains three times
def test_a_student_goes_on_with_the_checkpoint_that_it_began_with(teacher_run, tmp_path):
    teacher, run = RunFolder(tmp_path / "teacher"), RunFolder(tmp_path / "student")
    shutil.copytree(teacher_run, teacher.root)
    newest, moved = teacher.checkpoints / "9", tmp_path / "moved"

    def go_on(train_steps):
        settings = Distillation(teacher.root)  # the newest checkpoint
        job = make_job(
            DENSE, train_steps=train_steps, eval_every=200, checkpoint_every=200,
            distillation=settings,
        )  # fmt: skip
        train(job, run, events := Events(), devices=jax.devices()[:1])
        return events.notes

    said, weights, *_ = go_on(1)
    assert said.endswith(f"parameters of {teacher.root}, checkpoint 9")
    assert re.match(r"\d+ of \d+ parameter arrays are the teacher's", weights)
    save(teacher, 12, seed=12)  # it learns on
    assert go_on(2)[0].endswith(f"parameters of {teacher.root}, checkpoint 9")
    newest.rename(moved)
    with refused(
        f"{run.root} was taught by checkpoint 9 of {teacher.root}, which is not there: no "
        f"complete checkpoint of step 9<any>; put it back"
    ):
        go_on(3)
    save(teacher, 9, seed=1)
    with refused(
        f"{run.root} was taught by checkpoint 9 of {teacher.root}, and {teacher.root} has "
        "another teacher now"
    ):
        go_on(3)
    shutil.rmtree(newest)
    moved.rename(newest)
    assert go_on(3)[0].endswith("checkpoint 9")


def save(folder, step: int, seed: int) -> None:
    """Another checkpoint of a teacher."""
    job = make_job(SPARSE)
    state = init_state(
        SPARSE, job.optimizer.build(job.schedule), 0, make_params(SPARSE, seed=seed)
    )
    with Checkpointer(folder, Retention()) as checkpointer:
        checkpointer.save(step, state)


def test_what_cannot_be_taught_is_refused_before_anything_is_computed(teacher_run, tmp_path):
    def refuse(said, student=DENSE, teacher=teacher_run, **changes):
        settings = changes.pop("settings", {})
        with refused(said):
            job = make_job(student, distillation=Distillation(teacher, **settings), **changes)
            DistilledProgram(job, jax.devices()[:1])

    refuse(
        "vocab_size=385 of the student, and 384 of the teacher",
        dataclasses.replace(DENSE, vocab_size=385),
    )
    refuse(
        "is decoder_only, the student encoder_decoder",
        dataclasses.replace(DENSE, architecture="encoder_decoder", num_encoder_layers=1),
    )
    refuse("nowhere is not a run folder", teacher=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    config = (teacher_run / "config.json").read_bytes()
    (tmp_path / "empty/config.json").write_bytes(config)
    save_vocabulary(make_job(DENSE).vocabulary, tmp_path / "empty")
    refuse("no complete checkpoint in", teacher=tmp_path / "empty")
    save_vocabulary(TokenIdVocabulary(384), tmp_path / "empty")
    refuse("was trained with another vocabulary", teacher=tmp_path / "empty")
    refuse("no complete checkpoint of step 3", settings={"step": 3})
    refuse("distillation with StepConfig.bucket_bytes=1024", step=StepConfig(bucket_bytes=1024))
    refuse("distillation with MeshSpec.pipe=2", mesh=MeshSpec(pipe=2))
    refuse("() with StorageSpec.experts='host': a teacher", SPARSE, storage=StorageSpec("host"))
    refuse("init_from='runs/a' with Distillation.starts_from_teacher", init_from="runs/a")


def test_other_groups_of_a_sparse_teacher_are_said(tmp_path):
    switch = SwitchConfig(4, group_size=64)
    teacher = save_run(tmp_path / "t", dataclasses.replace(SPARSE, switch=switch))
    step = StepConfig(num_microbatches=4)
    job = make_job(DENSE, distillation=Distillation(teacher), step=step)
    program = DistilledProgram(job, jax.devices()[:1])
    assert "may drop other tokens" in program.notes[-1]
    job = make_job(DENSE, distillation=Distillation(teacher))
    assert "may drop" not in program.notes[0]
    assert "may drop" not in DistilledProgram(job, jax.devices()[:1]).notes[-1]


def test_a_teacher_without_places_for_the_rows_is_refused(monkeypatch):
    """Its last place would stand for all that lie beyond."""
    job = make_job(DENSE, distillation=Distillation("teacher"))
    short = dataclasses.replace(DENSE, positions="learned", max_length=2)
    monkeypatch.setattr(student, "read_model_config", lambda run: short)
    with refused("tokens do not fit the 2 positions of the teacher in"):
        student.teacher_config(job)
