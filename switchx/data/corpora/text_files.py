# SPDX-License-Identifier: Apache-2.0
"""A user's own text: `.txt` and `.jsonl` files, plain or `.gz`, one by one or by folder.

Documents are divided into training and validation by their hash (`hold_out`).
"""

import dataclasses
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from switchx.characters import require_characters
from switchx.data.corpora.corpus import CorpusSource, fingerprint_of
from switchx.data.corpora.prepared import Recipe, open_prepared
from switchx.fields import at_resume, require, require_at_least
from switchx.object_store import Folder, as_folder, files_in, is_address, state_of

_PLAIN = (".txt", ".txt.gz")
_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
SUFFIXES = _PLAIN + _JSON_LINES
# What a record of JSON lines may hold; further keys are left aside.
_FIELDS = (("text",), ("inputs", "targets"))


@dataclasses.dataclass(frozen=True)
class TextFiles:
    r"""Documents of text files.

    A `.txt` file is cut at paragraphs into documents; blank ones go, `\r\n` becomes `\n`,
    all else is kept. A line of a `.jsonl` file (or `.json.gz`, as C4 is published) is one
    document, `{"text": ...}` or `{"inputs": ..., "targets": ...}`, all files alike.

    Attributes:
        path: file or folder, or several, on this machine or in a store (`s3://bucket/text`);
            folders are searched to the bottom. A run goes on where they were moved to: the
            documents' fingerprint decides.
        validation_fraction: of the documents.
        max_characters: of a document cut from a `.txt` file.
    """

    name = "text_files"

    path: str | Sequence[str] = at_resume()
    validation_fraction: float = 0.05
    max_characters: int = 8000

    def __post_init__(self):
        require_cut(self)

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Split `train` or `validation`.

        Raises:
            ValueError: no such split; a file that is missing, unreadable, not UTF-8 or not
                of the form above; fewer than two distinct documents.
        """
        files = find_files(self.path)
        fields = fields_of(files)
        states = [(str(file), *state_of(file)) for file in files]
        key = fingerprint_of(
            "text_files 1", self.validation_fraction, self.max_characters, states
        )

        def make_splits() -> dict[str, Iterator[dict[str, str]]]:
            return hold_out(
                lambda: read_examples(files, fields, self.max_characters),
                lambda example: text_digest(*example.values()),
                self.validation_fraction,
                f"text_files path={self.path!r}",
            )

        return open_prepared(Recipe(self.name, key, fields, make_splits), split, data_dir)


def find_files(path: str | Sequence[str]) -> list[Folder]:
    """Absolute paths or addresses of the text files that `path` names, in folders all, sorted.

    Raises:
        ValueError: a path that does not exist or is no text file, a folder without any.
    """
    names = [path] if isinstance(path, (str, Path)) else path
    require(names, "no text files are named; expected files or folders of text")
    files = []
    for name in names:
        root = as_folder(name) if is_address(name) else as_folder(name).resolve()
        require(root.exists(), f"{root} does not exist; name a text file or a folder of them")
        found = sorted(root / each for each in files_in(root)) if root.is_dir() else [root]
        texts = [file for file in found if file.name.lower().endswith(SUFFIXES)]
        require(
            texts,
            f"{root} holds no text: none of its {len(found)} files ends in "
            f"{', '.join(SUFFIXES)}; rename or convert them",
        )
        files += texts
    return list(dict.fromkeys(files))


def read_examples(
    files: Iterable[Folder], fields: tuple[str, ...], max_characters: int
) -> Iterator[dict[str, str]]:
    """Examples of the files in order, read as they are asked for.

    Raises:
        ValueError: a file that is unreadable, not UTF-8, or has a record without `fields`.
    """
    for file in files:
        if not file.name.lower().endswith(_JSON_LINES):
            yield from ({"text": text} for text in cut_lines(read_lines(file), max_characters))
            continue
        for number, record in _read_records(file):
            require(
                all(isinstance(record.get(field), str) for field in fields),
                f"{file}:{number}: expected texts under {' and '.join(fields)}, as in the "
                f"first record, got the keys {', '.join(record) or 'none'}",
            )
            for field in fields:
                require_characters(record[field], f"{file}:{number}: {field}")
            if any(record[field].strip() for field in fields):
                yield {field: record[field] for field in fields}


def _read_records(file: Folder) -> Iterator[tuple[int, dict]]:
    """Objects of a JSON lines file with their line numbers, from 1."""
    for number, line in enumerate(read_lines(file), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}:{number}: not JSON ({error}); one object a line is expected"
            ) from error
        kind = type(record).__name__
        require(
            isinstance(record, dict),
            f'{file}:{number}: expected an object like {{"text": ...}}, got {kind}',
        )
        yield number, record


def fields_of(files: list[Folder]) -> tuple[str, ...]:
    """Keys of the examples: `text` if any file is plain, otherwise the first record's.

    Raises:
        ValueError: there is no record, or the first has neither form.
    """
    if any(file.name.lower().endswith(_PLAIN) for file in files):
        return ("text",)
    for file in files:
        for number, record in _read_records(file):
            for fields in _FIELDS:
                if all(field in record for field in fields):
                    return fields
            raise ValueError(
                f"{file}:{number}: expected the key text, or inputs and targets; got "
                f"{', '.join(record) or 'none'}"
            )
    raise ValueError(f"{', '.join(map(str, files))}: no records; add text")


def read_lines(path: Folder) -> Iterator[str]:
    r"""Lines of a UTF-8 file, plain or `.gz`, with their ends; `\r\n` becomes `\n`.

    Raises:
        ValueError: not to be read, or not UTF-8: names the file and the byte offset (in the
            unpacked text).
    """
    offset = 0
    try:
        with path.open("rb") as raw, _unpacked(raw, path.suffix) as file:
            for line in file:
                text = line.decode("utf-8-sig" if offset == 0 else "utf-8")
                offset += len(line)
                yield text[:-2] + "\n" if text.endswith("\r\n") else text
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {at}; "
            "convert it, as with `iconv -f LATIN1 -t UTF-8`"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; check that it is whole and that you may read it"
        ) from error


def _unpacked(file: BinaryIO, suffix: str) -> BinaryIO:
    return gzip.open(file) if suffix == ".gz" else file


def cut_lines(lines: Iterable[str], max_characters: int) -> Iterator[str]:
    """Joins lines into documents of at most `max_characters`; nothing is lost but blank ones.

    A document that has to end ends, by preference, before an unindented line that follows a
    blank one (a paragraph, a top-level definition), before any line that follows a blank
    one, before any line. A single longer line stays whole.
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
    """Raises ValueError for a corpus that holds out nothing or all, or cuts to nothing."""
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

    Held out are the digests in the lowest `fraction` of all possible ones: a document keeps
    its side when others come or go. Where that would leave a side empty, the lowest digest is
    held out, or the highest is not.

    Args:
        read: gives all documents, each time it is called.
        what: of the message, where the documents come from.

    Raises:
        ValueError: fewer than two distinct documents.
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
