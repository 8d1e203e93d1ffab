# SPDX-License-Identifier: Apache-2.0
"""What a task reads from: a corpus, and the examples of one of its splits."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class CorpusSource:
    """Random access to the examples of one split; can be pickled for Grain's workers.

    Attributes:
        name: corpus and split, for messages.
        fingerprint: hex, of the examples' content.
        fields: keys of an example: `text`, or `inputs` and `targets`, or a user's own.
        records: examples with texts (or their UTF-8 bytes) as values, among others those of
            `fields`.
    """

    name: str
    fingerprint: str
    fields: tuple[str, ...]
    records: Sequence[dict[str, Any]] = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, str]:
        """Example `index`, from 0.

        Raises:
            IndexError: `index` is not in [0, len).
        """
        if not 0 <= index < len(self.records):
            raise IndexError(f"{self.name} has {len(self.records)} examples; index={index}")
        record = self.records[int(index)]
        texts = {field: record[field] for field in self.fields}
        return {f: t if isinstance(t, str) else t.decode() for f, t in texts.items()}


class Corpus(Protocol):
    """What a task reads from."""

    @property
    def name(self) -> str: ...

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Examples of `split`, prepared first where they are not yet.

        Args:
            data_dir: where data is looked for and prepared; None takes the environment
                variable SWITCHX_DATA_DIR, without it the cache.

        Raises:
            ValueError: no such split, or data that is missing, unreadable or empty.
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
