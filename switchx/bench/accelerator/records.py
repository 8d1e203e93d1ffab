# SPDX-License-Identifier: Apache-2.0
"""The folder of a call of `check accelerator`: a line of JSON for each row, written at once."""

import json
import os
import pathlib
import time
from typing import Any

from switchx.bench.accelerator.cards import Card
from switchx.bench.accelerator.parts import Part

RESULTS, LOG = "results.jsonl", "log.txt"

Row = dict[str, Any]


class Records:
    """The measured rows, in memory and in `results.jsonl`.

    Attributes:
        rows: measured rows of cases, with the rows of an earlier call.
        fault: reason why the file does not have all rows, such as a full disk.
    """

    def __init__(self, output: str | pathlib.Path, card: Card):
        """Raises ValueError if the folder is not empty or cannot be written."""
        try:
            self.folder = empty_folder(output)
            self._file = (self.folder / RESULTS).open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--output={output} cannot be written ({error})") from None
        self.rows: list[Row] = []
        self.fault: str | None = None
        date = time.strftime("%Y-%m-%d")
        self.write({"card": card.name, "driver": card.driver, "date": date})

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *exception) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.fault = str(error)

    @property
    def log(self) -> pathlib.Path:
        return self.folder / LOG

    def write(self, line: Row) -> None:
        """Writes a line, and waits until the disk has it; `rows` has it in any case."""
        if "case" in line:
            self.rows.append(line)
        try:
            self._file.write(f"{json.dumps(line)}\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.fault = str(error)

    def write_all(self, lines: list[Row]) -> None:
        for line in lines:
            self.write(line)

    def rates(self) -> dict[str, float]:
        """The rates that the part `card` measured, by name."""
        return {each["case"]: each["measured"] for each in self.rows if each["part"] == "card"}


def of_part(rows: list[Row], part: Part) -> list[Row]:
    """The lines of a part whose code is unchanged."""
    same = part.name, part.code
    return [row for row in rows if (row["part"], row["code"]) == same]


def empty_folder(output: str | pathlib.Path) -> pathlib.Path:
    folder = pathlib.Path(output).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--output={output} has something in it, which this would overwrite; give a new "
            f"folder, and --after={output} to go on from it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_results(folder: str | pathlib.Path, card: Card) -> list[Row]:
    """The lines of an earlier call.

    Raises:
        ValueError: the file is missing, damaged, or of another card.
    """
    head, rows = read_lines(folder, "--after")
    if head["card"] != card.name:
        raise ValueError(
            f"--after={folder} was measured on {head['card']}, this is {card.name}; cards are "
            "never mixed: give a folder of this one, or leave --after out"
        )
    return rows


def read_lines(folder: str | pathlib.Path, flag: str) -> tuple[Row, list[Row]]:
    """Reads a folder's line on its card, and its other lines.

    A last line that was cut short, as when a machine is lost, is left out.

    Args:
        flag: the flag that names the folder.

    Raises:
        ValueError: the file is missing or damaged.
    """
    file = pathlib.Path(folder).expanduser() / RESULTS
    try:
        *whole, _ = file.read_text(encoding="utf-8").split("\n")
        head, *rows = map(json.loads, whole)
        for row in rows:
            needed = {"part", "code"} | ({"measured", "unit"} if "case" in row else set())
            if missing := needed - row.keys():
                raise ValueError(f"a line has no {', '.join(sorted(missing))}")
        if missing := {"card", "driver", "date"} - head.keys():
            raise ValueError(f"the first line has no {', '.join(sorted(missing))}")
        return head, rows
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{flag}={folder}: {file} cannot be read ({error}); give the output folder of an "
            f"earlier call, or leave {flag} out"
        ) from None
