# SPDX-License-Identifier: Apache-2.0
"""Streams: what each row of the batch reads, from shuffled records to packed rows.

Each of the B rows of a global batch is a stream of its own: row b reads the records b, b + B,
b + 2B, ... of the shuffled corpus, epoch after epoch. So the rows, and with them the global
batch, are the same however many processes share them, and the position of a stream is a
handful of counters, its cursor. Text has several streams per row, `LANES`, of which each
example draws one: documents are longer than a chunk, and this mixes them as T5's shuffle
buffer does.

Packing is first fit over a few open rows, like Grain's; here the only state that it needs is
the position of the stream of examples when a window of rows began.

Dims: L length of a text in tokens
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from switchx.data.features import Example, Features
from switchx.data.packing import OPEN_ROWS, fits, pack_rows
from switchx.data.tasks import OpenTask

LANES = 8
# Consecutive records that may give no example before it is an error (at most 100 epochs).
_MOST_SKIPPED = 100_000
# Fewer records are permuted in memory; Grain's cipher works on blocks of 16 bits and would
# take 65536 / n rounds to find an index below n.
_FEW = 65_536
# Epochs whose orders are kept: rows that share records are in several epochs at a time.
_EPOCHS = 8

# Purposes of the random generators; a part of their seed.
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
    """The settings that the streams of all rows have in common.

    Attributes:
        probabilities: probability of each task.
        num_rows: B, the number of rows of the global batch.
        is_finite: whether the stream ends, for evaluation: it has the records once and in
            order, in one lane and a single row.
        rows_of_tasks: number of rows of each task, one task's rows after another's; None
            if all rows draw from all tasks.
    """

    tasks: tuple[OpenTask, ...]
    probabilities: np.ndarray
    features: Features
    seed: int
    num_rows: int = 1
    is_finite: bool = False
    rows_of_tasks: tuple[int, ...] | None = None

    def task_of(self, row: int) -> int | None:
        """The only task of a row; None if it draws from all."""
        if self.rows_of_tasks is None:
            return None
        return int(np.searchsorted(np.cumsum(self.rows_of_tasks), row, side="right"))

    def place_in_task(self, index: int, row: int) -> tuple[int, int]:
        """A row's place among those that read a task, and how many these are."""
        if self.rows_of_tasks is None:
            return row, self.num_rows
        return row - sum(self.rows_of_tasks[:index]), self.rows_of_tasks[index]

    @property
    def num_lanes(self) -> int:
        return 1 if self.is_finite else LANES

    @property
    def start_id(self) -> int | None:
        """The id that a decoder reads before a text; all tasks have one vocabulary."""
        return self.tasks[0].task.vocabulary.start_id

    def new_cursor(self) -> np.ndarray:
        """The cursor at which every row starts; int64, one-dimensional."""
        return np.zeros(1, cursor_dtype(len(self.tasks))).view(np.int64)

    def generator(self, *position: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *position))

    @functools.cached_property
    def order(self) -> tuple[Sequence[int], ...]:
        """Indices of each task's records in reading order: endless in training."""
        numbers = [range(len(task.records)) for task in self.tasks]
        if self.is_finite:
            return tuple(numbers)
        return tuple(
            Shuffled(each, (self.seed, SHUFFLE, index)) for index, each in enumerate(numbers)
        )

    def counts(self, cursors: np.ndarray) -> dict[str, int]:
        """Examples dropped and truncated before the cursors, together: `task/dropped`, ...

        Args:
            cursors: cursors along the last dimension; any dimensions before it.
        """
        tasks = cursors.view(cursor_dtype(len(self.tasks)))["tasks"]
        return {
            f"{task.task.name}/{what}": int(tasks[what][..., index].sum())
            for index, task in enumerate(self.tasks)
            for what in ("dropped", "truncated")
        }


