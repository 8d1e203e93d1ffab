# SPDX-License-Identifier: Apache-2.0
"""Tasks, their mixtures, and the format that their texts give a prompt."""

import dataclasses
import itertools

import numpy as np
import pytest

from switchx.data.corpora.multi30k import Multi30k
from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures
from switchx.data.mixtures import Mixture, ProportionalRates, as_mixture, multi30k_directions
from switchx.data.objectives import CausalLM, InputsToTargets, PrefixLM, SpanCorruption
from switchx.data.tasks import Task, TextFormat, open_task
from switchx.data.text_metrics import Accuracy, Bleu, ChrF
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import CorpusVocabulary
from switchx.fields import describe
from tests.data.fakes import ListCorpus, NumberVocabulary, pair_corpus, text_corpus
from tests.data.refusals import refused
from tests.training.jobs import TASK

FEATURES = EncoderDecoderFeatures(512, 114)
TEXT, PAIRS = text_corpus("1 2 3"), pair_corpus(("1", "2"))


def make(corpus, objective, **options):
    return Task("it", corpus, NumberVocabulary(), objective, **options)


def test_opens():
    opened = open_task(make(TEXT, SpanCorruption()), "train", None, FEATURES)
    assert (opened.chunk_length, opened.records[0]) == (568, {"text": "1 2 3"})
    opened = open_task(make(PAIRS, InputsToTargets()), "train", None, FEATURES)
    assert (opened.chunk_length, opened.records[0]) == (None, {"inputs": "1", "targets": "2"})


def test_objective_must_suit_corpus_and_features():
    with pytest.raises(
        ValueError,
        match=r"task 'it': SpanCorruption reads \['text'\], the records "
        r"of .* have \['inputs', 'targets'\]; use the objective InputsToTargets",
    ):
        open_task(make(PAIRS, SpanCorruption()), "train", None, FEATURES)
    with refused(
        "InputsToTargets reads ['inputs', 'targets']<any>use the objective "
        "SpanCorruption, PrefixLM or CausalLM"
    ):
        open_task(make(TEXT, InputsToTargets()), "train", None, FEATURES)
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


def task(name, **vocabulary):
    return Task(name, text_corpus("1 2"), NumberVocabulary(**vocabulary), SpanCorruption())


A, B = task("a"), task("b")


@pytest.mark.parametrize(
    "rates, expected",
    [
        (ProportionalRates(), [0.1, 0.9]),
        (ProportionalRates(maximum=300), [0.25, 0.75]),  # 100 and min(900, 300)
        (ProportionalRates(temperature=2.0), [0.25, 0.75]),  # 10 and 30
        (ProportionalRates(temperature=2.0, maximum=400), [1 / 3, 2 / 3]),  # 10 and 20
        (ProportionalRates(temperature=0.001), [9.0**-1000, 1.0]),  # beyond float's numbers
        ((1.0, 3.0), [0.25, 0.75]),
    ],
)
def test_probabilities_by_hand(rates, expected):
    np.testing.assert_allclose(Mixture((A, B), rates).probabilities([100, 900]), expected)


def test_a_task_alone_and_a_high_temperature():
    assert as_mixture(A).probabilities([5]).tolist() == [1.0]
    mixture = Mixture((A, B))
    assert as_mixture(mixture) is mixture
    probabilities = Mixture((A, B), ProportionalRates(temperature=1e6)).probabilities(
        [1, 10**6]
    )
    np.testing.assert_allclose(probabilities, [0.5, 0.5], atol=1e-5)


def test_mixtures_are_checked():
    with pytest.raises(
        ValueError, match=r"a mixture of \['a', 'a'\]; use one task or more, each"
    ):
        Mixture((A, A))
    with pytest.raises(ValueError, match="have different vocabularies; one model reads one"):
        Mixture((A, task("c", size=500)))
    with pytest.raises(ValueError, match=r"rates=\(1.0,\) for the tasks \['a', 'b'\]"):
        Mixture((A, B), (1.0,))
    with pytest.raises(ValueError, match=r"rates=\(1.0, 0.0\).*above 0"):
        Mixture((A, B), (1.0, 0.0))
    with pytest.raises(ValueError, match="temperature=0; use a number above 0"):
        ProportionalRates(temperature=0)
    with pytest.raises(ValueError, match="maximum=0; use at least 1"):
        ProportionalRates(maximum=0)


