# SPDX-License-Identifier: Apache-2.0
import pytest

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures
from switchx.data.objectives import CausalLM, InputsToTargets, SpanCorruption
from switchx.data.tasks import Task, open_task
from switchx.data.text_metrics import Accuracy
from tests.data.fakes import ListCorpus, NumberVocabulary, pair_corpus, text_corpus

FEATURES = EncoderDecoderFeatures(512, 114)
TEXT, PAIRS = text_corpus("1 2 3"), pair_corpus(("1", "2"))


def make(corpus, objective, **options):
    return Task("it", corpus, NumberVocabulary(), objective, **options)


def test_opens():
    opened = open_task(make(TEXT, SpanCorruption()), "train", None, FEATURES)
    assert (opened.chunk_length, opened.records[0]) == (568, {"text": "1 2 3"})
    opened = open_task(make(PAIRS, InputsToTargets()), "train", None, FEATURES)
    assert (opened.chunk_length, opened.records[0]) == (None, {"inputs": "1", "targets": "2"})


def test_objective_must_suit_the_corpus():
    with pytest.raises(
        ValueError,
        match=r"task 'it': SpanCorruption reads \['text'\], the records "
        r"of .* have \['inputs', 'targets'\]; use the objective InputsToTargets",
    ):
        open_task(make(PAIRS, SpanCorruption()), "train", None, FEATURES)
    with pytest.raises(
        ValueError,
        match=r"InputsToTargets reads \['inputs', 'targets'\].*use the "
        "objective SpanCorruption, PrefixLM or CausalLM",
    ):
        open_task(make(TEXT, InputsToTargets()), "train", None, FEATURES)


def test_objective_must_suit_the_features():
    with pytest.raises(ValueError, match="CausalLM has no inputs for an encoder"):
        open_task(make(TEXT, CausalLM()), "train", None, FEATURES)
    assert (
        open_task(make(TEXT, CausalLM()), "train", None, DecoderOnlyFeatures(9)).chunk_length
        == 9
    )


def test_other_errors():
    with pytest.raises(ValueError, match="task 'it': split 'train' of .* is empty"):
        open_task(make(ListCorpus(()), SpanCorruption()), "train", None, FEATURES)
    with pytest.raises(
        ValueError, match="too_long='ignore' is unknown; use one of drop, truncate"
    ):
        make(PAIRS, InputsToTargets(), too_long="ignore")
    with pytest.raises(
        ValueError, match="task 'it': metrics compare texts with targets, and the objective "
        "SpanCorruption has no texts for targets; use InputsToTargets, or no metrics",
    ):  # fmt: skip
        make(TEXT, SpanCorruption(), metrics=(Accuracy(),))
    assert make(PAIRS, InputsToTargets(), metrics=(Accuracy(),)).metrics == (Accuracy(),)
