# SPDX-License-Identifier: Apache-2.0
"""`switchx eval`: the validation metrics of a trained model."""

import argparse
import json
from typing import Any

from switchx.cli import arguments as shared

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
"""


def add_command(commands) -> None:
    parser = shared.add_command(commands, "eval", run, "evaluate a trained model", DESCRIPTION)
    shared.add_gin_arguments(parser, default="operative_config.gin of the run folder")
    shared.add_model_dir(parser, "run folder of `switchx train`; nothing is written there")
    shared.add_step(parser, "checkpoint to evaluate")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, with the routing of each layer, on standard output",
    )


def run(arguments: argparse.Namespace) -> int:
    from switchx.cli.progress import TerminalReporter

    with TerminalReporter() as reporter:
        reporter.note("loading JAX and the data libraries")
        job, metrics = _evaluate(arguments, reporter)
    if arguments.json:
        print(json.dumps(metrics))
    else:
        _print(job, metrics)
    return 0


def _evaluate(arguments: argparse.Namespace, reporter) -> tuple[Any, dict[str, Any]]:
    # Imported here: help, and options that are not understood, do not wait for it.
    from switchx.training.loop import evaluate_job
    from switchx.training.program import TrainingProgram
    from switchx.training.restore import choose_step, restore_params
    from switchx.training.run_config import check_same_model
    from switchx.training.run_folder import RunFolder

    folder = RunFolder(arguments.model_dir)
    if arguments.gin_file is None and not folder.operative_config.is_file():
        raise ValueError(
            f"{folder.root} is not a run folder, it has no {folder.operative_config.name}: "
            f"{folder.found()}; give the model_dir of a run, or --gin_file"
        )
    job = shared.parse_job(arguments, default_file=str(folder.operative_config))
    check_same_model(folder, job)
    step = choose_step(folder, arguments.step)
    program = TrainingProgram(job)
    reporter.note(f"evaluating {folder.checkpoints / str(step)}")
    with program.scope():
        params = restore_params(folder.root, step, target=program.restore_target().params)
        return job, {"step": step} | evaluate_job(job, program, params)


def _print(job, metrics: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from switchx.cli.load_table import load_table

    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {name: value for name, value in metrics.items() if not isinstance(value, dict)}
    for task, values in metrics.get("tasks", {}).items():
        for name in ("neg_log_perplexity", "accuracy"):
            rows[f"{task}: {name}"] = values[name]
    for name, value in rows.items():
        is_count = name in ("step", "target_tokens")
        table.add_row(name, f"{value:,.0f}" if is_count else f"{value:.4f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if "routing" in metrics:
        console.print(load_table(job.model, metrics["routing"]["load"]))
