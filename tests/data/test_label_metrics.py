# SPDX-License-Identifier: Apache-2.0
"""Oracles: the numbers of t5.evaluation.metrics_test, scikit-learn and scipy."""

import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.label_metrics import (
    BinaryF1,
    GroupExactMatch,
    MacroF1,
    MatthewsCorrelation,
    Pearson,
    ReferentAccuracy,
    Spearman,
    numbers,
    rank_results,
)
from switchx.data.text_metrics import Accuracy, Bleu, Reference, Rouge, Squad
from tests.data.refusals import refused

CLASSES = ("zero", "one", "two")
NAMES = (*CLASSES, "none of them")  # the last is what T5 calls -1


def scores(metric, targets, predictions):
    return {each.name: each.score for each in metric.results(predictions, targets)}


def of_ids(metric, targets, predictions):
    return scores(metric, [NAMES[i] for i in targets], [NAMES[i] for i in predictions])


def test_classes_as_t5():
    two = BinaryF1(CLASSES[:2])
    assert of_ids(two, [0, 1, 1, 0], [0, 1, 2, 2]) == {"f1": 50.0}
    assert of_ids(Accuracy(), [0, 0, 2, 1], [0, 1, 2, 1]) == {"accuracy": 75.0}
    with refused("BinaryF1.classes=('a', 'b', 'c')"):
        BinaryF1(("a", "b", "c"))


def test_numbers_and_referents_as_t5():
    assert numbers(["10", "10.", "asdf", ""]) == [10.0, 10.0, -1.0, -1.0]
    targets = [Reference("Tom", label=0), Reference("Tom", label=1), Reference("Tom", label=0)]
    found = scores(ReferentAccuracy(), targets, ["Tom", "the tom", "Mitchell"])
    assert found == {"accuracy": pytest.approx(200 / 3)}
    with refused("ReferentAccuracy needs targets with labels, as WSC's"):
        ReferentAccuracy().results(["a"], ["a"])


def test_groups_as_t5():
    """MultiRC: F1 over all answers; questions whose answers are all right; ReCoRD once each."""
    targets = [Reference("True", group="a"), Reference("True", group="a"),
               Reference("False", group="b")]  # fmt: skip
    found = scores(BinaryF1(("False", "True")), targets, ["True", "False", "True"])
    assert found == {"f1": 50.0}
    assert scores(GroupExactMatch(), targets, ["True", "True", "no"]) == {"exact_match": 50.0}
    answers = [Reference("x", ("x", "y"), "1/1"), Reference("y", ("x", "y"), "1/1"),
               Reference("z", ("z",), "1/2")]  # fmt: skip
    # The second example of the first query does not count.
    found = scores(Squad(once_per_group=True), answers, ["y", "wrong", "wrong"])
    assert found == {"exact_match": 50.0, "f1": 50.0}
    for metric in (GroupExactMatch(), Squad(once_per_group=True)):
        with refused("needs targets with groups"):
            metric.results(["a"], ["a"])


BIG = [["big moose", "hippo"], ["correct1"], ["correct2.1", "correct2.2"], ["a", "b"]]


@pytest.mark.parametrize(
    ("normalization", "answers", "texts", "em", "f1"),
    [
        ("squad", [["", "this is a string"]] * 2, ["this is a string"] * 2, 100, 100),
        ("squad", [["this is a string"]] * 2, [""] * 2, 0, 0),
        ("squad", BIG, ["‘a big  Moose!‘", "wrong", "correct2.2", "c"], 25, 35),
        ("squad", [["abc abd", "$$$$"]], ["abd"], 0, 200 / 3),
        ("trivia_qa", BIG, ["‘a big  Moose!‘", "wrong", "correct2.2", "c"], 50, 50),
    ],
)
def test_answers_as_t5(normalization, answers, texts, em, f1):
    targets = [Reference(each[0], each) for each in answers]
    found = Squad(normalization).results(texts, targets)
    assert [each.score for each in found] == [pytest.approx(em), pytest.approx(f1)]
    assert found[0].signature == f"{normalization}|v:1.1|answers:{max(map(len, answers))}"
    with refused("Squad.normalization='triviaqa'"):
        Squad("triviaqa")


def test_rouge_of_several_summaries_is_the_best_and_bleu_is_t5s():
    target = Reference("c d", ("c d", "a b"))
    assert scores(Rouge(("rouge1",)), [target, "a"], ["a b", "a"]) == {"rouge1": 100.0}
    text = "this is a string"
    assert scores(Bleu("intl"), [text] * 2, [text] * 2) == {"bleu": pytest.approx(100.0)}
    assert scores(Bleu("intl"), [text] * 2, ["", ""]) == {"bleu": 0.0}


