# SPDX-License-Identifier: Apache-2.0
"""What a command says on standard error beside its progress: log records, and its end.

Records of switchx are shown from INFO on: what takes time says that it begins. Those of
libraries from WARNING on, Python's warnings (`logging.captureWarnings`) among them.
"""

import argparse
import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator

OURS = ("switchx", "pallas_kernels")


@contextlib.contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Gives every log record to `show` as a line, until the end of the context.

    A warning's begins with `warning: `, an error's with `error: `.
    """
    root, ours = logging.getLogger(), logging.getLogger("switchx")
    handlers, level = root.handlers[:], ours.level
    root.handlers[:] = [_LineHandler(show)]
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        ours.setLevel(level)


class _LineHandler(logging.Handler):
    def __init__(self, show: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.partition(".")[0] != "switchx":
            return
        text = record.getMessage().strip()
        if record.name == "py.warnings":
            text = text.partition("\n")[0]  # the line of code that follows says nothing
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        self._show(f"{level}{text}")


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
    if isinstance(error, OSError) or not isinstance(error, ValueError | RuntimeError):
        return isinstance(error, OSError)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").split(".")[0] in OURS
    return is_ours and not type(error).__module__.startswith("jax")
