# SPDX-License-Identifier: Apache-2.0
"""Means over seeds, texts or tasks, with their 95% intervals.

Dims: S seeds
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.stats

# Fewer values than these are too few for a bootstrap.
FEW = 10


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside of the interval: 0 is no effect, of a Ratio 1."""
        return self.low > value or self.high < value

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def interval_of(values: Sequence[float], kind: type[Interval] = Interval) -> Interval:
    """The mean of some values (one per seed, text or task) and its 95% interval.

    Of fewer than FEW values it is Student's t: a bootstrap of three is their range, which
    leaves out the true mean in a quarter of all cases. Of more it is the middle 95% of 10,000
    bootstrap means. One value has no width.
    """
    values_S = np.asarray(values, float)
    mean = float(values_S.mean())
    if len(values_S) == 1:
        return kind(mean, mean, mean)
    if len(values_S) < FEW:
        error = values_S.std(ddof=1) / math.sqrt(len(values_S))
        half = float(scipy.stats.t.ppf(0.975, len(values_S) - 1) * error)
        return kind(mean, mean - half, mean + half)
    drawn = np.random.default_rng(0).integers(0, len(values_S), (10_000, len(values_S)))
    low, high = np.percentile(values_S[drawn].mean(1), (2.5, 97.5))
    return kind(mean, float(low), float(high))


def paired(mine: Sequence[float], others: Sequence[float]) -> Interval:
    """Differences, mine less the others', of the same seeds in the same order."""
    return interval_of([a - b for a, b in zip(mine, others, strict=True)])
