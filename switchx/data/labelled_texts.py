# SPDX-License-Identifier: Apache-2.0
"""Texts with one label each: the name of their file, or a column of its rows.

Dims: R texts
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from switchx.characters import require_characters
from switchx.data.corpora.corpus import Account
from switchx.data.corpora.found_files import FoundFiles
from switchx.data.corpora.packed_files import name_of, read_lines
from switchx.data.corpora.raw_files import KINDS, RawFile, has_rows, read_rows
from switchx.data.corpora.text_files import cut_lines
from switchx.fields import require
from switchx.object_store import Folder

# Longest document cut from a `.txt` file, in characters: permuted labels need many documents.
MAX_CHARACTERS = 2000


@dataclasses.dataclass(frozen=True)
class LabelledTexts:
    """Texts and their labels.

    Attributes:
        texts: the texts, in the order of files and rows.
        targets: what a decoder should write for each; None if no column was named.
        labels: names of the labels, in the order of their first occurrence.
        label_R: index of each text's label.
        account: what was read, and what was left out.
    """

    texts: list[str] = dataclasses.field(repr=False)
    targets: list[str] | None = dataclasses.field(repr=False)
    labels: tuple[str, ...]
    label_R: np.ndarray = dataclasses.field(repr=False)
    account: Account = dataclasses.field(repr=False)


def read_labelled_texts(
    paths: Sequence[str],
    *,
    text_column: str = "text",
    label_column: str | None = None,
    target_column: str | None = None,
) -> LabelledTexts:
    """Reads all texts of files, or of the files in folders.

    A `.txt` file is cut at paragraphs into documents of at most `MAX_CHARACTERS`; a row of a
    table (`.tsv`, `.csv`, `.jsonl`, `.json`, `.parquet`, `.arrow`) is one text.

    Args:
        text_column, target_column: columns of rows that hold the text and the target.
        label_column: column of rows that holds the label; None makes the file's name, without
            its suffix, the label of all its texts.

    Raises:
        ValueError: there is no file, a file has no texts, cannot be read or lacks a column,
            texts have no labels although a column of labels was named, or two files have one
            name.
    """
    found = FoundFiles(wants=has_rows)
    for path in paths:
        found.add(path)
        found.keep()
    require(
        found.files,
        f"{', '.join(map(str, paths))}: there is no file of text; give files that end in "
        f"{', '.join(KINDS)}",
    )
    columns = [each for each in (text_column, target_column, label_column) if each is not None]
    names = _labels_of_files(list(found.files)) if label_column is None else {}
    texts, targets, labels, tally = [], [], [], collections.Counter()
    for file in found.files:
        num_before = len(texts)
        for place, row in _rows(file, columns, text_column, tally):
            text = _text(row, text_column, place)
            target = "" if target_column is None else _text(row, target_column, place)
            if not text.strip() or not (target_column is None or target.strip()):
                tally["blank texts"] += 1
                continue
            texts.append(text)
            targets.append(target)
            labels.append(names.get(file) or _label(row, label_column, place))
        require(
            len(texts) > num_before,
            f"{file} holds no text; add some, or leave the file out",
        )
    index = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    rows = tally.pop("rows", None)
    account = dataclasses.replace(
        Account.of("texts", found.files, found.left_out),
        rows=rows,
        rows_left_out=dict(tally),
        documents=dict(collections.Counter(labels)),
    )
    return LabelledTexts(
        texts,
        None if target_column is None else targets,
        tuple(index),
        np.array([index[label] for label in labels], np.int32),
        account,
    )


def _labels_of_files(files: list[Folder]) -> dict[Folder, str]:
    """The file's name without suffixes; with its folder's if another file has the same."""
    stems = {file: name_of(file.name).stem for file in files}
    times = collections.Counter(stems.values())
    labels = {
        file: stem if times[stem] == 1 else f"{file.parent.name}/{stem}"
        for file, stem in stems.items()
    }
    twice = [name for name, times in collections.Counter(labels.values()).items() if times > 1]
    require(
        not twice,
        f"two files have the label {', '.join(twice[:3])}; rename one of them, or join them",
    )
    return labels


def _rows(
    file: Folder, columns: list[str], text_column: str, tally: collections.Counter
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their places; for a text file, its documents."""
    if name_of(file.name).kind == ".txt":
        require(
            len(columns) == 1,
            f"{file} is a text without columns, and {', '.join(columns)} are asked for; give "
            "tables (.tsv, .jsonl, .parquet), or leave --label_column and --target_column out: "
            "a text file's label is its name",
        )
        for number, text in enumerate(cut_lines(read_lines(file), MAX_CHARACTERS), 1):
            require_characters(text, f"{file}: document {number}")
            yield f"{file}: document {number}", {text_column: text}
        return
    for number, row in enumerate(read_rows(file, RawFile(file.name), tally), 1):
        missing = [column for column in columns if column not in row]
        require(
            not missing,
            f"{file}: row {number} has no {' and no '.join(map(repr, missing))}; its columns "
            f"are {', '.join(map(str, row)) or 'none'}; name others by --text_column, "
            "--label_column and --target_column",
        )
        yield f"{file}: row {number}", row


def _text(row: dict[str, Any], column: str, place: str) -> str:
    text = row[column]
    require(
        isinstance(text, str),
        f"{place}: {column} is {text!r:.40}, no text; name another column, or correct it",
    )
    require_characters(text, f"{place}: {column}")
    return text


def _label(row: dict[str, Any], column: str, place: str) -> str:
    label = row[column]
    require(
        isinstance(label, str | int | bool) and str(label).strip(),
        f"{place}: {column} is {label!r:.40}, no label; give each text one, or leave "
        "--label_column out: then files are labels",
    )
    return str(label)
