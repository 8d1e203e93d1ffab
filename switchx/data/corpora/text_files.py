# SPDX-License-Identifier: Apache-2.0
"""A user's own text: `.txt`, `.jsonl` and Apache Arrow tables, as single files or folders.

Documents are divided into training and validation by their hash (`hold_out`).
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from switchx.characters import require_characters
from switchx.data.corpora import tables
from switchx.data.corpora.corpus import Account, CorpusSource, fingerprint_of
from switchx.data.corpora.found_files import AGAIN, FoundFiles
from switchx.data.corpora.packed_files import PACKINGS, Name, name_of, read_lines
from switchx.data.corpora.prepared import Recipe, open_prepared
from switchx.data.corpora.raw_files import counted, json_lines
from switchx.fields import at_resume, require, require_at_least
from switchx.object_store import Folder, as_folder, state_of

# Fields of a record; further keys and columns are ignored.
_FIELDS = (("text",), ("inputs", "targets"))
_MACROS = "TextFiles.columns, in gin files TEXT_COLUMN, or INPUTS_COLUMN and TARGETS_COLUMN"
_READ = f".txt, .jsonl, .json.gz (or {', '.join(PACKINGS[1:])}), {', '.join(tables.KINDS)}"


@dataclasses.dataclass(frozen=True)
class TextFiles:
    r"""Documents of text files.

    A `.txt` file is cut at paragraphs into documents; blank ones are dropped, `\r\n` becomes
    `\n`, all else is kept. A line of a `.jsonl` file (or `.json.gz`, as C4 is published), or a
    row of a table (`.parquet`, `.arrow`, a folder of `datasets`), is one document,
    `{"text": ...}` or `{"inputs": ..., "targets": ...}`, the same in all files. All but tables
    may be packed (`.gz`, `.bz2`, `.xz`, `.zst`).

    Attributes:
        path: file or folder, or several, on this machine or in a store (`s3://bucket/text`);
            folders are searched recursively (`found_files.py`). A run can go on after they
            were moved: what counts is the documents' fingerprint.
        validation_fraction: fraction of the documents that is held out for validation.
        max_characters: longest document cut from a `.txt` file, in characters.
        columns: keys or columns of the text, or of inputs and targets; None is `text` or
            `inputs` and `targets`, whichever the first record has.
    """

    name = "text_files"

    path: str | Sequence[str] = at_resume()
    validation_fraction: float = 0.05
    max_characters: int = 8000
    columns: tuple[str, ...] | None = at_resume(None)

    def __post_init__(self):
        require_cut(self)
        require(
            self.columns is None or len(self.columns) in (1, 2),
            f"TextFiles.columns={self.columns!r}; use one, of texts, or two, of inputs and "
            "targets",
        )

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Split `train` or `validation`.

        Raises:
            ValueError: there is no such split; a file is missing, unreadable, not UTF-8 or
                not of the form above; two files of one name hold different texts; or there
                are fewer than two distinct documents.
        """
        found = find_texts(self.path, self.columns)
        texts = Texts.of(list(found.files), self.columns)
        states = [(str(file), *state_of(file)) for file in found.files]
        cut = self.validation_fraction, self.max_characters
        key, tally = fingerprint_of("text_files 2", *cut, texts.keys, states), Counter()

        def make_splits() -> dict[str, Iterator[dict[str, str]]]:
            return hold_out(
                # Rows are counted once, although they are read three times.
                lambda: texts.examples(self.max_characters, Counter() if tally else tally),
                lambda example: text_digest(*example.values()),
                self.validation_fraction,
                f"text_files path={self.path!r}",
            )

        account = Account.of(self.name, found.files, found.left_out)
        recipe = Recipe(self.name, key, texts.fields, make_splits, account, tally)
        return open_prepared(recipe, split, data_dir)


def find_texts(path: str | Sequence[str], columns: Sequence[str] | None = None) -> FoundFiles:
    """Text files that `path` names, in folders all of them, sorted; and what is left out.

    For a data set that `datasets` saved, they are the files that its `state.json` lists.

    Raises:
        ValueError: a path does not exist, or holds no text; or two files of one name hold
            different texts.
    """
    names = [path] if isinstance(path, (str, Path)) else path
    require(names, "no text files are named; expected files or folders of text")
    found = FoundFiles(wants=lambda name: is_text_file(name, columns))
    for name in names:
        counts = len(found.files), len(found.left_out[AGAIN])
        found_now = found.add(name)
        for folder in {file.parent for file in found_now if file.suffix.lower() == ".arrow"}:
            saved = tables.saved_tables(folder)
            for file in [each for each in found_now if saved and each.parent == folder]:
                if file.suffix.lower() == ".arrow" and file not in saved:
                    found.leave_out(file, "not listed in state.json")
        found.keep()
        kinds = Counter("".join(name_of(file.name)[1:]) or "none" for file in found_now)
        require(
            not found_now or (len(found.files), len(found.left_out[AGAIN])) != counts,
            f"{as_folder(name)} holds no text: its files end in "
            f"{', '.join(f'{kind} ({times})' for kind, times in kinds.items())}, and none in "
            f"{_READ}; rename or convert them (.csv and .tsv: configs/tasks/templates.gin)",
        )
    require(
        found.files,
        f"{', '.join(map(str, names))}: there is no file; put texts there that end in {_READ}",
    )
    return found


def is_text_file(name: Name, columns: Sequence[str] | None = None) -> bool:
    """Whether a file of this name holds text, or records if `columns` are named."""
    if name.kind == ".txt":
        return columns is None or len(columns) == 1
    is_packed_json = name.kind == ".json" and bool(name.packing)
    is_table = name.kind in tables.KINDS and not name.packing
    return name.kind == ".jsonl" or is_packed_json or is_table


