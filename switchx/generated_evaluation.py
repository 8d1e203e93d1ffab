# SPDX-License-Identifier: Apache-2.0
"""Evaluation by generation: what a model writes for a task's inputs, compared with its targets.

All examples are answered, in corpus order, and targets are the texts exactly as they stand
in the corpus, never decoded tokens.
"""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence

import jax

from switchx.api import Model
from switchx.data.evaluation import EvaluationExamples, evaluation_examples
from switchx.data.mixtures import Mixture, evaluated_tasks
from switchx.data.tasks import Task, TextFormat
from switchx.data.text_metrics import METRICS, MetricResult
from switchx.fields import describe, require
from switchx.inference.generate import Generator, text_of
from switchx.inference.model_mesh import ModelMesh
from switchx.partitioning.mesh import PIPE
from switchx.training.job import TrainingJob
from switchx.training.text_evaluation import TaskTexts


def metrics_of(
    source: Task | Mixture,
    names: Sequence[str] | None,
    chosen: Sequence[str] | None = None,
    has_file: bool = False,
) -> dict[str, tuple]:
    """The metrics of each task that is to be answered.

    Args:
        names: names of metrics; None is the tasks' own.
        chosen: names of tasks; None is all that have metrics.
        has_file: whether answers are written to a file: then tasks without metrics are answered
            too, if they are chosen or no task has any.

    Raises:
        ValueError: a metric does not exist; metrics are named but no task has texts as
            targets; a chosen task does not exist or has no metrics.
    """
    tasks = evaluated_tasks(source)
    if names is None:
        metrics = {task.name: task.metrics for task in tasks if task.metrics}
        if has_file and (chosen or not metrics):
            metrics = {task.name: task.metrics for task in tasks if task.objective.has_texts}
    else:
        unknown = [name for name in names if name not in METRICS]
        require(not unknown, f"there is no metric {unknown}; use some of {', '.join(METRICS)}")
        named = tuple(METRICS[name]() for name in names)
        metrics = {task.name: named for task in tasks if task.objective.has_texts and named}
        require(
            bool(metrics) or not named,
            f"metrics={','.join(names)} compares generated texts with targets, and no "
            f"task ({', '.join(task.name for task in tasks)}) is of InputsToTargets; leave "
            "it out, or give the gin file of such a task",
        )
    wrong = [name for name in chosen or () if name not in metrics]
    require(
        not wrong,
        f"tasks names {', '.join(map(repr, wrong))}; there are metrics for "
        f"{', '.join(metrics) or 'no task: name some by metrics'}",
    )
    return {name: metrics[name] for name in metrics if chosen is None or name in chosen}


@dataclasses.dataclass(frozen=True)
class Questions:
    """The examples that a model is to answer.

    Attributes:
        examples: examples of the corpus.
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
        num_unfinished: number of texts that did not end within `max_new_tokens`.
    """

    texts: list[str]
    num_unfinished: int


def ask(model: Model, examples: EvaluationExamples) -> Questions:
    """Turns examples into prompts for a model.

    Raises:
        ValueError: the task's vocabulary is not the model's.
    """
    task = examples.task
    ours, theirs = task.vocabulary, model.vocabulary
    if theirs is None or ours.fingerprint() != theirs.fingerprint():
        found = "none" if theirs is None else f"another one, of {theirs.size} ids"
        raise ValueError(
            f"task {task.name!r} has a vocabulary of {ours.size} ids, the model has {found}; "
            "use the one that the model was trained with, whose copy is in its folder"
        )
    return Questions(examples, [model.prompt(tokens.tolist()) for tokens in examples.tokens])


def answer(
    model: Model,
    generator: Generator,
    questions: Questions,
    progressed: Callable[[int], None] = lambda num_done: None,
) -> Answers:
    """Generates an answer to every question.

    Args:
        progressed: called with the number of answers so far, as they are generated.

    Raises:
        ValueError: the model cannot read a prompt; nothing has been generated.
    """
    require_readable(generator, questions)
    texts, num_unfinished = [""] * len(questions.prompts), 0
    for num_done, (number, (best, *_)) in enumerate(generator(questions.prompts), 1):
        texts[number] = text_of(best, model.vocabulary, generator.stops)
        num_unfinished += not best.is_finished
        progressed(num_done)
    return Answers(texts, num_unfinished)


def require_readable(generator: Generator, questions: Questions) -> None:
    """Raises ValueError if the model cannot read a prompt."""
    for number, prompt in enumerate(questions.prompts):
        if fault := generator.fault(prompt):
            raise ValueError(f"task {questions.task.name!r}: example {number} {fault}")


