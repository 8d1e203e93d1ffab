# SPDX-License-Identifier: Apache-2.0
"""Mixtures: several tasks learnt at once, and how often each is drawn.

Raffel et al. 2020 (arXiv:1910.10683), section 3.5.2. Rates count examples before packing,
as seqio's do.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from switchx.data.tasks import Task


@dataclasses.dataclass(frozen=True)
class ProportionalRates:
    """Examples-proportional mixing, `r_m = min(e_m, K)^(1/T)`, normalised.

    Attributes:
        temperature: T; 1 is proportional, the larger the nearer to equal (mT5's exponent
            of 0.3 is T = 1/0.3).
        maximum: K, the artificial limit on the size of a task; None for none.
    """

    temperature: float = 1.0
    maximum: int | None = None

    def __post_init__(self):
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}; use a number above 0")
        if self.maximum is not None and self.maximum < 1:
            raise ValueError(f"maximum={self.maximum}; use at least 1 record, or None")

    def of_sizes(self, sizes: Sequence[int]) -> list[float]:
        limit = self.maximum or max(sizes)
        return [min(size, limit) ** (1 / self.temperature) for size in sizes]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Tasks and the rates they are drawn at.

    Attributes:
        tasks: of one vocabulary, under different names.
        rates: one fixed weight a task, or `ProportionalRates` of the number of records in
            each task's training split.
    """

    tasks: tuple[Task, ...]
    rates: tuple[float, ...] | ProportionalRates = ProportionalRates()

    def __post_init__(self):
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a mixture of {names}; use one task or more, each named once")
        # A fingerprint reads or trains the vocabulary: none is needed of the same description.
        first = self.tasks[0].vocabulary
        others = [task.vocabulary for task in self.tasks if task.vocabulary != first]
        if any(each.fingerprint() != first.fingerprint() for each in others):
            raise ValueError(
                f"the tasks {names} have different vocabularies; one model reads one, use "
                "the same for all"
            )
        if isinstance(self.rates, ProportionalRates):
            return
        if len(self.rates) != len(names) or min(self.rates) <= 0:
            raise ValueError(
                f"rates={self.rates} for the tasks {names}; use a number above 0 for each, in "
                "their order"
            )

    def probabilities(self, sizes: Sequence[int]) -> np.ndarray:
        """How likely the next example is of each task, in order; the sum is 1.

        Args:
            sizes: records in each task's training split.
        """
        is_fixed = not isinstance(self.rates, ProportionalRates)
        rates = np.array(self.rates if is_fixed else self.rates.of_sizes(sizes), float)
        return rates / rates.sum()


def as_mixture(source: Task | Mixture) -> Mixture:
    """A task as the mixture of itself alone."""
    return Mixture((source,)) if isinstance(source, Task) else source