class Shuffled:
    """An endless sequence of records, each once per epoch, every epoch in another order.

    `[i]` can be computed without the entries before it.

    Args:
        seed: integers of at least 0, any number of them.
    """

    def __init__(self, records: Sequence[Any], seed: Sequence[int]):
        self._records = records
        self._seed = tuple(seed)
        self._orders: dict[int, np.ndarray | int] = {}

    def __getitem__(self, index: int) -> Any:
        size = len(self._records)
        epoch, position = divmod(index, size)
        if (order := self._orders.get(epoch)) is None:
            if len(self._orders) == _EPOCHS:
                del self._orders[next(iter(self._orders))]
            order = self._orders[epoch] = self._order(epoch)
        if size < _FEW:
            return self._records[int(order[position])]
        return self._records[_permuted(position, size, order)]

    def _order(self, epoch: int) -> np.ndarray | int:
        """The permutation of an epoch, or for many records the seed of Grain's permutation."""
        rng, size = np.random.default_rng((*self._seed, epoch)), len(self._records)
        return rng.permutation(size) if size < _FEW else int(rng.integers(2**32))


def _permuted(index: int, size: int, seed: int) -> int:
    """The image of `index` under a permutation of [0, size) that `seed` names."""
    # Grain 0.2.18 takes one bit too few if the last index is a power of four (65,537 records):
    # it gives one index twice and never the last. In that case one more index is permuted, and
    # the one that is too large is followed along its cycle.
    last = size - 1
    is_power_of_four = last & (last - 1) == 0 and last.bit_length() % 2 == 1
    while True:
        index = grain.experimental.index_shuffle(
            index, max_index=last + is_power_of_four, seed=seed, rounds=4
        )
        if index < size:
            return index


class RowStream:
    """The rows that one row of the batch is filled with: lists of packed examples.

    Args:
        cursor: position of the first record; `StreamPlan.new_cursor()` at first.
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
        """The cursor of the next row: the start of its window and its place in the window."""
        cursor = self._start.copy()
        cursor[0] = self._emitted
        return cursor

    @property
    def read_cursor(self) -> np.ndarray:
        """The cursor after all that was read, including what was read for later rows."""
        return self._examples.cursor

    def __iter__(self) -> Iterator[list[Example]]:
        return self

    def __next__(self) -> list[Example]:
        if self._window is None:  # also after a restart in the middle of a window
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
            # First windows differ in size, so that not all rows of a batch reach the end of
            # a window, where the work is, in the same step.
            is_first = self._start.view(self._dtype)["drawn"][0] == 0
            num_rows = 1 + self._row % OPEN_ROWS if is_first else OPEN_ROWS
            return pack_rows(self._examples, self._features, num_rows)
        example = self._examples.take()
        return [] if example is None else [[example]]


class ExampleStream:
    """The examples of one row, with a look at the next one.

    Raises (when an example is drawn):
        ValueError: a whole corpus has no token, or no example that fits.
    """

    def __init__(self, plan: StreamPlan, row: int, cursor: np.ndarray):
        self._plan = plan
        self._row = row
        self._next_cursor = cursor.copy()
        self._fields = self._next_cursor.view(cursor_dtype(len(plan.tasks)))[0]
        self._thresholds = np.cumsum(plan.probabilities)[:-1]
        self._readers = [
            (_RecordReader if task.chunk_length is None else _TextReader)(plan, index, row)
            for index, task in enumerate(plan.tasks)
        ]
        self._is_peeked = False

    @property
    def cursor(self) -> np.ndarray:
        """The cursor of the example that `take` returns; after the last one, the end's cursor,
        which counts what was left out before it."""
        is_waiting = self._is_peeked and self._peeked is not None
        return (self._peeked_cursor if is_waiting else self._next_cursor).copy()

    def peek(self) -> Example | None:
        """The next example, without taking it; None after the last one."""
        if not self._is_peeked:
            self._peeked_cursor = self._next_cursor.copy()
            self._peeked = self._draw()
            self._is_peeked = True
        return self._peeked

    def take(self) -> Example | None:
        """The next example, removed from the stream; None after the last one."""
        example = self.peek()
        self._is_peeked = False
        return example

    def _draw(self) -> Example | None:
        # One generator per example: evaluation is deterministic, and training can go on
        # from anywhere.
        rng = self._plan.generator(DRAW, self._row, int(self._fields["drawn"]))
        self._fields["drawn"] += 1
        task = self._plan.task_of(self._row)
        if task is None:
            task = int(np.searchsorted(self._thresholds, rng.random(), side="right"))
        example = self._readers[task].read(self._fields["tasks"][task], rng)
        choice = self._plan.tasks[task].task.objective.is_prefix_bidirectional
        return example and example._replace(is_prefix_bidirectional=choice)


class _Reader(abc.ABC):
    """The examples of one task, as one row reads them."""

    def __init__(self, plan: StreamPlan, index: int, row: int):
        self._plan, self._index = plan, index
        self._row, self._num_rows = plan.place_in_task(index, row)
        self._open, self._order = plan.tasks[index], plan.order[index]
        self._task = self._open.task
        self._most_skipped = min(_MOST_SKIPPED, 100 * len(self._open.records))

    @abc.abstractmethod
    def read(self, cursor, rng: np.random.Generator) -> Example | None:
        """The next example; advances the task's part of the cursor. None at the end."""

    def _is_at_end(self, number: int) -> bool:
        return self._plan.is_finite and number >= len(self._open.records)