class JobTexts:
    """The texts that a job's model generates, with its parameters on the training mesh.

    A `training.text_evaluation.TextEvaluator` for `TrainingJob.text_evaluation`. Texts and
    metrics are those of `switchx eval` on the same parameters: no token is dropped.
    """

    def __init__(self, job: TrainingJob, mesh: jax.sharding.Mesh, decoding=None):
        """Reads the examples of all tasks that have metrics.

        Args:
            decoding: decoding defaults, as `read_decoding` returns them.

        Raises:
            ValueError: no task has metrics, an input cannot be read, or the model cannot be
                decoded where its parameters are.
        """
        self._spec = job.text_evaluation
        tasks = [task for task in evaluated_tasks(job.source) if task.metrics]
        require(
            bool(tasks),
            "TrainingJob.text_evaluation measures texts, and no task of "
            f"{', '.join(task.name for task in evaluated_tasks(job.source))} has metrics; name "
            "some (Task.metrics), or use --gin.TEXT_EVALUATION=None",
        )
        job.require_storage(dict(mesh.shape))
        require(
            mesh.shape[PIPE] == 1,
            f"TrainingJob.text_evaluation with mesh axis {PIPE!r} of size {mesh.shape[PIPE]}: "
            "texts are generated where all parameters are on the devices, without stages; use "
            "--gin.TEXT_EVALUATION=None, and `switchx eval` on the checkpoints",
        )
        text_format = TextFormat.of_training(
            describe(job.source, "job.source"), is_encoder_decoder=job.model.is_encoder_decoder
        )
        devices = ModelMesh(mesh, job.mesh.rules)
        parts = job.model, {}, job.vocabulary, 0, text_format, "", devices
        self._model = Model(*parts, decoding=decoding or {})
        generator = self._generator(self._model)
        self._questions = [
            ask(self._model, examples)
            for examples in (
                evaluation_examples(
                    task,
                    task.evaluation_split,
                    job.features,
                    job.data_dir,
                    self._spec.max_examples,
                )
                for task in tasks
            )
        ]
        for each in self._questions:
            require_readable(generator, each)

    def __call__(self, params: dict, goes_on: Callable[[], bool]) -> dict[str, TaskTexts]:
        model = dataclasses.replace(self._model, params=params)
        generator, size = self._generator(model), self._spec.batch_size
        answers = [[] for _ in self._questions]
        most = max(len(asked.prompts) for asked in self._questions)
        for first in range(0, most, size):
            if first and not goes_on():
                break
            for asked, answered in zip(self._questions, answers, strict=True):
                prompts = asked.prompts[first : first + size]
                part = dataclasses.replace(asked, prompts=prompts)
                answered.append(answer(model, generator, part))
        return {
            asked.task.name: _task_texts(asked.examples, answered)
            for asked, answered in zip(self._questions, answers, strict=True)
        }

    def _generator(self, model: Model) -> Generator:
        spec = self._spec
        return model.generator(
            batch_size=spec.batch_size,
            beam_size=spec.beam_size,
            max_new_tokens=spec.max_new_tokens,
        )


def _task_texts(examples: EvaluationExamples, answers: Sequence[Answers]) -> TaskTexts:
    texts = [text for each in answers for text in each.texts]
    answered = examples.first(len(texts))
    results = answered.results(texts)
    return TaskTexts(
        {each.name: each.score for each in results},
        answered.inputs,
        answered.targets,
        texts,
        num_left_out=len(examples.inputs) - len(texts),
        num_unfinished=sum(each.num_unfinished for each in answers),
        notes={each.name: each.note for each in results if each.note is not None},
    )


def rank_choices(
    model: Model,
    questions: Questions,
    batch_size: int = 32,
    progressed: Callable[[int], None] = lambda num_done: None,
) -> list[MetricResult]:
    """Metrics of the choices that the model considers likeliest (T5's rank classification).

    Args:
        progressed: called with the number of choices scored so far, as they are.

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
    """Means over tasks of results with the same name and signature, in order of appearance.

    A metric for which some task has no score has no mean.
    """
    scores, missing = collections.defaultdict(list), {}
    for result in itertools.chain.from_iterable(results):
        if result.score is None:
            missing[result.name] = result.signature
        else:
            scores[result.name, result.signature].append(result.score)
    scores = {key: values for key, values in scores.items() if key[0] not in missing}
    note = "a task has no score, and so there is no mean"
    return [MetricResult(name, None, missing[name], note=note) for name in missing] + [
        MetricResult(name, statistics.fmean(values), signature)
        for (name, signature), values in scores.items()
    ]
