# SPDX-License-Identifier: Apache-2.0
"""Metrics of texts that name a class or a number, as T5 has them for GLUE and SuperGLUE.

`t5.evaluation.metrics` and `t5.data.postprocessors` (Raffel et al. 2020, arXiv:1910.10683): a
text that names no class has class -1, a text that is not a number is -1. All are between 0
and 100, correlations between -100 and 100. Ranking by score needs no texts (`rank_results`).

Dims: N examples
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from switchx.data.downstream.pronouns import same_referent
from switchx.data.text_metrics import MetricResult, Reference
from switchx.fields import require


@dataclasses.dataclass(frozen=True)
class MatthewsCorrelation:
    """Matthews' correlation of any number of classes (Gorodkin 2004); CoLA's metric.

    0 if all targets or all predictions are of one class, as in scikit-learn.
    """

    classes: tuple[str, ...]
    names = ("matthews_corrcoef",)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        guess_N, right_N = (class_ids(each, self.classes) for each in (predictions, targets))
        kinds = np.union1d(guess_N, right_N)
        guesses, rights = ((each[:, None] == kinds).sum(0) for each in (guess_N, right_N))
        count, correct = len(right_N), int((guess_N == right_N).sum())
        covariance = correct * count - int(guesses @ rights)
        spread = (count**2 - int(guesses @ guesses)) * (count**2 - int(rights @ rights))
        score = covariance / spread**0.5 if spread else 0.0
        return [_result(*self.names, score, self.classes)]


@dataclasses.dataclass(frozen=True)
class BinaryF1:
    """F1 of the second of two classes; a text that names neither is wrong (MRPC, QQP)."""

    classes: tuple[str, str]
    names = ("f1",)

    def __post_init__(self):
        require(len(self.classes) == 2, f"BinaryF1.classes={self.classes}; use two, or MacroF1")

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        guess_N, right_N = (class_ids(each, self.classes) for each in (predictions, targets))
        guess_N = np.where(guess_N < 0, 1 - right_N, guess_N)
        return [_result(*self.names, _f1(guess_N, right_N, 1), self.classes)]


@dataclasses.dataclass(frozen=True)
class MacroF1:
    """The mean of the F1 of each class, classes that do not occur included (CB)."""

    classes: tuple[str, ...]

    @property
    def names(self) -> tuple[str]:
        return (f"mean_{len(self.classes)}class_f1",)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        guess_N, right_N = (class_ids(each, self.classes) for each in (predictions, targets))
        f1 = [_f1(guess_N, right_N, number) for number in range(len(self.classes))]
        return [_result(*self.names, statistics.fmean(f1), self.classes)]


@dataclasses.dataclass(frozen=True)
class Pearson:
    """Pearson's correlation of numbers (STS-B)."""

    names = ("pearson_corrcoef",)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        return [_correlation(*self.names, "pearsonr", predictions, targets)]


@dataclasses.dataclass(frozen=True)
class Spearman:
    """Spearman's rank correlation of numbers (STS-B)."""

    names = ("spearman_corrcoef",)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        return [_correlation(*self.names, "spearmanr", predictions, targets)]


@dataclasses.dataclass(frozen=True)
class GroupExactMatch:
    """Percentage of groups whose texts are all right; MultiRC's groups are questions."""

    names = ("exact_match",)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        is_right = collections.defaultdict(list)
        for prediction, target in zip(predictions, targets, strict=True):
            group = target.group if isinstance(target, Reference) else ""
            require(
                group, "GroupExactMatch needs targets with groups, such as those of MultiRC"
            )
            is_right[group].append(prediction == target)
        score = statistics.fmean(map(all, is_right.values()))
        return [MetricResult(*self.names, 100 * score, f"groups:{len(is_right)}")]


@dataclasses.dataclass(frozen=True)
class ReferentAccuracy:
    """Percentage of Winograd schemas where naming the noun, or not, is right (WSC)."""

    names = ("accuracy",)

    def results(self, predictions, targets, num_bootstrap=0) -> list[MetricResult]:
        is_right = []
        for prediction, target in zip(predictions, targets, strict=True):
            label = target.label if isinstance(target, Reference) else None
            require(label is not None, "ReferentAccuracy needs targets with labels, as WSC's")
            is_right.append(same_referent(prediction, target) == label)
        return [MetricResult(*self.names, 100 * statistics.fmean(is_right), "referent named")]


