# SPDX-License-Identifier: Apache-2.0
"""The summary at the end of training: what was learnt, how fast, where things are."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from switchx.training.job import TrainingJob
from switchx.training.loop import Outcome
from switchx.training.run_folder import RunFolder


def print_summary(
    job: TrainingJob, run: RunFolder, outcome: Outcome, gin_files: list[str]
) -> None:
    """Prints the summary to standard output."""
    console = Console(highlight=False, soft_wrap=True)
    validation, metrics = _lines(run.validation), _lines(run.metrics)
    state = "finished" if outcome.is_finished else "stopped by a signal; the state is saved"
    console.print(f"\n[bold]Training {state} at step {outcome.step}[/bold]")
    console.print(_numbers(validation, metrics))
    if metrics and metrics[-1].get("routing"):
        console.print(_loads(job, metrics[-1]["routing"]["load"]))
    console.print(_places(run, outcome))
    files = " ".join(f"--gin_file={name}" for name in gin_files)
    more = max(job.train_steps * 2, 1)
    console.print("[bold]Next[/bold]")
    console.print(f"  switchx eval {files} --model_dir={run.path}")
    console.print(f"  switchx train {files} --gin.TRAIN_STEPS={more} --model_dir={run.path}")
    console.print(
        "  switchx train --gin_file=configs/runs/finetune.gin "
        f"--gin.INIT_FROM={run.path} --model_dir={run.path}_finetuned"
    )


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


def _loads(job: TrainingJob, load: list[list[float]]) -> Table:
    """Share of tokens by expert and layer; 1.0 is an even share. Many experts: the extremes."""
    num_experts = job.model.switch.num_experts
    table = Table(
        title="load per expert (1.00 is an even share)", title_justify="left", box=None
    )
    table.add_column("layer")
    is_short = num_experts <= 16
    columns = [str(e) for e in range(num_experts)] if is_short else ["least", "median", "most"]
    for column in columns:
        table.add_column(column, justify="right")
    encoder_layers = job.model.num_encoder_layers // job.model.switch.every
    for i, shares in enumerate(load):
        is_encoder = i < encoder_layers
        number = i if is_encoder else i - encoder_layers
        block = (number + 1) * job.model.switch.every - 1
        name = f"{'encoder' if is_encoder else 'decoder'} {block}"
        even = [share * num_experts for share in shares]
        shown = even if is_short else [min(even), sorted(even)[num_experts // 2], max(even)]
        table.add_row(name, *(f"{value:.2f}" for value in shown))
    return table


def _places(run: RunFolder, outcome: Outcome) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("run folder", str(run.root))
    table.add_row("checkpoint", str(run.checkpoints / str(outcome.step)))
    table.add_row("metrics", f"{run.metrics}, {run.validation.name}")
    table.add_row("TensorBoard", str(run.tensorboard))
    table.add_row("configuration", str(run.operative_config))
    return table
