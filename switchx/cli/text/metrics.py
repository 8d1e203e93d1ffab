# SPDX-License-Identifier: Apache-2.0
"""The part of `switchx eval` that lets the model write: its options, run and report."""

import argparse
import dataclasses
import json
import os
import pathlib
from typing import Any

from switchx.cli import arguments as shared
from switchx.inference.config import DecodingConfig


def add_arguments(parser: shared.CommandParser) -> None:
    parser.add_argument(
        "--metrics",
        type=_names,
        metavar="NAMES",
        help="of generated texts, some of bleu,chrf,rouge,squad,accuracy, instead of the "
        "tasks' own; none generates nothing",
    )
    parser.add_argument(
        "--tasks",
        metavar="NAMES",
        help="of a mixture, to answer, separated by commas; default: all with metrics",
    )
    parser.add_argument("--split", metavar="NAME", help="of the corpora; default: the tasks'")
    parser.add_argument(
        "--max_examples", type=shared.positive, metavar="N", help="answer N of each task"
    )
    # Searched for, not sampled: a score is to be the same again.
    shared.add_options(
        parser,
        DecodingConfig,
        ("beam_size", "max_new_tokens", "length_penalty"),
        max_new_tokens=128,
    )
    parser.add_argument(
        "--batch_size",
        type=shared.positive,
        default=32,
        metavar="N",
        help="most inputs at once in generation (default: %(default)s)",
    )
    parser.add_argument(
        "--bootstrap",
        type=shared.positive,
        default=0,
        metavar="N",
        help="samples of sacreBLEU's bootstrap, for intervals of 95%% of BLEU and chrF, such "
        "as 1000",
    )
    parser.add_argument(
        "--predictions",
        type=shared.not_empty,
        metavar="FILE",
        help="file to write: JSON lines of task, inputs, target, prediction",
    )


def with_split(source, split: str | None):
    """The task or mixture, to be evaluated on another split."""
    from switchx.data.mixtures import Mixture

    if split is None:
        return source
    if isinstance(source, Mixture):
        tasks = tuple(with_split(task, split) for task in source.tasks)
        return dataclasses.replace(source, tasks=tasks)
    return dataclasses.replace(source, evaluation_split=split)


def metrics_of(
    source, names: list[str] | None, chosen_tasks: str | None = None
) -> dict[str, tuple]:
    """Metrics of each task that is to be answered.

    Args:
        names: of metrics; None is the tasks' own.
        chosen_tasks: names, separated by commas; None is all that have metrics.

    Raises:
        ValueError: metrics are named, and no task has texts for targets; a chosen task is not
            there or has no metrics.
    """
    metrics = _metrics_of_all(source, names)
    if chosen_tasks is None:
        return metrics
    chosen = chosen_tasks.split(",")
    if wrong := [name for name in chosen if name not in metrics]:
        raise ValueError(
            f"--tasks names {', '.join(map(repr, wrong))}; there are metrics for "
            f"{', '.join(metrics) or 'no task: name some by --metrics'}"
        )
    return {name: metrics[name] for name in metrics if name in chosen}


def _metrics_of_all(source, names: list[str] | None) -> dict[str, tuple]:
    from switchx.data.mixtures import as_mixture
    from switchx.data.text_metrics import METRICS

    tasks = as_mixture(source).tasks
    if names is None:
        return {task.name: task.metrics for task in tasks if task.metrics}
    chosen = tuple(METRICS[name]() for name in names)
    able = [task.name for task in tasks if task.objective.has_texts]
    if chosen and not able:
        raise ValueError(
            f"--metrics={','.join(names)} compares generated texts with targets, and no task "
            f"({', '.join(task.name for task in tasks)}) is of InputsToTargets; leave it out, "
            "or give the gin file of such a task"
        )
    return {name: chosen for name in able if chosen}


def require_options(arguments: argparse.Namespace) -> None:
    """Refuses, before anything is read, what cannot be written or means nothing."""
    if arguments.bootstrap == 1:
        raise ValueError("--bootstrap=1 is no sample to tell an interval by; use 1000")
    if arguments.predictions is None:
        return
    path = pathlib.Path(arguments.predictions).expanduser().absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"--predictions={path} cannot be written: "
            f"{'it is a folder' if path.is_dir() else 'its folder is not there or is locked'}"
        )


