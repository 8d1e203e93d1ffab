# SPDX-License-Identifier: Apache-2.0
"""Live progress: a bar and lines on a terminal, one display in a notebook, lines elsewhere.

While it is entered, every reporter also shows log records. Records of switchx are shown from
INFO up: slow operations log when they begin. Records of libraries are shown from WARNING up,
and so are Python's warnings (`logging.captureWarnings`).
"""

import abc
import collections
import contextlib
import html
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
NOTE_EVERY_S = 10
# A notebook's display: seconds between updates of the bar, and most lines below it.
REDRAW_EVERY_S = 0.25
SHOWN_LINES = 40
_OURS = ("switchx", "pallas_kernels")  # packages whose errors are written for people


def reporter_here(unit: str = "step"):
    """A reporter for the caller of a Python function; a context manager.

    It is a display in a notebook, and a bar and lines elsewhere. In all processes but the first
    (`jax.distributed`) it shows only warnings.
    """
    import jax  # not needed for help

    if jax.process_index() > 0:
        return SilentReporter(jax.process_index())
    return NotebookReporter(unit=unit) if in_notebook() else TerminalReporter(unit=unit)


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this process: Jupyter's, Colab's or a similar one."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Reporter(abc.ABC):
    """Lines and a bar for work: training (`switchx.training.loop.Reporter`), or examples.

    Lines of metrics fit 80 columns. Subclasses show them with `_show_line` and `_show_bar`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, unit: str = "step"):
        """Shows nothing before it is entered.

        Args:
            unit: unit of the work, for the bar.
        """
        self._unit = unit
        self._clock = clock
        self._start_s = self._noted_s = clock()
        self._first: tuple[int, float] | None = None  # this process' first step, and its time
        self._last_step = 0
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._contexts.enter_context(shown_by(self.note))
        return self

    def __exit__(self, *exception) -> None:
        self._contexts.close()

    def begin(self, first_step: int, last_step: int) -> None:
        if self._first is not None:  # from earlier work
            self._first = first_step, self._clock()
        self._last_step = last_step
        self._show_bar(total=last_step, completed=first_step, description="compiling")

    def stepped(self, step: int) -> None:
        if self._first is None:
            self._first = step, self._clock()
        self._show_bar(
            completed=step,
            description=f"{self._unit} {step}/{self._last_step}",
            time_left=self._time_left(step),
        )

    def counted(self, number: int) -> None:
        """Notes progress of work without metrics, and shows it in a line now and then."""
        self.stepped(number)
        if self._clock() - self._noted_s >= NOTE_EVERY_S:
            self._noted_s = self._clock()
            left = self._time_left(number)
            self.note(f"{number:,} of {self._last_step:,} {self._unit}s  {left}")

    def logged(self, step: int, metrics: dict[str, Any]) -> None:
        loss, rate = metrics["loss"], metrics["tokens_per_s"]
        self._show_bar(status=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
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
        from switchx.training.text_evaluation import COUNTS  # not needed for help

        for task, values in texts.items():
            scores = (
                f"{name} none" if values[name] is None else f"{name} {values[name]:.2f}"
                for name in values.keys() - set(COUNTS)
            )
            number, left_out = values["examples"], values["examples_left_out"]
            count = f"{number:,}" + f" of {number + left_out:,}" * bool(left_out)
            line = f"{'  '.join(sorted(scores))}  ({count} examples)"
            self.note(f"step {step:>5}  {task}: {line}")

    def note(self, text: str) -> None:
        self._show_line(self._clock() - self._start_s, text)

    @abc.abstractmethod
    def _show_line(self, seconds: float, text: str) -> None:
        """Shows a line, with its time since the start."""

    @abc.abstractmethod
    def _show_bar(self, **changed) -> None:
        """Draws the bar: `total`, `completed`, `description`, `status`, `time_left`."""

    def _time_left(self, step: int) -> str:
        """The time left, judged by the steps after this process' first one, which compiles.

        It includes evaluations and checkpoints at their rate so far.
        """
        first_step, first_s = self._first
        if step == first_step:
            return ""
        seconds_per_step = (self._clock() - first_s) / (step - first_step)
        seconds = seconds_per_step * (self._last_step - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left"


class TerminalReporter(Reporter):
    """Reports on standard error: a bar if that is a terminal, and lines in any case."""

    def __init__(
        self, console: Console | None = None, clock=time.perf_counter, unit: str = "step"
    ):
        """Shows nothing before it is entered.

        Args:
            console: console to print on; None means standard error.
            unit: unit of the work, for the bar.
        """
        super().__init__(clock, unit)
        self.console = console or Console(stderr=True, highlight=False)
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
        super().__enter__()
        self._contexts.enter_context(self._progress)
        return self

    def __exit__(self, *exception) -> None:
        # The terminal keeps the bar as it stood, or nothing if nothing was trained.
        self._progress.update(self._task, time_left="", visible=self._first is not None)
        super().__exit__(*exception)

    def _show_line(self, seconds: float, text: str) -> None:
        self.console.print(f"[dim]{seconds:6.1f}s[/dim]  {escape(text)}", soft_wrap=True)

    def _show_bar(self, **changed) -> None:
        self._progress.update(self._task, **changed)


class NotebookReporter(Reporter):
    """One display below a cell, with a bar and the newest lines; it needs no widgets.

    What it shows last is saved with the notebook.
    """

    def __init__(self, clock=time.perf_counter, unit: str = "step"):
        """Shows nothing before it is entered."""
        super().__init__(clock, unit)
        self._bar = dict(total=None, completed=0, description="", status="", time_left="")
        self._lines: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)
        self._num_lines = 0
        self._display = None
        self._drawn_s = clock()

    def __enter__(self) -> Self:
        from IPython.display import display

        self._display = display(self, display_id=True)
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        self._bar["time_left"] = ""
        if self._first is None:
            self._bar["total"] = None  # nothing was trained: no bar
        self._draw()
        super().__exit__(*exception)

    def _show_line(self, seconds: float, text: str) -> None:
        self._lines.append(f"{seconds:6.1f}s  {text}")
        self._num_lines += 1
        self._draw()

    def _show_bar(self, **changed) -> None:
        self._bar |= changed
        if self._clock() - self._drawn_s >= REDRAW_EVERY_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_s = self._clock()
        if self._display is not None:
            self._display.update(self)

    def _text(self) -> str:
        left_out = self._num_lines - len(self._lines)
        first = [f"{left_out:,} earlier lines are not shown"] if left_out else []
        return "\n".join([*first, *self._lines])

    def __repr__(self) -> str:
        return f"{self._status()}\n{self._text()}".strip("\n")

    def _status(self) -> str:
        if self._bar["total"] is None:
            return ""
        parts = (self._bar[name] for name in ("description", "status", "time_left"))
        return "  ".join(part for part in parts if part)

    def _repr_html_(self) -> str:
        bar = ""
        if self._bar["total"] is not None:
            values = f'value="{self._bar["completed"]}" max="{max(self._bar["total"], 1)}"'
            bar = f'<progress {values} style="width: 20em"></progress> '
        return (
            f"<div>{bar}<code>{html.escape(self._status())}</code></div>"
            f'<pre style="line-height: 1.2">{html.escape(self._text())}</pre>'
        )


class SilentReporter:
    """A training loop's reporter that shows only warnings, for all processes but the first."""

    def __init__(self, index: int):
        self._index = index
        self._lines = shown_by(self._show)

    def __enter__(self):
        self._lines.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._lines.__exit__(*exception)

    def begin(self, first_step: int, last_step: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def counted(self, number: int) -> None: ...
    def logged(self, step: int, metrics: dict[str, Any]) -> None: ...
    def evaluated(self, step: int, metrics: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...

    def _show(self, line: str) -> None:
        if line.startswith(("warning: ", "error: ")):
            print(f"process {self._index}: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown_by(
    show: Callable[[str], None], *, has_traceback: bool | None = None
) -> Iterator[None]:
    """Passes every log record to `show` as a line, until the end of the context.

    A warning's line begins with `warning: `, an error's with `error: `. The line of a record
    with an exception ends in the exception's type and text.

    Args:
        has_traceback: whether the exception's traceback follows in further lines; None takes
            the value of the surrounding context.
    """
    root, ours = logging.getLogger(), logging.getLogger("switchx")
    handlers, level = root.handlers[:], ours.level
    if has_traceback is None:
        has_traceback = any(getattr(each, "has_traceback", False) for each in handlers)
    root.handlers[:] = [_LineHandler(show, has_traceback)]
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        ours.setLevel(level)


class _LineHandler(logging.Handler):
    def __init__(self, show: Callable[[str], None], has_traceback: bool):
        super().__init__(logging.INFO)
        self._show, self.has_traceback = show, has_traceback

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.partition(".")[0] != "switchx":
            return
        try:
            text = record.getMessage().strip()
        except Exception:  # caused by another library's call
            return self.handleError(record)
        if record.name == "py.warnings":
            text = text.partition("\n")[0]  # the line of code that follows says nothing
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = f"{text}: {cause(error)}"
            if self.has_traceback:
                text += "\n" + "".join(traceback.format_exception(error)).rstrip()
        self._show(f"{level}{text}")


def cause(error: BaseException) -> str:
    """An exception's type and text on one line: `ValueError: no room`."""
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def is_for_a_person(error: BaseException) -> bool:
    """Whether its message is enough: our code raised it, or the system refused something."""
    if isinstance(error, OSError) or not isinstance(error, ValueError | RuntimeError):
        return isinstance(error, OSError)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").split(".")[0] in _OURS
    return is_ours and not type(error).__module__.startswith("jax")
