# SPDX-License-Identifier: Apache-2.0
"""Lines of text that a command reads, and why it does not read some of them."""

import codecs
import pathlib
import sys
from collections.abc import Iterable

STANDARD_INPUT = "-"
# More than these are counted, not listed.
MOST_LISTED = 10


def read_lines(name: str) -> list[str]:
    """The lines of a UTF-8 file, or of standard input until its end (`-`).

    Line feeds end lines; a carriage return before one belongs to it, and the end of the file
    ends the last line. A byte order mark is no text.

    Raises:
        ValueError: there is no such file, it has no lines, or some are not UTF-8.
    """
    data, shown = _read(name)
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise ValueError(f"{shown} has no lines; write one input a line")
    texts, faults = [], []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            faults.append((number, f"is not UTF-8: byte {error.start + 1} is {_hex(error)}"))
    refuse_lines(name, faults)
    return texts


def refuse_lines(name: str, faults: Iterable[tuple[int, str]]) -> None:
    """Raises one ValueError that names wrong lines, if there are any.

    Args:
        faults: numbers of lines, from 1, and what is wrong with each, to be said after it.
    """
    faults = list(faults)
    if not faults:
        return
    listed = "; ".join(f"line {number} {fault}" for number, fault in faults[:MOST_LISTED])
    more = len(faults) - MOST_LISTED
    rest = f"; and {more} more lines" if more > 0 else ""
    raise ValueError(
        f"{_shown(name)}: {listed}{rest}. Nothing was done; correct or remove what is wrong"
    )


def _read(name: str) -> tuple[bytes, str]:
    if name == STANDARD_INPUT:
        return sys.stdin.buffer.read(), _shown(name)
    try:
        return pathlib.Path(name).expanduser().read_bytes(), _shown(name)
    except OSError as error:
        raise ValueError(
            f"--input={name} cannot be read ({error.strerror}); name a text file, or - for "
            "standard input"
        ) from error


def _shown(name: str) -> str:
    return "standard input" if name == STANDARD_INPUT else name


def _hex(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}"