def has_records(file: Folder) -> bool:
    """Whether a file is text or a table, or has a line of JSON."""
    if name_of(file.name).kind in (".txt", *tables.KINDS):
        return True
    return next(json_lines(file, Counter()), None) is not None


@dataclasses.dataclass(frozen=True)
class Texts:
    """Files of text, and the fields of their records.

    Attributes:
        files: the files, in their order.
        fields: fields of an example, `text`, or `inputs` and `targets`.
        keys: keys of a record for these fields.
    """

    files: list[Folder]
    fields: tuple[str, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, files: list[Folder], columns: Sequence[str] | None = None) -> Self:
        """The texts in these files, under `columns` or under the first record's keys.

        Raises:
            ValueError: there is no record, or the first has neither form.
        """
        if columns is not None:
            return cls(files, _FIELDS[len(columns) - 1], tuple(columns))
        if any(name_of(file.name).kind == ".txt" for file in files):
            return cls(files, _FIELDS[0], _FIELDS[0])
        for file in files:
            if name_of(file.name).kind in tables.KINDS:
                first = str(file), tables.columns_of(file)[0]
            elif (first := next(json_lines(file, Counter()), None)) is None:
                continue
            place, keys = first
            for fields in _FIELDS:
                if set(fields) <= set(keys):
                    return cls(files, fields, fields)
            raise ValueError(
                f"{place}: expected the key text, or inputs and targets; got "
                f"{', '.join(keys) or 'none'}; name others: {_MACROS}"
            )
        raise ValueError(f"{', '.join(map(str, files))}: no records; add text")

    def examples(self, max_characters: int, tally: Counter) -> Iterator[dict[str, str]]:
        """Examples of the files in order, read as they are asked for.

        Args:
            tally: counts `rows`, including lines of text, and by reason those without examples.

        Raises:
            ValueError: a file is unreadable, not UTF-8, or has a record without `keys`.
        """
        for file in self.files:
            kind = name_of(file.name).kind
            if kind == ".txt":
                lines = counted(read_lines(file), tally)
                yield from ({"text": text} for text in cut_lines(lines, max_characters))
                continue
            is_table = kind in tables.KINDS
            read = tables.read_table(file, tally, self.keys)
            for place, record in read if is_table else json_lines(file, tally):
                texts = [record.get(key) for key in self.keys]
                require(
                    all(isinstance(text, str) for text in texts),
                    f"{place}: expected texts under {' and '.join(self.keys)}, got the keys "
                    f"{', '.join(record) or 'none'}; correct it, or name others: {_MACROS}",
                )
                for key, text in zip(self.keys, texts, strict=True):
                    require_characters(text, f"{place}: {key}")
                if any(text.strip() for text in texts):
                    yield dict(zip(self.fields, texts, strict=True))
                else:
                    tally["blank documents"] += 1


def cut_lines(lines: Iterable[str], max_characters: int) -> Iterator[str]:
    """Joins lines into documents of at most `max_characters`; only blank documents are lost.

    A document that has to end ends, in order of preference, before an unindented line that
    follows a blank one (a paragraph, a top-level definition), before any line that follows a
    blank one, or before any line. A single longer line stays whole.
    """
    document, size = [], 0
    weak_end, strong_end = 0, 0
    for line in lines:
        if document and line.strip() and not document[-1].strip():
            if line[0].isspace():
                weak_end = len(document)
            else:
                strong_end = len(document)
        while document and size + len(line) > max_characters:
            end = strong_end or weak_end or len(document)
            text = "".join(document[:end])
            if text.strip():
                yield text
            document, size = document[end:], size - len(text)
            weak_end, strong_end = max(0, weak_end - end), 0
        document.append(line)
        size += len(line)
    if any(line.strip() for line in document):
        yield "".join(document)


def require_cut(corpus) -> None:
    """Raises ValueError if a corpus holds out nothing or all, or cuts documents to nothing."""
    fraction = corpus.validation_fraction
    require(0 < fraction < 1, f"validation_fraction={fraction}; use one between 0 and 1")
    require_at_least(corpus, 1, "max_characters")


def text_digest(*texts: str) -> bytes:
    """8 bytes that stand for the texts."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()


def hold_out(
    read: Callable[[], Iterable[Any]],
    digest_of: Callable[[Any], bytes],
    fraction: float,
    what: str,
) -> dict[str, Iterator[Any]]:
    """Documents as the splits `train` and `validation`, by their digests.

    Digests in the lowest `fraction` of all possible ones are held out, so a document keeps its
    side when others come or go. If that would leave a side empty, the lowest digest is held
    out, or the highest is not.

    Args:
        read: function that returns all documents, each time it is called.
        what: where the documents come from, the subject of the message.

    Raises:
        ValueError: there are fewer than two distinct documents.
    """
    distinct = sorted({digest_of(document) for document in read()})
    require(
        len(distinct) >= 2,
        f"{what} holds {len(distinct)} distinct documents and a split into train and "
        "validation needs at least 2; add text, or cut it finer by a lower max_characters",
    )
    bound = int(fraction * 2**64)
    num_below = sum(int.from_bytes(digest, "big") < bound for digest in distinct)
    held_out = frozenset(distinct[: min(max(num_below, 1), len(distinct) - 1)])

    def split(is_held_out: bool) -> Iterator[Any]:
        return (each for each in read() if (digest_of(each) in held_out) == is_held_out)

    return {"train": split(False), "validation": split(True)}
