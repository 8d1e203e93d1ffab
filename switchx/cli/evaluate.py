# SPDX-License-Identifier: Apache-2.0
"""`switchx eval`: the validation metrics of a trained model and of what it writes."""

import argparse
import dataclasses
import json
import os
import pathlib
from typing import Any

from switchx.cli import arguments as shared
from switchx.fields import require
from switchx.inference.config import DecodingConfig

DESCRIPTION = """\
Evaluates a checkpoint of a run folder on the validation split of its task: negative log
perplexity (higher is better), accuracy, dropped tokens and load per expert.

  switchx eval --model_dir=DIR
  switchx eval --model_dir=DIR --step=best --json

The configuration is the run's own, DIR/operative_config.gin, and --gin.NAME=VALUE changes
it: the data, the batch, the capacity and the mesh may be others than in training, what the
parameters mean may not. For further gin files, name that one too:

  switchx eval --gin_file=DIR/operative_config.gin --gin_file=configs/meshes/one_device.gin \\
    --gin.TrainingJob.eval_batches=None --model_dir=DIR

Where tasks of inputs and targets have metrics (Task.metrics), or --metrics names some, the
model also writes to the split's inputs, without dropping tokens, and the metrics of what it
wrote are printed with their libraries' signatures, by task and the mean of all:

  switchx eval --model_dir=DIR --metrics=bleu,chrf --split=test --beam_size=4 \\
    --bootstrap=1000 --predictions=FILE

A folder of `switchx quantize` is evaluated by its texts alone, on the tasks of gin files:

  switchx eval --gin_file=DIR/operative_config.gin --model_dir=DIR_INT4 --metrics=bleu
"""


def add_command(commands) -> None:
    parser = shared.add_command(commands, "eval", run, "evaluate a trained model", DESCRIPTION)
    shared.add_gin_arguments(parser, default="operative_config.gin of the run folder")
    shared.add_model_dir(
        parser, "run folder of `switchx train` or `switchx quantize`; nothing is written there"
    )
    shared.add_step(parser, "checkpoint to evaluate")
    parser.add_argument(
        "--metrics",
        type=_metric_names,
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
        "--rank_choices",
        action="store_true",
        help="also score the choices of each example and measure the most likely ones",
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
        help="file to write: JSON lines of task, inputs, target, prediction, of tasks without "
        "metrics too",
    )
    shared.add_json(parser, "print one JSON object, with the routing of each layer")


def run(arguments: argparse.Namespace) -> int:
    from switchx.cli.progress import TerminalReporter

    _require_options(arguments)
    with TerminalReporter(unit="example") as reporter:
        reporter.note("loading JAX and the data libraries")
        job, metrics = _evaluate(arguments, reporter)
    if arguments.json:
        print(json.dumps(metrics))
    else:
        print_tables(job, metrics)
    return 0


def _require_options(arguments: argparse.Namespace) -> None:
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


def _evaluate(arguments: argparse.Namespace, reporter) -> tuple[Any, dict[str, Any]]:
    from switchx import api
    from switchx.checkpoint.restore import choose_step
    from switchx.checkpoint.run_folder import RunFolder
    from switchx.inference.artifact import is_artifact
    from switchx.training.resume import check_same_model, with_vocabulary_of

    is_quantized = is_artifact(arguments.model_dir)
    folder = RunFolder(arguments.model_dir)
    if is_quantized and arguments.gin_file is None:
        raise ValueError(
            f"{folder.root} is quantized, and does not know its tasks; give the gin files "
            "that do, such as --gin_file=DIR/operative_config.gin of the run it was made "
            "from"
        )
    job = shared.parse_job_of(arguments, folder)
    job = dataclasses.replace(job, source=_with_split(job.source, arguments.split))
    file = arguments.predictions
    wanted = metrics_of(job.source, arguments.metrics, arguments.tasks, file is not None)
    if file is not None and not wanted:
        raise ValueError(
            f"--predictions={file}: no text is written with --metrics=none, or without a task "
            "of InputsToTargets; leave it out, or give the gin file of such a task"
        )
    if arguments.rank_choices and not wanted:
        raise ValueError(
            "--rank_choices measures texts that a task's examples choose from, and no task has "
            "metrics of texts; give the gin file of one that does, or leave it out"
        )
    step, metrics = arguments.step, {}
    if not is_quantized:
        job = check_same_model(folder, job)
        step = choose_step(folder, arguments.step)
        metrics = {"step": step} | _likelihood(folder, job, step, reporter)
    elif not wanted:
        raise ValueError(
            f"{folder.root} is quantized: it is evaluated by the texts that it writes; give "
            "--metrics, or gin files of tasks that have metrics"
        )
    else:
        job = with_vocabulary_of(folder, job)
    if wanted:
        model = api.load(arguments.model_dir, step, task=_only_task(job, wanted))
        texts = _evaluate_texts(arguments, job, wanted, model, reporter)
        metrics = {"step": model.step} | metrics | {"texts": texts}
    return job, metrics


