# SPDX-License-Identifier: Apache-2.0
"""The plan of the streams: what all rows of the batch have in common, and their cursors.

Each of the B rows of a global batch is a stream of its own: row b reads the records b,
b + B, b + 2B, ... of the shuffled corpus, epoch after epoch. So the rows, and with them
the global batch, are the same however many processes share them out, and where a stream
stands is known from a handful of counters, its cursor.

Text has several streams a row, `LANES`, of which each example draws one: documents are
longer than a chunk, and this mixes them as T5's shuffle buffer does.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from switchx.data.features import Features
from switchx.data.shuffle import Shuffled
from switchx.data.tasks import OpenTask

LANES = 8
# Records in a row that give no example before that is an error, at most (100 epochs).
_PATIENCE = 100_000

# What the random generators are for; a part of their seed.
DRAW, START, SHUFFLE = range(3)


def cursor_dtype(num_tasks: int) -> np.dtype:
    """Fields of a cursor; all are int64, so that it can also be read as a plain vector.

    `emitted`: rows already handed out of the window of rows that starts here; `drawn`:
    examples drawn before it; for each task examples `dropped` and `truncated`, and for
    each lane the number of its next `document` and the `offset` in it, in tokens. Records
    that are examples already have one lane, the first.
    """
    int64 = np.int64
    lane = [("document", int64, LANES), ("offset", int64, LANES)]
    task = np.dtype([("dropped", int64), ("truncated", int64), *lane])
    return np.dtype([("emitted", int64), ("drawn", int64), ("tasks", task, (num_tasks,))])


@dataclasses.dataclass(frozen=True)
class StreamPlan:
    """What the streams of all rows have in common.

    Attributes:
        probabilities: of each task.
        num_rows: B, rows of the global batch.
        is_finite: evaluation: the records once and in order, one lane, in a single row.
    """

    tasks: tuple[OpenTask, ...]
    probabilities: np.ndarray
    features: Features
    seed: int
    num_rows: int = 1
    is_finite: bool = False

    @property
    def num_lanes(self) -> int:
        return 1 if self.is_finite else LANES

    def new_cursor(self) -> np.ndarray:
        """Where every row starts; int64, one-dimensional."""
        return np.zeros(1, cursor_dtype(len(self.tasks))).view(np.int64)

    def generator(self, *position: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *position))

    @functools.cached_property
    def records(self) -> tuple[Sequence, ...]:
        """Each task's records in the order they are read: without end in training."""
        if self.is_finite:
            return tuple(task.records for task in self.tasks)
        return tuple(
            Shuffled(task.records, (self.seed, SHUFFLE, index))
            for index, task in enumerate(self.tasks)
        )

    def patience(self, index: int) -> int:
        """Records of a task that may give no example, one after another."""
        return min(_PATIENCE, 100 * len(self.tasks[index].records))

    def counts(self, cursors: np.ndarray) -> dict[str, int]:
        """Examples dropped and truncated before the cursors, together: `task/dropped`, ...

        Args:
            cursors: one in the last dimension; any before it.
        """
        tasks = cursors.view(cursor_dtype(len(self.tasks)))["tasks"]
        return {
            f"{task.task.name}/{what}": int(tasks[what][..., index].sum())
            for index, task in enumerate(self.tasks)
            for what in ("dropped", "truncated")
        }
