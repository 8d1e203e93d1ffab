# SPDX-License-Identifier: Apache-2.0
"""What a command shows a person at its end: the summary of training, and load per expert.

The summary says what was learnt, how fast, where the results are, and what to run next.
"""

import argparse
import json
import os
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from switchx.checkpoint.run_folder import RunFolder
from switchx.cli import hosts
from switchx.cli.arguments import command_line, configuration_words
from switchx.gin_config import building
from switchx.gin_config.files import configs_dir
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.moe.load_evenness import even_shares
from switchx.own_code import is_of_working_directory
from switchx.training.job import TrainingJob
from switchx.training.loop import Outcome

FINETUNE = "configs/runs/finetune.gin"
# Macros that a run that starts from this one sets itself.
INIT_MACROS = ("INIT_FROM", "INIT_STEP", "INIT_RULES", "INIT_DROP", "INIT_OPTIMIZER")
# Experts that do not fit on a line are shown by least, median and most.
MAX_COLUMNS = 16


def print_summary(
    job: TrainingJob, run: RunFolder, outcome: Outcome, arguments: argparse.Namespace
) -> None:
    """Prints the summary to standard output.

    Parses other gin files: gin's previous configuration is lost.
    """
    validation, metrics = _lines(run.validation), _lines(run.metrics)
    end = "finished" if outcome.is_finished else "stopped by a signal"
    newest = outcome.step if outcome.saved is None else outcome.saved
    is_saved = (run.checkpoints / str(newest)).is_dir()
    copies = job.retention.local_dir
    saved = f"step {outcome.step} is " + (
        "not saved" if copies is None else f"copied to {copies} alone"
    )
    if newest == outcome.step:
        what = "the state is saved" if is_saved else "there is nothing to save"
        saved = f"{what} at step {newest}"
    elif is_saved:
        saved += f", the newest checkpoint is of step {newest}"
    parts = [Text(f"\nTraining {end}; {saved}", style="bold")]
    if numbers := _numbers(validation, metrics):
        parts.append(_aligned(numbers))
    if run.goodput.exists():
        parts.append(_aligned(_goodput(json.loads(run.goodput.read_text()), metrics)))
    if job.text_evaluation is not None and run.peaks.exists():
        parts += _peaks(json.loads(run.peaks.read_text(encoding="utf-8")))
    if metrics and metrics[-1].get("routing"):
        parts.append(load_table(job.model, metrics[-1]["routing"]["load"]))
    places = {
        "run folder": run.where,
        "checkpoint": run.checkpoints / str(newest) if is_saved else "none",
        "metrics": f"{run.metrics}, {run.validation.name}",
        "TensorBoard": run.tensorboard,
        "configuration": run.operative_config,
    }
    parts += [_aligned(places), Text("Next", style="bold")]
    # No wrapping: lines that will be pasted must not be broken.
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(Group(*parts))
    # Without a checkpoint, only training can go on.
    commands = next_commands(job, run, outcome, arguments)
    for command in commands if is_saved else commands[1:2]:
        console.print(Text(f"  {command}"))


def next_commands(
    job: TrainingJob, run: RunFolder, outcome: Outcome, arguments: argparse.Namespace
) -> list[str]:
    """Commands to run next: evaluate, go on, fine-tune or merge, inspect the routing."""
    folder = f"--model_dir={run.path}"
    names = ("mesh", "hardware", *hosts.FLAGS)
    given = ((name, getattr(arguments, name, None)) for name in names)
    mesh = [f"--{name}={value}" for name, value in given if value is not None]
    same = configuration_words(arguments, "TRAIN_STEPS")
    steps = [f"--gin.TRAIN_STEPS={max(2 * job.train_steps, 2 * outcome.step, 1)}"]
    if not outcome.is_finished:
        same, steps = configuration_words(arguments), []
    other = f"{str(run.path).rstrip(os.sep)}_finetuned"
    files = [f"--gin_file={FINETUNE}"]
    if not (_is_pretraining(arguments) and _finetuning_fits(job, run)):
        # The same task with a fresh optimizer; other gin files say what to learn instead.
        files = configuration_words(arguments, *INIT_MACROS)
        if job.distillation is not None and job.distillation.starts_from_teacher:
            files.append("--gin.Distillation.starts_from_teacher=False")  # but from this run
    finetune = [*files, f"--gin.INIT_FROM={run.path}", f"--model_dir={other}"]
    trust = ["--trust_code"] * is_of_working_directory()
    commands = [
        command_line("eval", folder, *trust),
        command_line("train", *same, *steps, *mesh, folder),
        command_line("train", *finetune, *mesh),
    ]
    if job.lora is not None:  # further training needs a whole model
        merged = f"--output={str(run.path).rstrip(os.sep)}_merged"
        commands[2] = command_line("reshape", "--merge_adapter", folder, merged)
    return commands if job.model.switch is None else [*commands, command_line("report", folder)]