def test_vocabularies_of_one_description_are_not_opened():
    """One that is trained on its corpus would be, where only its gin file is read."""
    vocabulary = CorpusVocabulary(text_corpus("1 2"), 500)
    tasks = [Task(n, text_corpus("1 2"), vocabulary, SpanCorruption()) for n in "ab"]
    assert len(Mixture(tuple(tasks)).tasks) == 2
    assert "resolved" not in vars(vocabulary)


def test_every_direction_asks_for_its_language():
    mixture = multi30k_directions(
        NumberVocabulary(), ("en", "de", "fr"), favoured=["de_en"], favour=3.0
    )
    by_name = {task.name: task for task in mixture.tasks}
    assert set(by_name) == {
        f"multi30k_{a}_{b}" for a, b in itertools.permutations(("en", "de", "fr"), 2)
    }
    task = by_name["multi30k_de_en"]
    assert task.corpus == Multi30k("de", "en") and task.objective.prefix == "English: "
    assert task.metrics == (Bleu(), ChrF())
    rates = dict(zip(by_name, mixture.probabilities([29000] * 6), strict=True))
    assert rates.pop("multi30k_de_en") == pytest.approx(3 / 8)
    assert set(rates.values()) == {1 / 8}
    with refused("Multi30k.<any>='xx' is unknown"):
        multi30k_directions(NumberVocabulary(), ("en", "xx"))
    with refused("languages=('en',) have no direction"):
        multi30k_directions(NumberVocabulary(), ("en",))
    with refused("favoured=['en_fr']"):
        multi30k_directions(NumberVocabulary(), ("en", "de"), favoured=("en_fr",))


VOCABULARY = ByteVocabulary()
A_ID, B_ID, EOS = 100, 101, 1  # byte b is id b + 3


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
    assert found.inputs(VOCABULARY, "ab") == example.inputs.tolist() == [A_ID, B_ID, EOS]
    assert found.targets(VOCABULARY, "b") == example.targets.tolist() == [B_ID, EOS]

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


def test_an_empty_text_is_its_end_alone_and_a_prefix_ends_anywhere():
    # As T5's tokenizer has it; a prefix has no end to add.
    example = InputsToTargets().example({"inputs": "", "targets": ""}, VOCABULARY)
    found = format_of(InputsToTargets())
    assert found.inputs(VOCABULARY, "") == example.inputs.tolist() == [EOS]
    assert found.targets(VOCABULARY, "") == example.targets.tolist() == [EOS]
    assert format_of(SpanCorruption()).inputs(VOCABULARY, "") == [EOS]
    assert format_of(PrefixLM()).inputs(VOCABULARY, "") == []
    assert format_of(PrefixLM()).inputs(VOCABULARY, "ab") == [A_ID, B_ID]


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


def test_formats_of_mixtures_and_of_runs_and_models_from_elsewhere():
    assert format_of(PrefixLM(), InputsToTargets()) == TextFormat(True, False, False)
    assert TextFormat.of_training(None, is_encoder_decoder=True) == TextFormat(
        True, False, True
    )
    assert TextFormat.of_training(None, is_encoder_decoder=False) == TextFormat(
        False, False, False
    )
    task = describe(dataclasses.replace(TASK, objective=InputsToTargets("to de: ")))
    del task["objective"]["is_prefix_bidirectional"]
    for source in (task, {"type": "Mixture", "tasks": [task], "rates": [1.0]}):
        found = TextFormat.of_training(source, is_encoder_decoder=False)
        assert found == TextFormat(True, True, False)


def test_sentinels_are_text_where_training_had_none():
    text = "<extra_id_0>"
    assert format_of(PrefixLM()).inputs(VOCABULARY, text) == VOCABULARY.encode(text)
    assert format_of(SpanCorruption()).inputs(VOCABULARY, text) == [258, EOS]
    with pytest.raises(ValueError, match="<extra_id_100> in a text: .* to <extra_id_99>; use"):
        format_of(SpanCorruption()).inputs(VOCABULARY, "<extra_id_100>")
    assert format_of(SpanCorruption()).inputs(ReadsSentinels(), "a <extra_id_0>") == [5, 7, 1]


class ReadsSentinels:
    """A vocabulary that finds sentinels in a text itself, as T5's with 32,100 pieces."""

    eos_id, num_sentinels = EOS, 1

    def sentinel_id(self, index):
        return 7

    def encode(self, text):
        return [7 if word == "<extra_id_0>" else 5 for word in text.split()]