def _only_task(job, wanted: dict[str, tuple]) -> str | None:
    """The task whose experts answer, where tasks have their own; None where all have all."""
    switch = job.model.switch
    if switch is None or switch.router.kind != "task":
        return None
    require(
        len(wanted) == 1,
        f"the experts of this model are divided among tasks, and {', '.join(wanted)} have "
        "metrics; answer one at a time: --tasks=NAME",
    )
    return next(iter(wanted))


def _likelihood(folder, job, step: int, reporter) -> dict[str, Any]:
    from switchx.checkpoint.restore import restore_params
    from switchx.training.host_program import compiled_program
    from switchx.training.loop import evaluate_job

    program = compiled_program(job)
    reporter.note(f"evaluating {folder.checkpoints / str(step)}")
    with program.scope():
        target = program.abstract_state.params
        params = restore_params(folder.root, step, target=target, model=job.model)
        return evaluate_job(job, program, params)


# What the model writes.


def _with_split(source, split: str | None):
    """The task or mixture, to be evaluated on another split."""
    from switchx.data.mixtures import Mixture

    if split is None:
        return source
    if isinstance(source, Mixture):
        name = "tasks" if source.evaluation is None else "evaluation"
        tasks = tuple(_with_split(task, split) for task in getattr(source, name))
        return dataclasses.replace(source, **{name: tasks})
    return dataclasses.replace(source, evaluation_split=split)


def metrics_of(
    source,
    names: list[str] | None,
    chosen_tasks: str | None = None,
    has_file: bool = False,
) -> dict[str, tuple]:
    """Metrics of each task that is to be answered.

    Args:
        names: of metrics; None is the tasks' own.
        chosen_tasks: names, separated by commas; None is all that have metrics.
        has_file: answers are wanted of tasks without metrics, too, where they are chosen or no
            task has any: `switchx eval --predictions`.

    Raises:
        ValueError: metrics are named, and no task has texts for targets; a chosen task is not
            there or has no metrics.
    """
    from switchx.data.mixtures import evaluated_tasks
    from switchx.data.text_metrics import METRICS

    tasks = evaluated_tasks(source)
    if names is None:
        metrics = {task.name: task.metrics for task in tasks if task.metrics}
        if has_file and (chosen_tasks or not metrics):
            metrics = {task.name: task.metrics for task in tasks if task.objective.has_texts}
    else:
        named = tuple(METRICS[name]() for name in names)
        metrics = {task.name: named for task in tasks if task.objective.has_texts and named}
        if named and not metrics:
            raise ValueError(
                f"--metrics={','.join(names)} compares generated texts with targets, and no "
                f"task ({', '.join(task.name for task in tasks)}) is of InputsToTargets; leave "
                "it out, or give the gin file of such a task"
            )
    chosen = metrics if chosen_tasks is None else chosen_tasks.split(",")
    if wrong := [name for name in chosen if name not in metrics]:
        raise ValueError(
            f"--tasks names {', '.join(map(repr, wrong))}; there are metrics for "
            f"{', '.join(metrics) or 'no task: name some by --metrics'}"
        )
    return {name: metrics[name] for name in metrics if name in chosen}


