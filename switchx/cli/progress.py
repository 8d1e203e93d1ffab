# SPDX-License-Identifier: Apache-2.0
"""Live progress of training: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class TerminalReporter:
    """Shows a training loop to a person: `switchx.training.loop.Reporter`."""

    def __init__(self):
        self.console = Console(file=sys.stderr, highlight=False)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = None
        self._start_s = time.perf_counter()

    def __enter__(self) -> "TerminalReporter":
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def begin(self, first_step: int, last_step: int) -> None:
        self._task = self._progress.add_task(
            "training", total=last_step, completed=first_step, status="compiling"
        )

    def stepped(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        loss, rate = metrics["loss"], metrics["tokens_per_s"]
        self._progress.update(self._task, status=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        parts = [f"step {step:>6}", f"loss {loss:.4f}"]
        if "accuracy" in metrics:
            parts.append(f"accuracy {metrics['accuracy']:.3f}")
        if "dropped_fraction" in metrics:
            parts.append(f"dropped {metrics['dropped_fraction']:.1%}")
        self.note("  ".join([*parts, f"{rate:,.0f} tokens/s"]))

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        self.note(
            f"step {step:>6}  validation: negative log perplexity "
            f"{metrics['neg_log_perplexity']:.4f}  accuracy {metrics['accuracy']:.3f}"
        )

    def note(self, text: str) -> None:
        seconds = time.perf_counter() - self._start_s
        self.console.print(f"[dim]{seconds:7.1f}s[/dim]  {text}", soft_wrap=True)
