# SPDX-License-Identifier: Apache-2.0
"""What an experiment measures: cells, each kept as it comes, and intervals over them."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and the middle 95% of its bootstrap samples."""

    mean: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside of the interval: 0 is no effect, of a Ratio 1."""
        return self.low > value or self.high < value


@dataclasses.dataclass(frozen=True)
class Ratio(Interval):
    """One of quotients."""

    no_effect: float = 1.0


def bootstrap(
    values: Sequence[float], samples: int = 10_000, kind: type[Interval] = Interval
) -> Interval:
    """The mean of one value a seed (or sentence); of one value, that value without width."""
    values_S = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(0, len(values_S), (samples, len(values_S)))
    low, high = np.percentile(values_S[drawn].mean(1), (2.5, 97.5))
    return kind(float(values_S.mean()), float(low), float(high))


def paired(mine: Sequence[float], others: Sequence[float]) -> Interval:
    """Differences, mine less the others', of the same seeds in the same order."""
    return bootstrap([a - b for a, b in zip(mine, others, strict=True)])


def word_of(gains: Iterable[Interval]) -> str:
    """`reproduced` where every interval is above 0, `not reproduced` where one is below it;
    otherwise `undecided`."""
    gains = list(gains)
    if any(gain.high < 0 for gain in gains):
        return "not reproduced"
    return "reproduced" if all(gain.low > 0 for gain in gains) else "undecided"


class Cells:
    """JSON lines of `{"cell": settings, "value": found, "seconds": s}`: what has been done.

    Settings say all that a value depends on, so that other settings are other cells.
    """

    def __init__(self, file: pathlib.Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # killed in the middle of a line
            file.write_text(whole, encoding="utf-8")
        self._lines = {
            key_of(line["cell"]): line for line in map(json.loads, whole.splitlines())
        }

    def get(self, cell: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """What is known of a cell; what it takes to know it is done the first time."""
        if key_of(cell) not in self._lines:
            begin = time.perf_counter()
            value = measure()
            line = {"cell": cell, "value": value, "seconds": time.perf_counter() - begin}
            # A run that was killed and went on has lasted longer than this call.
            if isinstance(value, dict) and "seconds" in value:
                line["seconds"] = value["seconds"]
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._lines[key_of(cell)] = line
        return self._lines[key_of(cell)]["value"]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All that has been done, oldest first."""
        return list(self._lines.values())

    @property
    def seconds(self) -> float:
        """Of all cells, whenever they were measured."""
        return sum(line["seconds"] for line in self.lines)


def key_of(cell: dict[str, Any]) -> str:
    """The same text for the same settings, in whatever order."""
    return json.dumps(cell, sort_keys=True)