def evaluate_texts(
    arguments: argparse.Namespace, job, metrics: dict[str, tuple], model, reporter
) -> dict[str, Any]:
    """Answers the tasks in `metrics` and measures the answers.

    Returns:
        Settings, results of each task, and their means where there are several; JSON.
    """
    from switchx.data.mixtures import as_mixture
    from switchx.text_evaluation import mean_results, measure, read_questions

    decoding = shared.options_of(arguments, DecodingConfig)
    generator = model.generator(batch_size=arguments.batch_size, **decoding)
    questions = [
        read_questions(
            model, task, task.evaluation_split, job.features, job.data_dir,
            arguments.max_examples,
        )
        for task in as_mixture(job.source).tasks
        if task.name in metrics
    ]  # fmt: skip
    answers = _answer(model, generator, questions, arguments.predictions, reporter)
    tasks, results = {}, []
    for asked, answered in zip(questions, answers, strict=True):
        name = asked.task.name
        results.append(
            measure(metrics[name], answered.texts, asked.targets, arguments.bootstrap)
        )
        tasks[name] = {
            "split": asked.task.evaluation_split,
            "examples": len(asked.inputs),
            "inputs_cut": asked.num_cut,
            "outputs_unfinished": answered.num_unfinished,
            "metrics": [dataclasses.asdict(each) for each in results[-1]],
        }
    means = mean_results(results) if len(results) > 1 else []
    return {
        "decoding": decoding,
        "tasks": tasks,
        "mean": [dataclasses.asdict(each) for each in means],
    }


def table_rows(texts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """For a person: what, its score or number, and its interval."""
    rows = []
    groups = {name: values["metrics"] for name, values in texts["tasks"].items()}
    for name, metrics in (groups | ({"mean": texts["mean"]} if texts["mean"] else {})).items():
        for each in metrics:
            interval = ""
            if each["interval"]:
                low, high = each["interval"]
                interval = f"{low:.2f} to {high:.2f}"
            rows.append((f"{name}: {each['name']}", f"{each['score']:.2f}", interval))
    for name, values in texts["tasks"].items():
        for key, what in (("inputs_cut", "inputs"), ("outputs_unfinished", "outputs")):
            if values[key]:
                said = "cut to a row of training" if what == "inputs" else "cut off"
                rows.append((f"{name}: {what} {said}", f"{values[key]:,}", ""))
    return rows


def signatures(texts: dict[str, Any]) -> list[str]:
    """Each metric's signature, once."""
    of_all = [each for values in texts["tasks"].values() for each in values["metrics"]]
    return list(dict.fromkeys(f"{each['name']}  {each['signature']}" for each in of_all))


def _answer(model, generator, questions, file: str | None, reporter) -> list:
    from switchx.text_evaluation import answer

    def counted_from(before: int):
        return lambda number: reporter.counted(before + number)

    answers, lines, before = [], [], 0
    reporter.begin(0, sum(len(each.prompts) for each in questions))
    for asked in questions:
        reporter.note(f"answering {len(asked.prompts):,} examples of {asked.task.name}")
        answers.append(answer(model, generator, asked, counted_from(before)))
        before += len(asked.prompts)
        if file:
            lines += _lines(asked, answers[-1])
            _write(file, lines)  # after each task: what is done is not lost
    return answers


def _lines(asked, answered) -> list[str]:
    texts = zip(asked.inputs, asked.targets, answered.texts, strict=True)
    return [
        json.dumps(
            {"task": asked.task.name, "inputs": i, "target": t, "prediction": p},
            ensure_ascii=False,
        )
        for i, t, p in texts
    ]


def _write(file: str, lines: list[str]) -> None:
    from switchx.data.data_dir import write_atomically

    text = "".join(f"{line}\n" for line in lines)
    write_atomically(pathlib.Path(file).expanduser().absolute(), text.encode())


def _names(text: str) -> list[str]:
    # Not imported from switchx.data: help does not wait for the data libraries.
    known = ("bleu", "chrf", "rouge", "squad", "accuracy")
    names = [] if text == "none" else text.split(",")
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"there is no metric {wrong[0]!r}; use some of {','.join(known)}, or none"
        )
    return list(dict.fromkeys(names))
