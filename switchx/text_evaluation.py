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
from switchx.data.evaluation import EvaluationExamples, evaluation_examples
from switchx.data.features import Features
from switchx.data.tasks import Task
from switchx.data.text_metrics import MetricResult
from switchx.inference.generate import Generator


@dataclasses.dataclass(frozen=True)
class Questions:
    """What a model is to answer.

    Attributes:
        examples: of the corpus.
        prompts: token ids that a generator reads.
    """

    examples: EvaluationExamples
    prompts: list[list[int]]

    @property
    def task(self) -> Task:
        return self.examples.task


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
    ours, theirs = task.vocabulary, model.vocabulary
    if theirs is None or ours.fingerprint() != theirs.fingerprint():
        found = "none" if theirs is None else f"another one, of {theirs.size} ids"
        raise ValueError(
            f"task {task.name!r} has a vocabulary of {ours.size} ids, the model has {found}; "
            "use the one that the model was trained with, whose copy is in its folder"
        )
    examples = evaluation_examples(task, split, features, data_dir, max_examples)
    return Questions(examples, [model.prompt(tokens.tolist()) for tokens in examples.tokens])


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


def rank_choices(
    model: Model,
    questions: Questions,
    batch_size: int = 32,
    progressed: Callable[[int], None] = lambda num_done: None,
) -> list[MetricResult]:
    """Metrics of the choices that the model finds most likely (T5's rank classification).

    Args:
        progressed: is told how many choices are scored, as they are.

    Raises:
        ValueError: an example has no choices, or the model cannot read one.
    """
    examples = questions.examples
    numbered = examples.choice_tokens()
    pairs = [(examples.tokens[number].tolist(), tokens.tolist()) for number, tokens in numbered]
    scorer = model.scorer(batch_size=batch_size)
    for (number, _), pair in zip(numbered, pairs, strict=True):
        if fault := scorer.fault(pair):
            raise ValueError(f"task {questions.task.name!r}: example {number} {fault}")
    scores = [0.0] * len(pairs)
    for num_done, (place, score) in enumerate(scorer(pairs), 1):
        scores[place] = score.log_likelihood
        progressed(num_done)
    results = examples.rank(scores)
    return [dataclasses.replace(each, name=f"rank_{each.name}") for each in results]


def mean_results(results: Sequence[Sequence[MetricResult]]) -> list[MetricResult]:
    """Means over tasks, of what has the same name and signature, in order of appearance."""
    scores = collections.defaultdict(list)
    for result in itertools.chain.from_iterable(results):
        scores[result.name, result.signature].append(result.score)
    return [
        MetricResult(name, statistics.fmean(values), signature)
        for (name, signature), values in scores.items()
    ]