def load_table(model: ModelConfig, load: list[list[float]]) -> Group:
    """One row per Switch layer, named by its stack and block.

    Args:
        load: choices of each expert over the layer's tokens, so k in sum; the encoder's layers
            come first.
    """
    num_experts = model.switch.num_experts
    table = Table("layer", box=None, pad_edge=False)
    is_short = num_experts <= MAX_COLUMNS
    for column in map(str, range(num_experts)) if is_short else ("least", "median", "most"):
        table.add_column(column, justify="right")
    even_NE = even_shares(np.array(load), model.switch.router.num_tasks)
    for name, shares in zip(model.sparse_layer_names, even_NE, strict=True):
        if not is_short:
            shares = [min(shares), sorted(shares)[num_experts // 2], max(shares)]
        table.add_row(name, *(f"{share:.2f}" for share in shares))
    # Not the table's title, which would be wrapped to the table's width.
    return Group("load per expert (1.00 is an even share)", table)


def _is_pretraining(arguments: argparse.Namespace) -> bool:
    """Whether the first gin file is a shipped run that pretrains."""
    names = {path.name for path in (configs_dir() / "runs").glob("pretrain_*.gin")}
    return os.path.basename(arguments.gin_file[0]) in names


def _finetuning_fits(job: TrainingJob, run: RunFolder) -> bool:
    """Whether the shipped fine-tuning run takes the model that was trained."""
    try:
        building.parse_files([FINETUNE], [f"INIT_FROM={run.path}"])
        model = building.build("JOB", TrainingJob).model
    except ValueError:  # a class of the user's own, or rows that are too short
        return False
    return abstract_params(model) == abstract_params(job.model)


def _lines(path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _numbers(validation, metrics) -> dict[str, str]:
    rows = {}
    if validation:
        first, last = validation[0], validation[-1]
        rows["validation negative log perplexity"] = (
            f"{_value(first)} (step {first['step']}) -> {_value(last)} (step {last['step']})"
        )
        rows["validation accuracy"] = f"{last['accuracy']:.1%}"
    if metrics:
        # The first interval contains compilation.
        rates = sorted(line["tokens_per_s"] for line in metrics[1:] or metrics)
        rows["tokens per second (median)"] = f"{rates[len(rates) // 2]:,.0f}"
        if metrics[-1].get("dropped_fraction") is not None:
            rows["dropped choices"] = f"{metrics[-1]['dropped_fraction']:.2%}"
        if skipped := sum(line["skipped_steps"] for line in metrics):
            rows["skipped steps"] = str(skipped)
    return rows


def _goodput(goodput: dict[str, Any], metrics: list[dict[str, Any]]) -> dict[str, str]:
    """The shares of the run's wall time, and the steps and processes that were slow."""
    seconds = {cause: each for cause, each in goodput["seconds"].items() if cause != "step"}
    total_s = max(sum(goodput["seconds"].values()), 1e-9)
    others = [
        f"{cause} {each / total_s:.1%}"
        for cause, each in sorted(seconds.items(), key=lambda item: -item[1])
        if each / total_s >= 0.001
    ]
    steps = f"{goodput['share']:.1%} of {total_s:,.0f} s in steps"
    rows = {"goodput": ", ".join([steps, *others])}
    if restarts := goodput["restarts"]:
        rows["restarts"] = f"{restarts}, {goodput['lost_steps']} steps taken again"
    times = [line["step_time"] for line in metrics if line.get("step_time")]
    if times:
        longest = max(times, key=lambda each: each["max_s"])
        medians = sorted(each["median_s"] for each in times)
        rows["seconds per step (median)"] = (
            f"{medians[len(medians) // 2]:.3f}; longest {longest['max_s']:.3f} (process "
            f"{longest['max_process']}); slow steps {sum(t['slow_steps'] for t in times)}"
        )
        late = max(times, key=lambda each: each["late_s"] - each["late_median_s"])
        if late["late_s"] > 2 * late["late_median_s"]:  # never true of a single process
            rows["latest process"] = (
                f"{late['late_process']}, whose devices waited {late['late_s']:.1f} s for it "
                f"(the median process' {late['late_median_s']:.1f} s) before a line of metrics"
            )
    return rows


def _peaks(peaks: dict[str, dict[str, dict[str, Any]]]) -> list[Text]:
    """The best score of each metric of each task, and the step that reached it."""
    shown = "{score:.2f} (step {step}, {examples:,} examples)"
    rows = {
        f"{task}: {name}": shown.format(**peak)
        for task, metrics in peaks.items()
        for name, peak in metrics.items()
    }
    return [Text("Peaks over evaluations", style="bold"), _aligned(rows)] if rows else []


def _value(line: dict[str, Any]) -> str:
    value = line["neg_log_perplexity"]
    return "not finite" if value is None else f"{value:.4f}"


def _aligned(rows: dict[str, Any]) -> Text:
    """Aligns names and values as text: a table would break a long path."""
    width = max(map(len, rows), default=0)
    return Text("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))
