# SPDX-License-Identifier: Apache-2.0
"""The examples that a model answers in evaluation, and the metrics of its answers.

A task and a split give `EvaluationExamples`: texts and tokens of the inputs as training reads
them, targets with all that metrics need, and `metrics(predictions)`. How the predictions are
generated, on which devices and when, is up to the caller.

Dims: L length of a text in tokens
"""

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from switchx.data.features import Example, Features
from switchx.data.label_metrics import rank_results
from switchx.data.tasks import Task, open_task
from switchx.data.text_metrics import (
    MetricResult,
    Reference,
    TextMetric,
    computed,
    results_or_notes,
)
from switchx.fields import require

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvaluationExamples:
    """Examples of one split, in its order.

    Attributes:
        inputs: texts, without the objective's prefix.
        targets: texts, or `Reference`s if the corpus has more than a target.
        tokens: token ids of the inputs, as the objective makes them; a list of arrays [L].
        num_cut: number of inputs that were cut to the length of a training row, which the task
            allows (`truncate`).
    """

    task: Task
    split: str
    inputs: list[str]
    targets: list[str]
    tokens: list[np.ndarray]
    num_cut: int

    def first(self, number: int) -> "EvaluationExamples":
        """The first `number` examples; `num_cut` stays that of all."""
        parts = {name: getattr(self, name)[:number] for name in ("inputs", "targets", "tokens")}
        return dataclasses.replace(self, **parts)

    def results(
        self,
        predictions: Sequence[str],
        metrics: Sequence[TextMetric] | None = None,
        num_bootstrap: int = 0,
    ) -> list[MetricResult]:
        """The results of metrics on one text for each example, in the examples' order.

        A metric that cannot be computed has no score, and a note that says why.

        Args:
            metrics: metrics to compute; None takes the task's own.

        Raises:
            ValueError: the numbers of predictions and of examples differ.
        """
        require(
            len(predictions) == len(self.targets),
            f"task {self.task.name!r}: {len(predictions)} predictions for {len(self.targets)} "
            f"examples of {self.split!r}; give one for each, in their order",
        )
        each = (
            results_or_notes(metric, predictions, self.targets, num_bootstrap)
            for metric in (self.task.metrics if metrics is None else metrics)
        )
        return self._said(itertools.chain.from_iterable(each))

    def metrics(self, predictions: Sequence[str]) -> dict[str, float | None]:
        """The scores of the task's metrics by their names.

        Raises:
            ValueError: as `results`.
        """
        return {each.name: each.score for each in self.results(predictions)}

    def _said(self, results: Iterable[MetricResult]) -> list[MetricResult]:
        """The results; those that could not be computed are also logged."""
        results = list(results)
        for each in results:
            if each.score is None:
                _log.warning("task %r has no %s: %s", self.task.name, each.name, each.note)
        return results

    @property
    def choices(self) -> list[tuple[str, ...]]:
        """Texts that each example chooses from.

        Raises:
            ValueError: an example has no choices, or its right choice is not known.
        """
        for number, target in enumerate(self.targets):
            is_known = (
                isinstance(target, Reference)
                and target.choices
                and target.label in range(len(target.choices))
            )
            require(
                is_known,
                f"task {self.task.name!r}: example {number} of {self.split!r} has no choices "
                "of which one is known to be right; rank tasks of classes, or with choices",
            )
        return [target.choices for target in self.targets]

    def choice_tokens(self) -> list[tuple[int, np.ndarray]]:
        """The example's number and the tokens of each choice, one example after another."""
        objective, vocabulary = self.task.objective, self.task.vocabulary
        return [
            (number, objective.example({"inputs": "", "targets": text}, vocabulary).targets)
            for number, texts in enumerate(self.choices)
            for text in texts
        ]

    def rank(self, scores: Sequence[float]) -> list[MetricResult]:
        """Metrics of the choices with the highest scores.

        Args:
            scores: log-likelihoods in the order of `choice_tokens`.
        """
        left = iter(scores)
        by_example = [list(itertools.islice(left, len(texts))) for texts in self.choices]
        is_right = [
            [number == target.label for number in range(len(target.choices))]
            for target in self.targets
        ]
        return self._said(map(computed, rank_results(by_example, is_right)))


def evaluation_examples(
    task: Task,
    split: str,
    features: Features,
    data_dir: str | None = None,
    max_examples: int | None = None,
) -> EvaluationExamples:
    """The first examples of a split, or all, as training would read them.

    Args:
        features: training features, which set the maximum input length; longer ones are cut.

    Raises:
        ValueError: the task has no texts for targets, or the split does not exist or is
            empty.
    """
    require(
        task.objective.has_texts,
        f"task {task.name!r}: {type(task.objective).__name__} has no texts for targets; "
        "metrics of generated texts need a task of InputsToTargets",
    )
    records = open_task(task, split, data_dir, features).records
    count = len(records) if max_examples is None else min(max_examples, len(records))
    made = EvaluationExamples(task, split, [], [], [], 0)
    num_cut = 0
    for record in (records[number] for number in range(count)):
        example = _with_longest_target(task, record)
        tokens_L = example.inputs
        if task.too_long == "truncate":
            cut = features.truncate(example, task.vocabulary.eos_id)
            num_cut += len(cut.inputs) < len(tokens_L)
            tokens_L = cut.inputs
        made.inputs.append(record["inputs"])
        made.targets.append(target_of(record))
        made.tokens.append(tokens_L)
    return dataclasses.replace(made, num_cut=num_cut)


def _with_longest_target(task: Task, record: Mapping[str, str]) -> Example:
    """The example whose target is the longest of the record's own and its choices."""
    texts = {record["targets"], *getattr(target_of(record), "choices", ())}
    examples = (
        task.objective.example({**record, "targets": text}, task.vocabulary) for text in texts
    )
    return max(examples, key=lambda example: len(example.targets))


def prediction_rows(
    task: str, inputs: Sequence[str], targets: Sequence[str], predictions: Sequence[str]
) -> list[dict[str, str]]:
    """One row per example, for a file of predictions; with `id` if the data set has them."""
    rows = []
    for each in zip(inputs, targets, predictions, strict=True):
        row = {"task": task} | dict(zip(("inputs", "target", "prediction"), each, strict=True))
        if example_id := getattr(each[1], "example_id", ""):
            row["id"] = example_id
        rows.append(row)
    return rows


def target_of(record: Mapping[str, str]) -> str:
    """The target of a record, with the facts stored beside it, if any."""
    if "facts" not in record:
        return record["targets"]
    return Reference(record["targets"], **json.loads(record["facts"]))
