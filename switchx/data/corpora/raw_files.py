# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets as they are published: .tsv, .csv, .jsonl, .json and .txt, plain or .gz.

A row is a dictionary: by the header's names or, in a table without a header, by the number of
the column (`0`, `1`, ...); the object of a line of JSON; an item of a JSON file, whose lists of
rows may stand inside of other lists and objects (SQuAD's `data`).
"""

import csv
import dataclasses
import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from switchx.characters import require_characters
from switchx.data.corpora.text_files import read_lines
from switchx.fields import require

Row = dict[str, Any]
SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".txt")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RawFile:
    """How a file is to be read.

    Attributes:
        name: below the folder; `.gz` may follow it there.
        has_header: of a table.
        rows_in: key of a JSON file's object under which its list of rows is.
        skips_short_rows: of a table, those with fewer columns than its header are left out,
            as TFDS does with the few broken ones of GLUE, and counted in the log.
    """

    name: str
    has_header: bool = True
    rows_in: str | None = None
    skips_short_rows: bool = False

    def find(self, folder: Path) -> Path | None:
        """The file itself in the folder or its `.gz`, or none."""
        for path in (folder / self.name, folder / f"{self.name}.gz"):
            if path.is_file():
                return path
        return None

    def rows(self, path: Path) -> Iterator[Row]:
        """Those of the file that was found; see `read_rows`."""
        return read_rows(path, self)

    def state(self, path: Path) -> tuple:
        """What changes with the rows and is quickly known."""
        return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


def read_rows(path: Path, file: RawFile) -> Iterator[Row]:
    """Rows of a file in order, read as they are asked for.

    Raises:
        ValueError: a file that cannot be read, is not UTF-8, or is not of its kind; the
            message says the line.
    """
    kind = Path(file.name).suffix
    if kind == ".tsv":
        # No quotes: they are part of the text (GLUE).
        yield from _table(path, file, delimiter="\t", quoting=csv.QUOTE_NONE)
    elif kind == ".csv":
        yield from _table(path, file, delimiter=",")
    elif kind == ".jsonl":
        for number, line in enumerate(read_lines(path), 1):
            if line.strip():
                yield _object(_parsed(line, f"{path}:{number}"), f"{path}:{number}")
    elif kind == ".json":
        for row in _list(path, file):
            yield _object(row, str(path))
    elif kind == ".txt":
        for line in read_lines(path):
            if line.strip():
                yield {"text": line.rstrip("\n")}
    else:
        raise ValueError(f"{path}: rows are read of {', '.join(SUFFIXES)}; convert it to one")


def _table(path: Path, file: RawFile, **dialect) -> Iterator[Row]:
    csv.field_size_limit(1 << 27)  # an article is longer than csv's limit
    reader = csv.reader(read_lines(path), **dialect)
    names, num_skipped = None, 0
    try:
        for cells in reader:
            if names is None:
                names = cells if file.has_header else [str(i) for i in range(len(cells))]
                if file.has_header:
                    continue
            if len(cells) < len(names) and file.skips_short_rows:
                num_skipped += 1
                continue
            require(
                len(cells) >= len(names),
                f"{path}:{reader.line_num}: expected {len(names)} columns, "
                f"{', '.join(names)}, got {len(cells)}; correct the line",
            )
            yield dict(zip(names, cells, strict=False))
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: {error}; correct the line") from error
    if num_skipped:
        _log.warning("%s: left out %d rows with too few columns", path, num_skipped)


def _list(path: Path, file: RawFile) -> list:
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        with open_file(path, "rb") as opened:
            content = opened.read().decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; get the file anew") from error
    rows = _parsed(content, str(path))
    if file.rows_in and isinstance(rows, dict):
        require(
            file.rows_in in rows,
            f"{path}: expected rows under {file.rows_in!r}, got the keys {', '.join(rows)}",
        )
        rows = rows[file.rows_in]
    require(
        isinstance(rows, list), f"{path}: expected a list of rows, got {type(rows).__name__}"
    )
    return rows


def _parsed(text: str, place: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); get the file anew") from error


def _object(row, place: str) -> Row:
    require(
        isinstance(row, dict), f"{place}: expected an object a row, got {type(row).__name__}"
    )
    for name, value in row.items():
        require_characters(value, f"{place}: {name}")
    return row