def _evaluate_texts(
    arguments: argparse.Namespace, job, metrics: dict[str, tuple], model, reporter
) -> dict[str, Any]:
    """Answers the tasks in `metrics` and measures the answers.

    Returns:
        Settings, results of each task, and their means where there are several; JSON.
    """
    from switchx.data.evaluation import evaluation_examples
    from switchx.data.mixtures import evaluated_tasks
    from switchx.text_evaluation import ask, mean_results, rank_choices

    decoding = shared.options_of(arguments, DecodingConfig)
    generator = model.generator(batch_size=arguments.batch_size, **decoding)
    questions = [
        ask(
            model,
            evaluation_examples(
                task, task.evaluation_split, job.features, job.data_dir, arguments.max_examples
            ),
        )
        for task in evaluated_tasks(job.source)
        if task.name in metrics
    ]
    if arguments.rank_choices:
        _ = [each.examples.choices for each in questions]  # refuses what has none
    answers = _answer(model, generator, questions, arguments.predictions, reporter)
    tasks, results = {}, []
    for asked, answered in zip(questions, answers, strict=True):
        name = asked.task.name
        examples = asked.examples
        found = examples.results(answered.texts, metrics[name], arguments.bootstrap)
        if arguments.rank_choices:
            reporter.note(f"scoring the choices of {name}")
            found += rank_choices(model, asked, arguments.batch_size)
        results.append(found)
        tasks[name] = {
            "split": asked.task.evaluation_split,
            "examples": len(examples.inputs),
            "inputs_cut": examples.num_cut,
            "outputs_unfinished": answered.num_unfinished,
            "metrics": [dataclasses.asdict(each) for each in results[-1]],
        }
    means = map(dataclasses.asdict, mean_results(results) if len(results) > 1 else [])
    return {"decoding": decoding, "tasks": tasks, "mean": list(means)}


def _answer(model, generator, questions, file: str | None, reporter) -> list:
    """Answers of all questions; the file has them from when each task is done."""
    from switchx.data.data_dir import write_atomically
    from switchx.data.evaluation import prediction_rows
    from switchx.text_evaluation import answer

    answers, lines, done = [], [], 0
    reporter.begin(0, sum(len(each.prompts) for each in questions))
    for asked in questions:
        reporter.note(f"answering {len(asked.prompts):,} examples of {asked.task.name}")

        def progressed(number: int, before: int = done):
            reporter.counted(before + number)

        answers.append(answer(model, generator, asked, progressed))
        done += len(asked.prompts)
        examples = asked.examples
        texts = examples.inputs, examples.targets, answers[-1].texts
        rows = prediction_rows(asked.task.name, *texts)
        lines += [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        if file:
            path = pathlib.Path(file).expanduser().absolute()
            write_atomically(path, "".join(lines).encode())
    return answers


# Tables for a person.


def print_tables(job, metrics: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from switchx.cli.summary import load_table

    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {name: value for name, value in metrics.items() if not isinstance(value, dict)}
    for task, values in metrics.get("tasks", {}).items():
        for name in ("neg_log_perplexity", "accuracy", "dropped_fraction"):
            if name in values:  # a dense model drops nothing
                rows[f"{task}: {name}"] = values[name]
    for name, value in rows.items():
        is_count = name in ("step", "target_tokens")
        table.add_row(name, f"{value:,.0f}" if is_count else f"{value:.4f}")
    texts = metrics.get("texts", {"tasks": {}, "mean": []})
    for row in rows_of_texts(texts):
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for signature in signatures(texts):
        console.print(signature)
    if "routing" in metrics:
        console.print(load_table(job.model, metrics["routing"]["load"]))


def rows_of_texts(texts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured of texts, its score or number, and its interval."""
    rows = []
    groups = {name: values["metrics"] for name, values in texts["tasks"].items()}
    for name, metrics in (groups | {"mean": texts["mean"]}).items():
        for each in metrics:
            interval = "{:.2f} to {:.2f}".format(*each["interval"]) if each["interval"] else ""
            rows.append((f"{name}: {each['name']}", f"{each['score']:.2f}", interval))
    for name, values in texts["tasks"].items():
        for key, said in (
            ("inputs_cut", "inputs cut to a row of training"),
            ("outputs_unfinished", "outputs cut off"),
        ):
            if values[key]:
                rows.append((f"{name}: {said}", f"{values[key]:,}", ""))
    return rows


def signatures(texts: dict[str, Any]) -> list[str]:
    """Each metric's signature, once."""
    of_all = [each for values in texts["tasks"].values() for each in values["metrics"]]
    return list(dict.fromkeys(f"{each['name']}  {each['signature']}" for each in of_all))


def _metric_names(text: str) -> list[str]:
    # Not imported from switchx.data: help does not wait for the data libraries.
    known = ("bleu", "chrf", "rouge", "squad", "accuracy")
    names = [] if text == "none" else text.split(",")
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"there is no metric {wrong[0]!r}; use some of {','.join(known)}, or none"
        )
    return list(dict.fromkeys(names))
