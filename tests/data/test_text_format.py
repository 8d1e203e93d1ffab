# SPDX-License-Identifier: Apache-2.0
"""Texts become what training made of them."""

import dataclasses

import numpy as np
import pytest

from switchx.data.features import DecoderOnlyFeatures
from switchx.data.mixtures import Mixture
from switchx.data.objectives import (
    CausalLM,
    InputsToTargets,
    PrefixLM,
    SpanCorruption,
)
from switchx.data.text_format import TextFormat
from switchx.data.tokenizers import ByteVocabulary
from switchx.fields import describe
from tests.training.jobs import TASK

VOCABULARY = ByteVocabulary()
A, B, EOS = 100, 101, 1  # byte b is id b + 3


def format_of(*objectives, is_encoder_decoder=True) -> TextFormat:
    tasks = [
        dataclasses.replace(TASK, name=str(i), objective=objective)
        for i, objective in enumerate(objectives)
    ]
    source = tasks[0] if len(tasks) == 1 else Mixture(tuple(tasks))
    return TextFormat.of_training(describe(source), is_encoder_decoder=is_encoder_decoder)


def test_inputs_are_those_of_the_examples():
    record = {"inputs": "ab", "targets": "b"}
    example = InputsToTargets().example(record, VOCABULARY)
    found = format_of(InputsToTargets())
    assert found.inputs(VOCABULARY, "ab") == example.inputs.tolist() == [A, B, EOS]
    assert found.targets(VOCABULARY, "b") == example.targets.tolist() == [B, EOS]

    chunk_L = np.array(VOCABULARY.encode("ababab"), np.int32)
    rng = np.random.default_rng(0)
    example = SpanCorruption(0.4, 2.0).example(chunk_L, VOCABULARY, DecoderOnlyFeatures(8), rng)
    found = format_of(SpanCorruption())
    text = VOCABULARY.decode(example.inputs)
    assert "<extra_id_0>" in text
    assert found.inputs(VOCABULARY, text) == example.inputs.tolist()
    assert found.targets(VOCABULARY, VOCABULARY.decode(example.targets)) == (
        example.targets.tolist()
    )


def test_a_prefix_ends_anywhere():
    assert format_of(PrefixLM()).inputs(VOCABULARY, "ab") == [A, B]


@pytest.mark.parametrize(
    ("objective", "is_bidirectional"),
    [
        (CausalLM(), False),
        (PrefixLM(), True),
        (PrefixLM(is_prefix_bidirectional=False), False),
        (InputsToTargets(), True),
        (InputsToTargets(is_prefix_bidirectional=False), False),
        (SpanCorruption(is_prefix_bidirectional=False), False),
    ],
)
def test_prompts_of_decoders_see_what_they_saw_in_training(objective, is_bidirectional):
    found = format_of(objective, is_encoder_decoder=False)
    assert found.is_prompt_bidirectional == is_bidirectional
    assert not format_of(PrefixLM()).is_prompt_bidirectional  # the encoder sees all


def test_mixtures_and_models_from_elsewhere():
    assert format_of(PrefixLM(), InputsToTargets()) == TextFormat(True, False, False)
    assert TextFormat.of_training(None, is_encoder_decoder=True) == TextFormat(
        True, False, True
    )
    assert TextFormat.of_training(None, is_encoder_decoder=False) == TextFormat(
        False, False, False
    )


def test_sentinels_are_text_where_training_had_none():
    text = "<extra_id_0>"
    assert format_of(PrefixLM()).inputs(VOCABULARY, text) == VOCABULARY.encode(text)
    assert format_of(SpanCorruption()).inputs(VOCABULARY, text) == [258, EOS]
    with pytest.raises(ValueError, match="sentinel 100 of 100"):
        format_of(SpanCorruption()).inputs(VOCABULARY, "<extra_id_100>")


class ReadsSentinels:
    """A vocabulary that finds sentinels in a text itself, as T5's with 32,100 pieces."""

    eos_id, num_sentinels = EOS, 1

    def sentinel_id(self, index):
        return 7

    def encode(self, text):
        return [7 if word == "<extra_id_0>" else 5 for word in text.split()]


def test_a_vocabulary_that_finds_sentinels_reads_the_whole_text():
    assert format_of(SpanCorruption()).inputs(ReadsSentinels(), "a <extra_id_0>") == [5, 7, 1]


def test_nothing_stays_nothing():
    assert format_of(SpanCorruption()).inputs(VOCABULARY, "") == []