T, F = True, False
TWO = [[0.1, 0.5], [1.0, 1.1], [0.3, 0.1], [0.6, 0.5]], [[T, F], [F, T], [T, F], [T, F]]
THREE = [[0.1, 0.5, 0.0], [-2, -1, -3], [3.0, 3.1, 3.2]]


@pytest.mark.parametrize(
    ("given_scores", "is_right", "expected"),
    [
        (*TWO, {"accuracy": 75, "f1": 66.6666667, "auc-roc": 66.6666667, "auc-pr": 50}),
        (THREE, [[F, T, F], [T, F, F], [F, F, T]],
         {"accuracy": 66.6666667, "mean_3class_f1": 55.5555556}),
        (THREE, [[F, T, F], [T, F, T], [F, T, T]], {"accuracy": 66.6666667}),
        ([[0.1, 0.5], [-2, -1, -3], [3.0]], [[F, T], [T, F, T], [T]], {"accuracy": 66.6666667}),
    ],
)  # fmt: skip
def test_ranks_as_t5(given_scores, is_right, expected):
    found = {each.name: each.score for each in rank_results(given_scores, is_right)}
    assert found == pytest.approx(expected)


def test_ranks_of_one_class_have_no_area_and_bad_scores_are_refused():
    found = {each.name: each.score for each in rank_results([[1, 0], [0, 1]], [[T, F]] * 2)}
    assert found["accuracy"] == 50.0 and math.isnan(found["auc-roc"])
    for given_scores, is_right in (([], []), ([[1.0]], [[T, F]]), ([[]], [[]])):
        with refused("which must be equally many and at least one in each"):
            rank_results(given_scores, is_right)
    for each in rank_results([[1, math.nan], [0, 1]], [[T, F]] * 2):
        assert each.score is None and each.note.startswith(
            "1 examples have scores that are NaN"
        )


ids = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=2, max_size=30)


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(ids)
def test_classes_as_scikit_learn(pairs):
    targets, predictions = map(list, zip(*pairs, strict=True))
    labels = [-1 if each == 3 else each for each in predictions]  # as T5's class ids
    matthews = sklearn.metrics.matthews_corrcoef(targets, labels)
    assert of_ids(MatthewsCorrelation(CLASSES), targets, predictions) == {
        "matthews_corrcoef": pytest.approx(100 * matthews)
    }
    macro = sklearn.metrics.f1_score(
        targets, labels, labels=range(3), average="macro", zero_division=0
    )
    assert of_ids(MacroF1(CLASSES), targets, predictions) == {
        "mean_3class_f1": pytest.approx(100 * macro)
    }


@given(
    st.lists(
        st.tuples(st.sampled_from([-2.0, -1.0, 0.0, 1.0]), st.booleans()),
        min_size=2, max_size=30,
    ).filter(lambda rows: len({right for _, right in rows}) == 2)
)  # fmt: skip
def test_areas_as_scikit_learn(rows):
    score, is_right = map(np.array, zip(*rows, strict=True))
    found = rank_results([[0.0, each] for each in score], [[not r, bool(r)] for r in is_right])
    found = {each.name: each.score for each in found}
    assert found["auc-roc"] == pytest.approx(
        100 * sklearn.metrics.roc_auc_score(is_right, score)
    )
    want = sklearn.metrics.average_precision_score(is_right, score)
    assert found["auc-pr"] == pytest.approx(100 * want)
    want = sklearn.metrics.f1_score(is_right, score > 0, zero_division=0)
    assert found["f1"] == pytest.approx(100 * want)


def test_correlations_as_scipy_and_no_number_spoils_them():
    rng = np.random.default_rng(0)
    targets, predictions = rng.normal(size=(2, 20)).round(2)
    texts = [list(map(str, each)) for each in (targets, predictions)]
    (pearson,), (spearman,) = (m.results(texts[1], texts[0]) for m in (Pearson(), Spearman()))
    assert pearson.score == pytest.approx(100 * scipy.stats.pearsonr(targets, predictions)[0])
    assert spearman.score == pytest.approx(100 * scipy.stats.spearmanr(targets, predictions)[0])
    targets = ["1.0", "2.5", "4.0"]
    for metric in (Pearson(), Spearman()):
        (want,) = metric.results(["1.0", "-1", "4.0"], targets)
        for text in ("nan", "inf", "-inf", "none"):
            assert metric.results(["1.0", text, "4.0"], targets) == [want]
