# SPDX-License-Identifier: Apache-2.0
"""Slices of splits, as TFDS writes them: `train[:90%]`, `train[100:]`, `train+validation`.

They work for every corpus: a corpus opens whole splits, and `open_split` takes parts of them.
A bound is a number of examples or a percentage, rounded to the nearest example; a negative one
counts from the end. Examples are those that a task reads, in the corpus's order.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from switchx.data.corpora.corpus import Corpus, CorpusSource, fingerprint_of
from switchx.fields import require

_PART = re.compile(r"(?P<name>[\w./-]+?)(?:\[(?P<start>[^:\]]*):(?P<stop>[^:\]]*)\])?")
_BOUND = re.compile(r"-?\d+%?")


@dataclasses.dataclass(frozen=True)
class SplitPart:
    """Some examples of one split.

    Attributes:
        start, stop: bounds as they were written, such as `10%`; None is the split's own.
    """

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def bounds(self, size: int) -> tuple[int, int]:
        """The first example and the one after the last, in a split of `size`.

        Raises:
            ValueError: a bound is outside the split, or nothing is between them.
        """
        start = 0 if self.start is None else self._bound(self.start, size)
        stop = size if self.stop is None else self._bound(self.stop, size)
        require(
            start < stop,
            f"the split {self} has no example: {self.name} has {size}, and these bounds mean "
            f"[{start}:{stop}]; use others",
        )
        return start, stop

    def _bound(self, text: str, size: int) -> int:
        number, is_percentage = int(text.rstrip("%")), text.endswith("%")
        limit = 100 if is_percentage else size
        require(
            -limit <= number <= limit,
            f"the split {self} goes beyond {self.name}, which has {size} examples; use bounds "
            f"from {-limit} to {limit}{'%' if is_percentage else ''}",
        )
        index = round(number * size / 100) if is_percentage else number
        return index + size if number < 0 else index

    def __str__(self) -> str:
        return (
            self.name if self.is_whole else f"{self.name}[{self.start or ''}:{self.stop or ''}]"
        )


def parse_split(split: str) -> tuple[SplitPart, ...]:
    """The parts of `train[:90%]+validation`.

    Raises:
        ValueError: the text is not of this form.
    """
    parts = []
    for text in split.split("+"):
        match = _PART.fullmatch(text.strip())
        bounds = [b for b in (match["start"], match["stop"]) if b] if match else []
        require(
            match and all(_BOUND.fullmatch(bound.strip()) for bound in bounds),
            f"the split {split!r} cannot be read at {text!r}; write a name, a slice of it such "
            "as train[:90%], train[100:] or train[-50:], or several joined by +",
        )
        start, stop = (
            bound.strip() or None if bound else None for bound in match.group("start", "stop")
        )
        parts.append(SplitPart(match["name"], start, stop))
    return tuple(parts)


def open_split(corpus: Corpus, split: str, data_dir: str | None) -> CorpusSource:
    """Examples of a split, of a slice of one, or of several one after another.

    Raises:
        ValueError: errors of `Corpus.open`; a slice cannot be read, goes beyond its split or is
            empty.
    """
    parts = parse_split(split)
    sources = [corpus.open(part.name, data_dir) for part in parts]
    if len(parts) == 1 and parts[0].is_whole:
        return sources[0]
    bounds = [part.bounds(len(each)) for part, each in zip(parts, sources, strict=True)]
    fingerprint = fingerprint_of(
        "slices", *((each.fingerprint, *b) for each, b in zip(sources, bounds, strict=True))
    )
    records = Slices(tuple(sources), tuple(bounds))
    accounts = itertools.chain.from_iterable(each.accounts for each in sources)
    return CorpusSource(
        f"{corpus.name}/{split}", fingerprint, sources[0].fields, records, tuple(accounts)
    )


@dataclasses.dataclass(frozen=True)
class Slices:
    """Records of several sequences between bounds, one after another."""

    sources: tuple[Sequence[dict[str, Any]], ...]
    bounds: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.bounds)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Record `index`, in [0, len)."""
        ends = np.cumsum([stop - start for start, stop in self.bounds])
        number = int(np.searchsorted(ends, index, side="right"))
        start, stop = self.bounds[number]
        return self.sources[number][stop - int(ends[number]) + index]
