# SPDX-License-Identifier: Apache-2.0
"""Log records as lines for a person.

Ours from INFO on: what takes time says that it begins. Those of libraries from WARNING on,
Python's warnings (`logging.captureWarnings`) among them.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator


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