class _TextReader(_Reader):
    """Chunks of a task's documents, tokenized and joined."""

    def __init__(self, plan: StreamPlan, index: int, row: int):
        super().__init__(plan, index, row)
        self._tokens = {}  # lane -> (number of the document, its tokens)

    def read(self, cursor, rng: np.random.Generator) -> Example | None:
        objective = self._task.objective
        chunk_L = self._chunk(cursor, int(rng.integers(self._plan.num_lanes)))
        # At the end of a finite stream, less than an example may be left.
        if len(chunk_L) < objective.min_tokens:
            return None
        return objective.example(chunk_L, self._task.vocabulary, self._plan.features, rng)

    def _chunk(self, cursor, lane: int) -> np.ndarray:
        document, offset = cursor["document"], cursor["offset"]
        parts, missing, num_empty = [], self._open.chunk_length, 0
        while missing and not self._is_at_end(document[lane]):
            tokens_L = self._document(lane, int(document[lane]))
            parts.append(tokens_L[offset[lane] : offset[lane] + missing])
            missing -= len(parts[-1])
            offset[lane] += len(parts[-1])
            if offset[lane] == len(tokens_L):
                document[lane] += 1
                offset[lane] = 0
            num_empty = 0 if len(tokens_L) else num_empty + 1
            if num_empty > self._most_skipped:
                raise ValueError(
                    f"task {self._task.name!r}: {num_empty} documents in a row have no text; "
                    "use another corpus"
                )
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _document(self, lane: int, number: int) -> np.ndarray:
        if self._tokens.get(lane, (None,))[0] != number:
            self._tokens[lane] = (number, self._tokenize(lane, number))
        return self._tokens[lane][1]

    def _tokenize(self, lane: int, number: int) -> np.ndarray:
        plan, task = self._plan, self._task
        stream = self._row * plan.num_lanes + lane
        record = self._order[stream + number * self._num_rows * plan.num_lanes]
        tokens_L = self._open.tokens[record]
        if len(tokens_L) and task.objective.joins_with_eos:
            tokens_L = np.append(tokens_L, np.int32(task.vocabulary.eos_id))
        # Streams begin somewhere in their first document. With fewer documents than
        # streams, many would otherwise read the same text at the same time.
        if len(tokens_L) and number == 0 and not plan.is_finite:
            rng = plan.generator(START, self._index, stream)
            tokens_L = tokens_L[rng.integers(len(tokens_L)) :]
        return tokens_L


class _RecordReader(_Reader):
    """Records that are examples already; too long ones are treated as the task says."""

    def read(self, cursor, rng: np.random.Generator) -> Example | None:
        task, features = self._task, self._plan.features
        for _ in range(self._most_skipped):
            number = int(cursor["document"][0])
            if self._is_at_end(number):
                return None
            record = self._order[self._row + number * self._num_rows]
            cursor["document"][0] += 1
            example = self._open.tokens[record]
            size = features.size(example)
            if fits(size, features.capacity):
                return example
            if task.too_long == "truncate":
                cursor["truncated"] += 1
                return features.truncate(example, task.vocabulary.eos_id)
            if task.too_long == "error":
                text = str(self._open.records[record])[:200]
                raise ValueError(
                    f"task {task.name!r}: an example of {size} tokens, a row holds "
                    f"{features.capacity}: {text}; use longer features, or "
                    "too_long='truncate' or 'drop' for the task"
                )
            cursor["dropped"] += 1
        raise ValueError(
            f"task {task.name!r}: {self._most_skipped} examples in a row are too long for a "
            f"row of {features.capacity} tokens; use longer features, or too_long='truncate'"
        )
