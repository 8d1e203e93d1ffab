# SPDX-License-Identifier: Apache-2.0
"""Live progress on standard error: a bar on a terminal, and lines everywhere.

Log records as lines for a person.

Ours from INFO on: what takes time says that it begins. Those of libraries from WARNING on,
Python's warnings (`logging.captureWarnings`) among them.

How an error that ends a command reaches a person, and with which exit status.
"""

import argparse
import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

ONE_LINE = Column(no_wrap=True)


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
            clock: seconds, of which only differences matter.
            unit: of the work, for the bar.
        """
        self._unit = unit
        self.console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._start_s = clock()
        self._pace = _Pace(clock)
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
        has_stepped = self._pace.first is not None
        self._progress.update(self._task, time_left="", visible=has_stepped)
        self._contexts.close()

    def begin(self, first_step: int, last_step: int) -> None:
        self._last_step = last_step
        self._progress.update(
            self._task, total=last_step, completed=first_step, description="compiling"
        )

    def stepped(self, step: int) -> None:
        self._pace.stepped(step)
        self._progress.update(
            self._task,
            completed=step,
            description=f"{self._unit} {step}/{self._last_step}",
            time_left=self.time_left(step),
        )

    def time_left(self, step: int) -> str:
        """`0:01:05 left`; nothing while the pace is not known."""
        return self._pace.time_left(step, self._last_step)

    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        loss, rate = metrics["loss"], metrics["tokens_per_s"]
        self._progress.update(self._task, status=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        parts = [f"step {step:>5}", f"loss {loss:.3f}"]
        if "accuracy" in metrics:
            parts.append(f"accuracy {metrics['accuracy']:.3f}")
        if "dropped_fraction" in metrics:
            parts.append(f"dropped {metrics['dropped_fraction']:.1%}")
        if metrics.get("skipped_steps"):
            parts.append(f"skipped {metrics['skipped_steps']}")
        self.note("  ".join([*parts, f"{rate:,.0f} tokens/s"]))

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        self.note(
            f"step {step:>5}  validation: negative log perplexity "
            f"{metrics['neg_log_perplexity']:.3f}  accuracy {metrics['accuracy']:.3f}"
        )

    def note(self, text: str) -> None:
        seconds = self._clock() - self._start_s
        self.console.print(f"[dim]{seconds:6.1f}s[/dim]  {escape(text)}", soft_wrap=True)


class _Pace:
    """Time left, from the steps after the first one of this process, which compiles.

    Evaluations and checkpoints count, as they will come again.
    """

    def __init__(self, clock):
        self._clock = clock
        self.first: tuple[int, float] | None = None

    def stepped(self, step: int) -> None:
        if self.first is None:
            self.first = step, self._clock()

    def time_left(self, step: int, last_step: int) -> str:
        first_step, first_s = self.first
        if step == first_step:
            return ""
        seconds = (self._clock() - first_s) / (step - first_step) * (last_step - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left"


class _LineHandler(logging.Handler):
    def __init__(self, show: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        is_ours = record.name.partition(".")[0] == "switchx"
        if record.levelno < logging.WARNING and not is_ours:
            return
        self._show(line_of(record))


def line_of(record: logging.LogRecord) -> str:
    """`warning: ...` (or `error: ...`) for what is worse than information."""
    text = record.getMessage().strip()
    if record.name == "py.warnings":
        text = text.partition("\n")[0]  # the line of code that follows says nothing to a user
    return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


@contextlib.contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Gives every line to `show`, and to nobody else, until the end of the context."""
    root, ours = logging.getLogger(), logging.getLogger("switchx")
    handlers, level = root.handlers[:], ours.level
    root.handlers[:] = [_LineHandler(show)]
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        ours.setLevel(level)


OURS = ("switchx", "pallas_kernels")


def explain(error: BaseException, arguments: argparse.Namespace) -> int:
    """Prints the error in one paragraph; returns the exit status.

    130 interrupted, 2 wrong input, 1 failed on the way. What is not meant for a person, any
    error that switchx itself did not raise, is raised again: a traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        print("switchx: interrupted", file=sys.stderr)
        return 130
    if arguments.traceback or not _is_for_a_person(error):
        raise error
    print(f"switchx {arguments.command}: error: {error}", file=sys.stderr)
    return 2 if isinstance(error, ValueError) else 1


def _is_for_a_person(error: BaseException) -> bool:
    """Whether its message suffices: our own code raised it, or the system refused something."""
    if isinstance(error, OSError):
        return True
    if not isinstance(error, ValueError | RuntimeError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").split(".")[0] in OURS
    return is_ours and not type(error).__module__.startswith("jax")
