# SPDX-License-Identifier: Apache-2.0
"""Jobs: what follows from one, and what it refuses before anything runs."""

import dataclasses

import pytest

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures
from switchx.data.loader import BatchConfig, evaluation_batches
from switchx.data.mixtures import Mixture
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.models.config import RouterConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.step import StepConfig
from tests.data.fakes import pair_corpus
from tests.data.refusals import refused
from tests.training.jobs import DENSE, ENCODER_DECODER, SPARSE, TASK, make_job, with_switch


def test_an_encoder_decoder_reads_inputs_and_targets_apart():
    job = make_job(ENCODER_DECODER, inputs_length=12, targets_length=5)
    assert job.features == EncoderDecoderFeatures(12, 5)
    assert job.sequence_lengths == (12, 5)
    assert job.batches == BatchConfig(job.features, batch_size=8, packed=True)


def test_a_decoder_only_model_reads_them_in_one_row():
    job = make_job(DENSE, inputs_length=12, targets_length=5, packed=False)
    assert job.features == DecoderOnlyFeatures(17)
    assert job.sequence_lengths == (0, 17)
    assert not job.batches.packed


def test_the_vocabulary_is_that_of_the_tasks():
    assert make_job().vocabulary is TASK.vocabulary
    assert make_job(source=Mixture((TASK,))).vocabulary is TASK.vocabulary


def test_a_model_without_an_embedding_for_each_id_is_refused():
    make_job().check_vocabulary()
    job = make_job(dataclasses.replace(DENSE, vocab_size=383))
    with refused("the vocabulary has 384 ids, but the model's vocab_size is 383"):
        job.check_vocabulary()


def test_microbatches_divide_the_batch():
    with refused("batch_size=8 is not divisible by num_microbatches=3"):
        make_job(step=StepConfig(num_microbatches=3))


@pytest.mark.parametrize(
    ("model", "lengths"),
    [(DENSE, (4, 5)), (ENCODER_DECODER, (9, 2)), (ENCODER_DECODER, (2, 9))],
)
def test_rows_fit_the_learned_positions(model, lengths):
    model = dataclasses.replace(model, positions="learned", max_length=8)
    inputs_length, targets_length = lengths
    with refused("rows of 9 tokens do not fit the model's max_length=8 positions"):
        make_job(model, inputs_length=inputs_length, targets_length=targets_length)
    make_job(model, inputs_length=4, targets_length=4)


def test_the_load_of_the_batch_is_counted_first_by_whole_models():
    router, step = RouterConfig(balance_scope="batch"), StepConfig(num_microbatches=2)
    model = with_switch(SPARSE, router=router)
    make_job(model, step=step)
    for changes in ({"mesh": MeshSpec(pipe=2)}, {"storage": StorageSpec("host")}):
        with refused("RouterConfig.balance_scope='batch' with num_microbatches=2, MeshSpec"):
            make_job(model, step=step, **changes)
    before = dataclasses.replace(router, balance_load="previous_step")
    make_job(with_switch(SPARSE, router=before), step=step, mesh=MeshSpec(pipe=2))


@pytest.mark.parametrize("attention", ["auto", "einsum"])
def test_evaluation_sees_bidirectional_inputs_that_training_has_not(attention):
    """The attention of training changes no number of an evaluation."""
    pairs = Task("pairs", pair_corpus(("abc", "d")), TASK.vocabulary, InputsToTargets())
    model = dataclasses.replace(DENSE, positions="rotary", training_attention=attention)
    job = make_job(model, source=Mixture((TASK,), evaluation=(pairs,)))
    assert job.features.has_prefix == (attention == "einsum")
    (batch,) = evaluation_batches(pairs, job.evaluated_batches)
    assert batch["decoder_prefix_mask"][0, :4].all()
