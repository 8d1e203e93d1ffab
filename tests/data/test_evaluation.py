# SPDX-License-Identifier: Apache-2.0
"""Examples for evaluation: texts, tokens, references, choices and their scores."""

import dataclasses
import json
import math

import numpy as np
import pytest

from switchx.data.evaluation import evaluation_examples
from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures
from switchx.data.label_metrics import Pearson, Spearman
from switchx.data.objectives import CausalLM, InputsToTargets
from switchx.data.text_metrics import Accuracy, MetricResult, Squad
from switchx.fields import json_text
from tests.data.fakes import ListCorpus, make_task, pair_corpus, text_corpus
from tests.data.refusals import refused

FEATURES = EncoderDecoderFeatures(3, 4)
FACTS = (
    {"answers": ["7", "8"], "choices": ["7", "8 9"], "label": 0, "example_id": "a"},
    {"choices": ["5", "6", "7"], "label": 2, "group": "g"},
)
CORPUS = ListCorpus(
    (("5 6 4", "7", json.dumps(FACTS[0])), ("8", "7", json.dumps(FACTS[1]))),
    ("inputs", "targets", "facts"),
)


def examples(corpus=CORPUS, **options):
    metrics = (Accuracy(), Squad())
    task = make_task("t", corpus, InputsToTargets("3 "), metrics=metrics, **options)
    return evaluation_examples(task, "test", FEATURES)


def test_texts_tokens_facts_and_metrics():
    found = examples()
    assert (found.inputs, found.targets) == (["5 6 4", "8"], ["7", "7"])
    assert [each.tolist() for each in found.tokens] == [[3, 5, 6, 4, 1], [3, 8, 1]]
    first, second = found.targets
    assert (first.answers, first.example_id, second.answers) == (("7", "8"), "a", ("7",))
    assert (second.group, second.label, second.choices) == ("g", 2, ("5", "6", "7"))
    cut = examples(too_long="truncate")
    assert cut.tokens[0].tolist() == [3, 5, 1] and (found.num_cut, cut.num_cut) == (0, 1)
    plain = examples(pair_corpus(("5", "6")))
    assert plain.targets == ["6"] and type(plain.targets[0]) is str
    found = examples()
    assert found.metrics(["8", "7"]) == {"accuracy": 50.0, "exact_match": 100.0, "f1": 100.0}
    (only,) = found.results(["7", "7"], (Accuracy(),))
    assert only.score == 100.0
    with refused("task 't': 3 predictions for 2 examples of 'test'"):
        found.metrics(["7"] * 3)


@dataclasses.dataclass(frozen=True)
class Failing:
    """A user's own metric, which divides by zero or has a score that is no number."""

    score: float | None = None
    names = ("own", "other")

    def results(self, predictions, targets, num_bootstrap=0):
        score = 1 / 0 if self.score is None else self.score
        return [MetricResult(name, score, "v:1") for name in self.names]


def test_a_metric_that_cannot_be_computed_is_null_and_says_why(caplog):
    found = examples()
    failed, *rest = found.results(["7", "7"], (Failing(), Accuracy()))
    assert (failed.name, failed.score) == ("own", None)
    assert failed.note == "ZeroDivisionError: division by zero"
    assert [(each.name, each.score) for each in rest] == [("other", None), ("accuracy", 100.0)]
    assert "task 't' has no own: ZeroDivisionError: division by zero" in caplog.text
    for score in (math.nan, math.inf):
        first, _ = found.results(["7", "7"], (Failing(score),))
        assert first.score is None and first.note == f"the score is {score}, no finite number"
    # NumPy's numbers are written, too; what is no number is a note.
    first, _ = found.results(["7", "7"], (Failing(np.float32(0.5)),))
    assert json.loads(json_text(dataclasses.asdict(first)))["score"] == 0.5
    assert "could not convert" in found.results(["7", "7"], (Failing("x"),))[0].note
    # As STS-B's, of one example and of a constant prediction.
    correlations = (Pearson(), Spearman())
    for count, predictions in ((1, ["7"]), (2, ["7", "7"])):
        results = found.first(count).results(predictions, correlations)
        assert all(each.score is None for each in results)
        assert f"all {count} targets are 7; a correlation needs two" in results[0].note
    assert json.loads(json_text(list(map(dataclasses.asdict, results))))[0]["score"] is None
    with pytest.raises(KeyboardInterrupt):
        found.results(["7", "7"], (Interrupted(),))


class Interrupted(Failing):
    def results(self, *arguments):
        raise KeyboardInterrupt


def test_choices_are_scored_one_after_another():
    found = examples()
    tokens = [(number, each.tolist()) for number, each in found.choice_tokens()]
    assert tokens == [(0, [7, 1]), (0, [8, 9, 1]), (1, [5, 1]), (1, [6, 1]), (1, [7, 1])]
    (accuracy,) = found.rank([-1.0, -2.0, -3.0, -2.0, -9.0])
    assert (accuracy.name, accuracy.score) == ("accuracy", 50.0)
    with refused("task 't': example 0 of 'test' has no choices of which one is known"):
        examples(pair_corpus(("5", "6"))).rank([0.0])
    value = {"a": [1.0, math.nan, (math.inf, "x")], "b": {"c": -math.inf, "d": None}}
    assert json_text(value) == '{"a": [1.0, null, [null, "x"]], "b": {"c": null, "d": null}}'


def test_inputs_of_a_decoder_leave_room_for_the_longest_answer():
    """As in training; of choices the longest."""
    corpus = pair_corpus((" ".join("56456456"), "7 8"))
    task = make_task("t", corpus, InputsToTargets(), too_long="truncate")
    found = evaluation_examples(task, "test", DecoderOnlyFeatures(8))
    record = {"inputs": " ".join("56456456"), "targets": "7 8"}
    example = task.objective.example(record, task.vocabulary)
    want = DecoderOnlyFeatures(8).truncate(example, task.vocabulary.eos_id).inputs
    assert found.tokens[0].tolist() == want.tolist() and len(want) + len(example.targets) == 8
    facts = json.dumps({"choices": ["7", "7 8 9"], "label": 0})
    chosen = ListCorpus(((" ".join("56456456"), "7", facts),), ("inputs", "targets", "facts"))
    task = make_task("t", chosen, InputsToTargets(), too_long="truncate")
    (tokens,) = evaluation_examples(task, "test", DecoderOnlyFeatures(8)).tokens
    assert len(tokens) + len("789") + 1 == 8


def test_the_first_examples_and_tasks_without_texts():
    task = make_task("t", CORPUS, InputsToTargets())
    assert len(evaluation_examples(task, "test", FEATURES, max_examples=1).inputs) == 1
    assert evaluation_examples(task, "test[1:]", FEATURES).inputs == ["8"]
    text = make_task("t", text_corpus("5"), CausalLM())
    with refused("task 't': CausalLM has no texts for targets"):
        evaluation_examples(text, "test", DecoderOnlyFeatures(4))
    with pytest.raises(ValueError, match="goes beyond test, which has 2 examples"):
        evaluation_examples(task, "test[:3]", FEATURES)
