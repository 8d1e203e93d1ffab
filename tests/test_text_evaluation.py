# SPDX-License-Identifier: Apache-2.0
"""Answers are what the API generates, in order, against the corpus' own texts."""

import dataclasses

import pytest

import switchx
from switchx.data.features import EncoderDecoderFeatures
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.data.text_metrics import (
    Accuracy,
    Bleu,
    ChrF,
    MetricResult,
)
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.text_evaluation import (
    answer,
    mean_results,
    measure,
    read_questions,
)
from tests.data.fakes import VOCABULARY, pair_corpus
from tests.data.refusals import refused
from tests.training.jobs import DENSE, TASK
from tests.training.saved_runs import save_run

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1))
PAIRS = (("a gate", "ein Tor"), ("an expert ", "  ein\u00a0Experte"), ("of", "von"))
PREFIX = "to German: "
LETTERS = Task("letters", pair_corpus(*PAIRS), ByteVocabulary(), InputsToTargets(PREFIX))
FEATURES = EncoderDecoderFeatures(16, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return switchx.load(save_run(tmp_path_factory.mktemp("run"), MODEL, source=LETTERS))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    config = dataclasses.replace(DENSE, num_decoder_layers=1)
    return switchx.load(save_run(tmp_path_factory.mktemp("decoder"), config, source=LETTERS))


def test_answers_are_those_of_the_api_in_order(model, decoder):
    for each in (model, decoder):
        asked = read_questions(each, LETTERS, "test", FEATURES)
        assert (asked.inputs, asked.targets) == tuple(map(list, zip(*PAIRS, strict=True)))
        done = []
        got = answer(each, each.generator(max_new_tokens=4), asked, done.append)
        want = each.generate([PREFIX + text for text in asked.inputs], max_length=4)
        assert got.texts == want
        assert (got.num_unfinished, done) == (3, [1, 2, 3])  # random weights never end


def test_the_first_examples_of_a_split(model):
    asked = read_questions(model, LETTERS, "test", FEATURES, max_examples=2)
    assert asked.inputs == ["a gate", "an expert "]
    assert len(read_questions(model, LETTERS, "test", FEATURES, max_examples=9).inputs) == 3


def test_only_a_task_that_says_so_cuts_inputs(model):
    asked = read_questions(model, LETTERS, "test", FEATURES)
    assert ([len(each) for each in asked.prompts], asked.num_cut) == ([18, 22, 14], 0)
    cutting = dataclasses.replace(LETTERS, too_long="truncate")
    asked = read_questions(model, cutting, "test", FEATURES)
    assert ([len(each) for each in asked.prompts], asked.num_cut) == ([16, 16, 14], 2)
    assert asked.prompts[0][-1] == cutting.vocabulary.eos_id


def test_bad_input(model):
    with refused("task 'letters': CausalLM has no texts for targets; metrics of <any>"):
        read_questions(model, TASK, "test", FEATURES)
    with refused(
        "task 'letters' has a vocabulary of 1000 ids, the model has another one, of 384 ids; "
        "use the one that the model was trained with, whose copy is in its folder"
    ):
        read_questions(
            model, dataclasses.replace(LETTERS, vocabulary=VOCABULARY), "test", FEATURES
        )
    asked = read_questions(model, LETTERS, "test", FEATURES)
    asked.prompts[1] = []
    with refused("task 'letters': example 1 is empty; give at least one token"):
        answer(model, model.generator(max_new_tokens=4), asked)


def test_all_metrics_are_measured_and_means_are_of_the_same_metric():
    texts, targets = ["a b c d", "x"], ["a b c d", "y"]
    results = measure((Accuracy(), ChrF()), texts, targets)
    assert [each.name for each in results] == ["accuracy", "chrf"]
    assert results[0].score == 50.0
    (other,) = measure((Accuracy(),), ["a"], ["b"])
    lower = measure((Bleu(lowercase=True),), texts, targets)
    plain = measure((Bleu(),), texts, targets)
    assert mean_results([[*results, *plain], [other, *lower]]) == [
        MetricResult("accuracy", 25.0, other.signature),
        results[1],
        *plain,
        *lower,
    ]
