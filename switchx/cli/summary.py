# SPDX-License-Identifier: Apache-2.0
"""The summary at the end of training: what was learnt, how fast, where it is, what next."""

import argparse
import json
import os
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from switchx.cli import gin_edge
from switchx.cli.invocation import command_line, configuration_options
from switchx.cli.load_table import load_table
from switchx.models.params import abstract_params
from switchx.training.job import TrainingJob
from switchx.training.loop import Outcome
from switchx.training.run_folder import RunFolder

FINETUNE = "configs/runs/finetune.gin"


def print_summary(
    job: TrainingJob, run: RunFolder, outcome: Outcome, arguments: argparse.Namespace
) -> None:
    """Prints the summary to standard output.

    Parses other gin files: no configuration of before is left.
    """
    validation, metrics = _lines(run.validation), _lines(run.metrics)
    state = "finished" if outcome.is_finished else "stopped by a signal; the state is saved"
    parts = [
        Text(f"\nTraining {state} at step {outcome.step}", style="bold"),
        _numbers(validation, metrics),
    ]
    if metrics and metrics[-1].get("routing"):
        parts.append(load_table(job.model, metrics[-1]["routing"]["load"]))
    parts += [_places(run, outcome), Text("Next", style="bold")]
    # Longer than any table: lines that will be pasted must not be broken.
    console = Console(highlight=False, soft_wrap=True)
    console.print(Group(*parts))
    for command in next_commands(job, run, outcome, arguments):
        console.print(Text(f"  {command}"))


def next_commands(
    job: TrainingJob, run: RunFolder, outcome: Outcome, arguments: argparse.Namespace
) -> list[str]:
    """What to try next: evaluate, go on, fine-tune. Each runs as it stands."""
    folder = f"--model_dir={run.path}"
    same = configuration_options(arguments, without="TRAIN_STEPS")
    steps = [f"--gin.TRAIN_STEPS={max(2 * job.train_steps, 1)}"]
    if not outcome.is_finished:
        same, steps = configuration_options(arguments), []
    other = f"{str(run.path).rstrip(os.sep)}_finetuned"
    files = [f"--gin_file={FINETUNE}"]
    if not _finetuning_fits(job, run):
        # The same task with a fresh optimizer; other gin files say what to learn instead.
        files = configuration_options(arguments, without="INIT_FROM")
    finetune = [*files, f"--gin.INIT_FROM={run.path}", f"--model_dir={other}"]
    return [
        command_line("eval", folder),
        command_line("train", *same, *steps, folder),
        command_line("train", *finetune),
    ]


def _finetuning_fits(job: TrainingJob, run: RunFolder) -> bool:
    """Whether the shipped fine-tuning run has a model of the shapes that were trained."""
    gin_edge.parse_files([FINETUNE], [f"INIT_FROM={run.path}"])
    model = gin_edge.build("JOB", TrainingJob).model
    return abstract_params(model) == abstract_params(job.model)


def _lines(path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _numbers(validation, metrics) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    if validation:
        first, last = validation[0], validation[-1]
        table.add_row(
            "validation negative log perplexity",
            f"{first['neg_log_perplexity']:.4f} (step {first['step']}) -> "
            f"{last['neg_log_perplexity']:.4f} (step {last['step']})",
        )
        table.add_row("validation accuracy", f"{last['accuracy']:.1%}")
    if metrics:
        # The first interval contains compilation.
        rates = sorted(line["tokens_per_s"] for line in metrics[1:] or metrics)
        table.add_row("tokens per second (median)", f"{rates[len(rates) // 2]:,.0f}")
        if metrics[-1].get("dropped_fraction") is not None:
            table.add_row("dropped tokens", f"{metrics[-1]['dropped_fraction']:.2%}")
        skipped = sum(line["skipped_steps"] for line in metrics)
        if skipped:
            table.add_row("skipped steps", str(skipped))
    return table


def _places(run: RunFolder, outcome: Outcome) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, place in {
        "run folder": run.root,
        "checkpoint": run.checkpoints / str(outcome.step),
        "metrics": f"{run.metrics}, {run.validation.name}",
        "TensorBoard": run.tensorboard,
        "configuration": run.operative_config,
    }.items():
        table.add_row(name, Text(str(place)))
    return table
