# SPDX-License-Identifier: Apache-2.0
"""Evaluation by generation: what a model writes to a task's inputs, against its targets.

All examples are answered, in the corpus' order, and targets are the corpus' texts as they
stand there, never decoded tokens.
"""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence

from switchx.api import Model
from switchx.data.features import Example, Features
from switchx.data.tasks import Task, open_task
from switchx.data.text_metrics import MetricResult, TextMetric
from switchx.inference.generate import Generator


@dataclasses.dataclass(frozen=True)
class Questions:
    """What a model is to answer.

    Attributes:
        inputs, targets: the corpus' texts.
        prompts: token ids that a generator reads.
        num_cut: inputs that were cut to a row of training, as their task says (`truncate`).
    """

    task: Task
    inputs: list[str]
    targets: list[str]
    prompts: list[list[int]]
    num_cut: int


@dataclasses.dataclass(frozen=True)
class Answers:
    """Texts that a model wrote.

    Attributes:
        num_unfinished: those that did not end within `max_new_tokens`.
    """

    texts: list[str]
    num_unfinished: int


def read_questions(
    model: Model,
    task: Task,
    split: str,
    features: Features,
    data_dir: str | None = None,
    max_examples: int | None = None,
) -> Questions:
    """The first examples of a split, or all, as the model's training would read them.

    Args:
        features: of training, which say how long an input may be that is cut.

    Raises:
        ValueError: the task has no texts for targets, there is no such split or it is empty,
            or the vocabulary is not the model's.
    """
    if not task.objective.has_texts:
        raise ValueError(
            f"task {task.name!r}: {type(task.objective).__name__} has no texts for targets; "
            "metrics of generated texts need a task of InputsToTargets"
        )
    ours, theirs = task.vocabulary, model.vocabulary
    if theirs is None or ours.fingerprint() != theirs.fingerprint():
        found = "none" if theirs is None else f"another one, of {theirs.size} ids"
        raise ValueError(
            f"task {task.name!r} has a vocabulary of {ours.size} ids, the model has {found}; "
            "use the one that the model was trained with, whose copy is in its folder"
        )
    records = open_task(task, split, data_dir, features).records
    count = len(records) if max_examples is None else min(max_examples, len(records))
    inputs, targets, prompts, num_cut = [], [], [], 0
    for record in (records[number] for number in range(count)):
        tokens = task.objective.example(record, ours).inputs
        if task.too_long == "truncate":
            cut = features.truncate(Example(tokens, tokens[:0]), ours.eos_id).inputs
            num_cut += len(cut) < len(tokens)
            tokens = cut
        inputs.append(record["inputs"])
        targets.append(record["targets"])
        prompts.append(model.prompt(tokens.tolist()))
    return Questions(task, inputs, targets, prompts, num_cut)


def answer(
    model: Model,
    generator: Generator,
    questions: Questions,
    progressed: Callable[[int], None] = lambda num_done: None,
) -> Answers:
    """Generates an answer to every question.

    Args:
        progressed: is told how many are answered, as they are.

    Raises:
        ValueError: the model cannot read a prompt; nothing was generated.
    """
    for number, prompt in enumerate(questions.prompts):
        if fault := generator.fault(prompt):
            raise ValueError(f"task {questions.task.name!r}: example {number} {fault}")
    texts, num_unfinished = [""] * len(questions.prompts), 0
    for num_done, (number, (best, *_)) in enumerate(generator(questions.prompts), 1):
        texts[number] = model.vocabulary.decode(best.tokens)
        num_unfinished += not best.is_finished
        progressed(num_done)
    return Answers(texts, num_unfinished)


def measure(
    metrics: Sequence[TextMetric],
    predictions: Sequence[str],
    targets: Sequence[str],
    num_bootstrap: int = 0,
) -> list[MetricResult]:
    """What all metrics say of the same texts, in their order."""
    each = (metric.results(predictions, targets, num_bootstrap) for metric in metrics)
    return list(itertools.chain.from_iterable(each))


def mean_results(results: Sequence[Sequence[MetricResult]]) -> list[MetricResult]:
    """Means over tasks, of what has the same name and signature, in order of appearance."""
    scores = collections.defaultdict(list)
    for result in itertools.chain.from_iterable(results):
        scores[result.name, result.signature].append(result.score)
    return [
        MetricResult(name, statistics.fmean(values), signature)
        for (name, signature), values in scores.items()
    ]
