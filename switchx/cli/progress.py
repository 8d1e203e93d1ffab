# SPDX-License-Identifier: Apache-2.0
"""Live progress on standard error: a bar on a terminal, and lines everywhere."""

import contextlib
import time
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from switchx.cli.messages import shown_by

ONE_LINE = Column(no_wrap=True)
NOTE_EVERY_S = 10


class TerminalReporter:
    """Shows work to a person: a training loop (`switchx.training.loop.Reporter`), or lines.

    Lines of metrics fit 80 columns. Log records become lines too while it is entered.
    """

    def __init__(
        self, console: Console | None = None, clock=time.perf_counter, unit: str = "step"
    ):
        """Shows nothing before it is entered.

        Args:
            console: None is standard error.
            unit: of the work, for the bar.
        """
        self._unit = unit
        self.console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._start_s = self._noted_s = clock()
        self._first: tuple[int, float] | None = None  # step of this process, and when
        self._last_step = 0
        self._contexts = contextlib.ExitStack()
        self._progress = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(table_column=ONE_LINE),
            TextColumn("{task.description}", table_column=ONE_LINE),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}", table_column=ONE_LINE),
            TextColumn("{task.fields[time_left]}", table_column=ONE_LINE),
            console=self.console,
            refresh_per_second=4,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, status="", time_left="")

    def __enter__(self) -> Self:
        self._contexts.enter_context(shown_by(self.note))
        self._contexts.enter_context(self._progress)
        return self

    def __exit__(self, *exception) -> None:
        # What remains on the terminal: the bar as it stood, or nothing if nothing was trained.
        self._progress.update(self._task, time_left="", visible=self._first is not None)
        self._contexts.close()

    def begin(self, first_step: int, last_step: int) -> None:
        self._last_step = last_step
        self._progress.update(
            self._task, total=last_step, completed=first_step, description="compiling"
        )

    def stepped(self, step: int) -> None:
        if self._first is None:
            self._first = step, self._clock()
        self._progress.update(
            self._task,
            completed=step,
            description=f"{self._unit} {step}/{self._last_step}",
            time_left=self._time_left(step),
        )

    def counted(self, number: int) -> None:
        """So much is done, of work without metrics: a line of it now and then."""
        self.stepped(number)
        if self._clock() - self._noted_s >= NOTE_EVERY_S:
            self._noted_s = self._clock()
            left = self._time_left(number)
            self.note(f"{number:,} of {self._last_step:,} {self._unit}s  {left}")

    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        loss, rate = metrics["loss"], metrics["tokens_per_s"]
        self._progress.update(self._task, status=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        line = f"step {step:>5}  loss {loss:.3f}"
        if "accuracy" in metrics:
            line += f"  accuracy {metrics['accuracy']:.3f}"
        if "dropped_fraction" in metrics:
            line += f"  dropped {metrics['dropped_fraction']:.1%}"
        if metrics.get("skipped_steps"):
            line += f"  skipped {metrics['skipped_steps']}"
        self.note(f"{line}  {rate:,.0f} tokens/s")

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        self.note(
            f"step {step:>5}  validation: negative log perplexity "
            f"{metrics['neg_log_perplexity']:.3f}  accuracy {metrics['accuracy']:.3f}"
        )

        if "texts" in metrics:
            self._note_texts(step, metrics["texts"])

    def _note_texts(self, step: int, texts: dict[str, dict[str, Any]]) -> None:
        from switchx.training.text_evaluation import COUNTS  # not for help

        for task, values in texts.items():
            scores = (f"{name} {values[name]:.2f}" for name in values.keys() - set(COUNTS))
            number, left_out = values["examples"], values["examples_left_out"]
            of = f"{number:,} of {number + left_out:,}" if left_out else f"{number:,}"
            self.note(f"step {step:>5}  {task}: {'  '.join(sorted(scores))}  ({of} examples)")

    def note(self, text: str) -> None:
        seconds = self._clock() - self._start_s
        self.console.print(f"[dim]{seconds:6.1f}s[/dim]  {escape(text)}", soft_wrap=True)

    def _time_left(self, step: int) -> str:
        """From the steps after the first one of this process, which compiles.

        Evaluations and checkpoints count, as they will come again.
        """
        first_step, first_s = self._first
        if step == first_step:
            return ""
        seconds_per_step = (self._clock() - first_s) / (step - first_step)
        seconds = seconds_per_step * (self._last_step - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left"
