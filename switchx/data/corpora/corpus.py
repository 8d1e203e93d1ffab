# SPDX-License-Identifier: Apache-2.0
"""A corpus, and the examples of one of its splits, which a task reads."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from switchx.data.corpora.packed_files import name_of
from switchx.data.corpora.sound_records import SoundRecords
from switchx.object_store import Folder

# Names kept of files that are left out for one reason; all files are counted.
_MOST_NAMES = 20


@dataclasses.dataclass(frozen=True)
class Account:
    """Counts of a corpus's files that were read and that were left out.

    Attributes:
        corpus: name of the corpus.
        files: numbers of files that were read, by suffix.
        num_bytes: size of these files on disk, in bytes.
        left_out: number of files, folders and links, and names of the first ones, by reason.
        rows: number of lines of text or rows of tables that were read; None if not counted.
        rows_left_out: number of rows that gave no document, by reason.
        documents: numbers of examples, by split.
    """

    corpus: str
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    left_out: dict[str, tuple[int, list[str]]] = dataclasses.field(default_factory=dict)
    rows: int | None = None
    rows_left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    documents: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        corpus: str,
        files: Mapping[Folder, int],
        left_out: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """The account of files by their sizes in bytes, before any of them is read."""
        suffixes = Counter("".join(name_of(file.name)[1:]) or "no suffix" for file in files)
        named = {
            reason: (len(names), sorted(names)[:_MOST_NAMES])
            for reason, names in sorted((left_out or {}).items())
            if names
        }
        return cls(corpus, dict(sorted(suffixes.items())), sum(files.values()), named)

    def __str__(self) -> str:
        """One line, and another one for what was left out."""
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in self.files.items())
        documents = ", ".join(f"{n:,} in {split}" for split, n in self.documents.items())
        rows = "" if self.rows is None else f", {self.rows:,} rows"
        text = (
            f"{self.corpus}: {sum(self.files.values()):,} files ({kinds}), {self.num_bytes:,} "
            f"bytes{rows}; documents: {documents}"
        )
        left_out = [
            f"{count:,} {reason} ({', '.join(names[:3])}{', ...' * (count > 3)})"
            for reason, (count, names) in self.left_out.items()
        ]
        left_out += [f"{count:,} {reason}" for reason, count in self.rows_left_out.items()]
        return text + f"\n{self.corpus}: left out {'; '.join(left_out)}" * bool(left_out)


@dataclasses.dataclass(frozen=True)
class CorpusSource:
    """Random access to the examples of one split; can be pickled for Grain's workers.

    Attributes:
        name: corpus and split, for messages.
        fingerprint: hexadecimal digest of the examples' content.
        fields: keys of an example: `text`, or `inputs` and `targets`, or a user's own.
        records: examples, dictionaries with texts (or their UTF-8 bytes) for `fields` and
            possibly for other keys.
        accounts: accounts of the files that were read; several for a sum of splits.
    """

    name: str
    fingerprint: str
    fields: tuple[str, ...]
    records: Sequence[dict[str, Any]] = dataclasses.field(repr=False)
    accounts: tuple[Account, ...] = dataclasses.field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, str]:
        """Example `index`, from 0.

        Raises:
            IndexError: `index` is not in [0, len).
            ValueError: the record cannot be read, or is not UTF-8; the message names the file,
                the record and the remedy.
        """
        if not 0 <= index < len(self.records):
            raise IndexError(f"{self.name} has {len(self.records)} examples; index={index}")
        record = self.records[int(index)]
        texts = {field: record[field] for field in self.fields}
        try:
            return {f: t if isinstance(t, str) else t.decode() for f, t in texts.items()}
        except UnicodeDecodeError as error:
            if isinstance(self.records, SoundRecords):
                raise self.records.refusal(index, error) from error
            raise ValueError(
                f"{self.name}: example {index} is not UTF-8 ({error}); correct it"
            ) from error


class Corpus(Protocol):
    """The examples that a task reads."""

    @property
    def name(self) -> str: ...

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Examples of `split`, prepared first if they are not yet.

        Args:
            data_dir: folder in which data are searched for and prepared; None takes the
                environment variable SWITCHX_DATA_DIR, or without it the cache.

        Raises:
            ValueError: there is no such split, or data are missing, unreadable or empty.
        """


def fingerprint_of(*parts: object) -> str:
    """16 hex digits that change with any part; parts are told apart by their `repr`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def require_split(corpus: str, split: str, available: Iterable[str]) -> None:
    """Raises ValueError unless `split` is one of `available`."""
    names = list(available)
    if split not in names:
        raise ValueError(f"{corpus} has no split {split!r}; use one of {', '.join(names)}")