def class_ids(texts: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Indices of the classes that texts name, -1 for none, int64 [N]."""
    ids = {name: number for number, name in enumerate(classes)}
    return np.array([ids.get(text, -1) for text in texts], np.int64)


def numbers(texts: Sequence[str]) -> list[float]:
    """The finite numbers that texts spell; -1 for other texts (`nan` and `inf` among them)."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            return -1.0
        return value if math.isfinite(value) else -1.0

    return list(map(number, texts))


def _correlation(name: str, function: str, predictions, targets) -> MetricResult:
    import scipy.stats

    signature = "scipy|no number:-1"
    given = {"targets": numbers(targets), "predictions": numbers(predictions)}
    for what, values in given.items():
        if len(set(values)) == 1:
            note = f"all {len(values)} {what} are {values[0]:g}; a correlation needs two values"
            return MetricResult(name, None, signature, note=note)
    score = getattr(scipy.stats, function)(*given.values())[0]
    return MetricResult(name, 100 * float(score), signature)


def rank_results(
    scores: Sequence[Sequence[float]],
    is_right: Sequence[Sequence[bool]],
) -> list[MetricResult]:
    """Metrics of choosing the text with the highest score (T5's `rank_classification`).

    Args:
        scores: log-likelihoods of each example's choices; the first wins a tie.
        is_right: whether each of the same choices is right. Any right choice counts.

    Returns:
        `accuracy`. If all examples have equally many choices and one is right: with two
        choices also `f1`, `auc-roc` and `auc-pr` of the second one, with more the mean F1.

    Raises:
        ValueError: there are no examples, or numbers of scores and choices differ.
    """
    sizes = [len(each) for each in scores]
    require(
        sizes and sizes == [len(each) for each in is_right] and min(sizes) > 0,
        f"{len(sizes)} examples have scores and {len(is_right)} have choices, which must be "
        "equally many and at least one in each; score all choices of all examples",
    )
    unknown = sum(any(map(math.isnan, each)) for each in scores)
    note = f"{unknown} examples have scores that are NaN; see to the checkpoint" * bool(unknown)
    guess_N = np.array([int(np.argmax(each)) for each in scores])
    hit_N = [bool(right[guess]) for right, guess in zip(is_right, guess_N, strict=True)]
    results = {"accuracy": np.mean(hit_N)}
    has_one_right = all(sum(map(bool, each)) == 1 for each in is_right)
    if has_one_right and len(set(sizes)) == 1:
        right_N = np.array([int(np.argmax(each)) for each in is_right])
        results |= _class_results(np.array(scores, float), guess_N, right_N)
    return [
        MetricResult(name, None if unknown else 100 * float(each), "rank", note=note or None)
        for name, each in results.items()
    ]


def _class_results(score_NC, guess_N, right_N) -> dict[str, float]:
    num_classes = score_NC.shape[1]
    f1 = [_f1(guess_N, right_N, number) for number in range(num_classes)]
    if num_classes != 2:
        return {f"mean_{num_classes}class_f1": statistics.fmean(f1)}
    # The probability of the second class rises with the difference of the scores. Single
    # precision, as in T5: rounding decides which examples tie.
    score_NC = score_NC.astype(np.float32)
    shifted_NC = np.exp(score_NC - score_NC.max(-1, keepdims=True))
    chance_N = (shifted_NC / shifted_NC.sum(-1, keepdims=True))[:, 1]
    roc, precision_recall = _areas(chance_N, right_N == 1)
    return {"f1": f1[1], "auc-roc": roc, "auc-pr": precision_recall}


def _areas(chance_N, is_positive_N) -> tuple[float, float]:
    """Areas under the ROC curve, by trapezoids, and under precision over recall, by steps."""
    chance, place_N = np.unique(-chance_N, return_inverse=True)  # the most likely first
    found = np.bincount(place_N, is_positive_N, len(chance)).cumsum()
    false = np.bincount(place_N, ~is_positive_N, len(chance)).cumsum()
    if not found[-1] or not false[-1]:
        return float("nan"), float("nan")  # with one class there is nothing to find
    recall, fall_out = found / found[-1], false / false[-1]
    roc = np.trapezoid(np.append(0, recall), np.append(0, fall_out))
    return float(roc), float(np.sum(np.diff(recall, prepend=0) * found / (found + false)))


def _f1(guess_N, right_N, number: int) -> float:
    both = np.sum((guess_N == number) & (right_N == number))
    either = np.sum(guess_N == number) + np.sum(right_N == number)
    return float(2 * both / either) if either else 0.0


def _result(name: str, score: float, classes: Sequence[str]) -> MetricResult:
    return MetricResult(name, 100 * score, f"classes:{','.join(classes)}")
