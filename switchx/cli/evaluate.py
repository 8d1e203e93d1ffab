# SPDX-License-Identifier: Apache-2.0
"""`switchx eval`: the validation metrics of a trained model and of what it writes."""

import argparse
import dataclasses
import json
from typing import Any

from switchx.cli import arguments as shared
from switchx.cli.text import metrics as text_metrics

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
        parser, "run folder of `switchx train`, or of `switchx quantize`; nothing is written "
        "there",
    )  # fmt: skip
    shared.add_step(parser, "checkpoint to evaluate")
    text_metrics.add_arguments(parser)
    shared.add_json(parser, "print one JSON object, with the routing of each layer")


def run(arguments: argparse.Namespace) -> int:
    from switchx.cli.progress import TerminalReporter

    text_metrics.require_options(arguments)
    with TerminalReporter(unit="example") as reporter:
        reporter.note("loading JAX and the data libraries")
        job, metrics = _evaluate(arguments, reporter)
    if arguments.json:
        print(json.dumps(metrics))
    else:
        _print(job, metrics)
    return 0


def _evaluate(arguments: argparse.Namespace, reporter) -> tuple[Any, dict[str, Any]]:
    from switchx import api
    from switchx.checkpoint.restore import choose_step
    from switchx.checkpoint.run_folder import RunFolder
    from switchx.inference.artifact import is_artifact
    from switchx.training.resume import check_same_model, with_vocabulary_of

    is_quantized = is_artifact(arguments.model_dir)
    folder = RunFolder(arguments.model_dir)
    if arguments.gin_file is None and not folder.operative_config.is_file():
        if is_quantized:
            raise ValueError(
                f"{folder.root} is quantized, and does not know its tasks; give the gin files "
                "that do, such as --gin_file=DIR/operative_config.gin of the run it was made "
                "from"
            )
        raise ValueError(
            f"{folder.root} is not a run folder, it has no {folder.operative_config.name}: "
            f"{folder.found()}; give the model_dir of a run, or --gin_file"
        )
    job = shared.parse_job(arguments, default_file=str(folder.operative_config))
    source = text_metrics.with_split(job.source, arguments.split)
    job = dataclasses.replace(job, source=source)
    wanted = text_metrics.metrics_of(source, arguments.metrics, arguments.tasks)
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
        model = api.load(arguments.model_dir, step)
        metrics = {"step": model.step} | metrics
        texts = text_metrics.evaluate_texts(arguments, job, wanted, model, reporter)
        metrics["texts"] = texts
    return job, metrics


def _likelihood(folder, job, step: int, reporter) -> dict[str, Any]:
    from switchx.checkpoint.restore import restore_params
    from switchx.training.loop import evaluate_job
    from switchx.training.program import TrainingProgram

    program = TrainingProgram(job)
    reporter.note(f"evaluating {folder.checkpoints / str(step)}")
    with program.scope():
        target = program.abstract_state.params
        params = restore_params(folder.root, step, target=target, model=job.model)
        return evaluate_job(job, program, params)


def _print(job, metrics: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from switchx.cli.summary import load_table

    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {name: value for name, value in metrics.items() if not isinstance(value, dict)}
    for task, values in metrics.get("tasks", {}).items():
        for name in ("neg_log_perplexity", "accuracy"):
            rows[f"{task}: {name}"] = values[name]
    for name, value in rows.items():
        is_count = name in ("step", "target_tokens")
        table.add_row(name, f"{value:,.0f}" if is_count else f"{value:.4f}")
    console = Console(highlight=False, soft_wrap=True)
    texts = metrics.get("texts", {})
    for row in text_metrics.table_rows(texts) if texts else ():
        table.add_row(*row)
    console.print(table)
    for signature in text_metrics.signatures(texts) if texts else ():
        console.print(signature)
    if "routing" in metrics:
        console.print(load_table(job.model, metrics["routing"]["load"]))
