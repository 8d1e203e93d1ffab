# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets as they are published: .tsv, .csv, .jsonl, .json and .txt, plain or packed,
and tables of Apache Arrow.

A row is a dictionary: by the header's names or, in a table without a header, by the number of
the column (`0`, `1`, ...); the object on a line of JSON; or an item of a JSON file, whose lists
of rows may be inside other lists and objects (SQuAD's `data`).
"""

import csv
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from switchx.characters import require_characters
from switchx.data.corpora import tables
from switchx.data.corpora.packed_files import Name, name_of, named, opened, read_lines
from switchx.fields import require
from switchx.object_store import Folder, state_of

Row = dict[str, Any]
KINDS = (".tsv", ".csv", ".jsonl", ".json", ".txt", *tables.KINDS)

_CELL = re.compile(r'"(?:[^"]++|"")*+"|[^",\n]*+')


@dataclasses.dataclass(frozen=True)
class RawFile:
    """The format of a file.

    Attributes:
        name: path in the folder, its suffixes in any case; the file there may be compressed.
        has_header: whether a table has a header.
        rows_in: key of a JSON file's object that holds its list of rows.
        skips_short_rows: whether rows of a table with fewer cells than its header are left out
            and counted, as TFDS does with the few broken rows of GLUE.
    """

    name: str
    has_header: bool = True
    rows_in: str | None = None
    skips_short_rows: bool = False

    def find(self, folder: Path) -> Path | None:
        """The file in the folder, plain or packed, or None."""
        return named(folder, self.name)

    def rows(self, path: Path, tally: Counter) -> Iterator[Row]:
        """The rows of the file that was found; see `read_rows`."""
        return read_rows(path, self, tally)

    def state(self, path: Path) -> tuple:
        """Values that change with the rows and are quick to get."""
        return str(path.resolve()), *state_of(path)


def has_rows(name: Name) -> bool:
    """Whether files of this name are read as rows; Arrow tables are packed inside."""
    return name.kind in KINDS and not (name.kind in tables.KINDS and name.packing)


def read_rows(path: Path, file: RawFile, tally: Counter) -> Iterator[Row]:
    """Rows of a file in order, read as they are asked for.

    Args:
        tally: counts `rows`, and by reason those that are left out.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, or is not of its kind; the message
            has the line.
    """
    name = name_of(file.name)
    require(
        has_rows(name),
        f"{path}: rows are read of {', '.join(KINDS)}; convert it to one of them",
    )
    if name.kind in tables.KINDS:
        yield from (row for _, row in tables.read_table(path, tally))
    elif name.kind == ".jsonl":
        yield from (row for _, row in json_lines(path, tally))
    elif name.kind == ".json":
        yield from (_object(row, str(path)) for row in counted(_list(path, file), tally))
    elif name.kind == ".txt":
        for _, line in _lines(path, tally):
            yield {"text": line.rstrip("\n")}
    else:
        yield from _table(path, file, name.kind == ".csv", tally)


def _lines(path: Folder, tally: Counter) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            tally["rows"] += 1
            yield number, line
        else:
            tally["blank lines"] += 1


def counted(rows: Iterable[Any], tally: Counter) -> Iterator[Any]:
    """Yields the rows, and counts them as `rows`."""
    for row in rows:
        tally["rows"] += 1
        yield row


def json_lines(path: Folder, tally: Counter) -> Iterator[tuple[str, Row]]:
    """Objects of a file of JSON lines, each with its place.

    Raises:
        ValueError: as for `read_rows`.
    """
    for number, line in _lines(path, tally):
        place = f"{path}:{number}"
        yield place, _object(_parsed(line, place), place)


def _table(path: Path, file: RawFile, is_csv: bool, tally: Counter) -> Iterator[Row]:
    names = None
    for number, cells in _csv_records(path) if is_csv else _tsv_records(path):
        has_one = names is not None and len(names) == 1  # its cells may be empty
        if not cells or (not has_one and cells[0].strip() == "" and len(cells) == 1):
            tally["blank lines"] += 1
            continue
        if names is None:
            names = cells if file.has_header else [str(i) for i in range(len(cells))]
            twice = [f"{name!r}" for name, times in Counter(names).items() if times > 1]
            require(
                not twice,
                f"{path}:{number} has the column {', '.join(twice)} twice; rename one of them",
            )
            if file.has_header:
                continue
        if len(cells) < len(names) and file.skips_short_rows:
            tally["rows with too few cells"] += 1
            continue
        require(
            len(cells) == len(names),
            f"{path}:{number}: expected {len(names)} cells, {', '.join(names)}, got "
            f"{len(cells)}, {str(cells):.200}; correct the line"
            f"{', for a cell with a comma in it stands in quotes' if is_csv else ''}",
        )
        tally["rows"] += 1
        yield dict(zip(names, cells, strict=True))


def _tsv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Cells of each line. There are no quotes: they are part of the text (GLUE)."""
    for number, line in enumerate(read_lines(path), 1):
        line = line.removesuffix("\n")
        yield number, line.split("\t") if line else []


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Cells of each record, and the line on which it begins.

    Quotes are read as strictly as in RFC 4180, more strictly than by `csv` even in strict mode:
    any odd number of quotes, because one is missing or one too many, is found.
    """
    csv.field_size_limit(1 << 27)  # articles are longer than csv's limit
    record = []

    def lines() -> Iterator[str]:
        for line in read_lines(path):
            record.append(line)
            yield line

    reader = csv.reader(lines(), strict=True)
    while True:
        number = reader.line_num + 1
        record.clear()
        try:
            cells, failure = next(reader, None), None
        except csv.Error as error:
            cells, failure = None, error
        text = "".join(record)
        fault = _fault_of_quotes(text) if '"' in text else None
        if fault is not None:
            line = number + text.count("\n", 0, fault[0])
            raise ValueError(
                f"{path}:{line}: {fault[1]}; write a cell with quotes in it in quotes, and "
                "each quote in it twice"
            )
        if failure is not None:
            raise ValueError(f"{path}:{number}: {failure}; correct the line") from failure
        if cells is None:
            return
        yield number, cells


def _fault_of_quotes(record: str) -> tuple[int, str] | None:
    """The position and the kind of a wrong quote in a record; None if all are right."""
    at = 0
    while at < len(record):
        end = _CELL.match(record, at).end()
        is_quoted, follows = record[at] == '"', record[end : end + 1]
        if is_quoted and end == at:
            return at, "the quote that opens here is never closed"
        if is_quoted and follows not in ("", ",", "\n", "\r"):
            after = f"{record.count(chr(10), at, end)} lines on, before {record[end:][:20]!r}"
            return at, f"the quote that opens here is closed inside of a cell, {after}"
        if follows == '"':
            return end, "a quote inside of a cell that begins without one"
        at = end + 1
    return None


def _list(path: Path, file: RawFile) -> list:
    try:
        with opened(path) as content:
            text = content.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}; convert it") from error
    rows = _parsed(text, str(path))
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
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); correct it, or get it anew") from error
    except KeyError as error:
        raise ValueError(f"{place}: an object has the key {error} twice; rename one") from error
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply; flatten it") from error
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        raise ValueError(f"{place}: {error}; write the number as a text") from error


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise KeyError(names.most_common(1)[0][0])
    return row


def _object(row, place: str) -> Row:
    require(
        isinstance(row, dict),
        f"{place}: expected an object a row, got {type(row).__name__}; write one a line",
    )
    for name, value in row.items():
        require_characters(value, f"{place}: {name}")
    return row
