# SPDX-License-Identifier: Apache-2.0
"""A number that a paper prints, and what the planner says instead."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        paper: `PPMoE` or `SE-MoE`.
        cell: table, row and column.
        published: as the paper prints it; what it prints wrongly is in `note`.
        predicted: None where a cost model cannot say it.
        note: why it cannot, or what is a misprint or an assumption.
    """

    paper: str
    cell: str
    published: float
    predicted: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what is published."""
        return None if self.predicted is None else self.predicted / self.published - 1

    def row(self) -> dict[str, Any]:
        """As one object of a report."""
        return {
            "paper": self.paper,
            "cell": self.cell,
            "published": self.published,
            "predicted": self.predicted,
            "relative_error": self.error,
            "note": self.note,
        }
