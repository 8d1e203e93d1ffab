# SPDX-License-Identifier: Apache-2.0
"""Streams: the examples of one row of the batch, drawn from the tasks, and packed into rows."""

from collections.abc import Iterator

import numpy as np

from switchx.data.features import Example
from switchx.data.packing import OPEN_ROWS, pack_rows
from switchx.data.readers import PairReader, TextReader
from switchx.data.stream_plan import DRAW, StreamPlan, cursor_dtype


class ExampleStream:
    """The examples of one row, with a look at the next one.

    Raises (when an example is drawn):
        ValueError: a whole corpus without a token, or without an example that fits.
    """

    def __init__(self, plan: StreamPlan, row: int, cursor: np.ndarray):
        self._plan = plan
        self._row = row
        self._next_cursor = cursor.copy()
        self._fields = self._next_cursor.view(cursor_dtype(len(plan.tasks)))[0]
        self._thresholds = np.cumsum(plan.probabilities)[:-1]
        self._readers = [
            (PairReader if task.chunk_length is None else TextReader)(plan, index, row)
            for index, task in enumerate(plan.tasks)
        ]
        self._is_peeked = False

    @property
    def cursor(self) -> np.ndarray:
        """Where the example that `take` gives begins."""
        return (self._peeked_cursor if self._is_peeked else self._next_cursor).copy()

    def peek(self) -> Example | None:
        """The next example, which stays; None after the last one."""
        if not self._is_peeked:
            self._peeked_cursor = self._next_cursor.copy()
            self._peeked = self._draw()
            self._is_peeked = True
        return self._peeked

    def take(self) -> Example | None:
        """The next example, which is used up; None after the last one."""
        example = self.peek()
        self._is_peeked = False
        return example

    def _draw(self) -> Example | None:
        # One generator an example: evaluation is deterministic and training can go on
        # from anywhere.
        rng = self._plan.generator(DRAW, self._row, int(self._fields["drawn"]))
        self._fields["drawn"] += 1
        task = int(np.searchsorted(self._thresholds, rng.random(), side="right"))
        return self._readers[task].read(self._fields["tasks"][task], rng)


class RowStream:
    """The rows that one row of the batch is filled with: lists of packed examples.

    Args:
        cursor: where to go on; `StreamPlan.new_cursor()` at first.
    """

    def __init__(self, plan: StreamPlan, row: int, is_packed: bool, cursor: np.ndarray):
        self._features = plan.features
        self._row = row
        self._is_packed = is_packed
        self._dtype = cursor_dtype(len(plan.tasks))
        self._start = cursor.copy()
        self._emitted, self._start[0] = int(cursor[0]), 0
        self._examples = ExampleStream(plan, row, self._start)
        self._window = None

    @property
    def cursor(self) -> np.ndarray:
        """Where the next row begins: its window's start and its place in it."""
        cursor = self._start.copy()
        cursor[0] = self._emitted
        return cursor

    def __iter__(self) -> Iterator[list[Example]]:
        return self

    def __next__(self) -> list[Example]:
        if self._window is None:  # also after a restart in the middle of one
            self._window = self._fill()
        if self._emitted == len(self._window):
            self._start, self._emitted = self._examples.cursor, 0
            self._window = self._fill()
        if not self._window:
            raise StopIteration
        self._emitted += 1
        return self._window[self._emitted - 1]

    def _fill(self) -> list[list[Example]]:
        if self._is_packed:
            # First windows of different sizes, so that not all rows of a batch are at the
            # end of one, where the work is, in the same step.
            is_first = self._start.view(self._dtype)["drawn"][0] == 0
            num_rows = 1 + self._row % OPEN_ROWS if is_first else OPEN_ROWS
            return pack_rows(self._examples, self._features, num_rows)
        example = self._examples.take()
        return [] if example is None else [[example]]
