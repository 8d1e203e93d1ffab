# SPDX-License-Identifier: Apache-2.0
"""Batches: how many rows, which of them a process reads, and Grain's datasets of them."""

import dataclasses
from collections.abc import Sequence

import grain
import numpy as np

from switchx.data.features import Batch, Features
from switchx.data.streams import RowStream, StreamPlan
from switchx.fields import require, require_at_least


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """What a batch is.

    Attributes:
        batch_size: rows of the global batch, over all processes.
        packed: several examples a row; otherwise one.
    """

    features: Features
    batch_size: int
    packed: bool = True

    def __post_init__(self):
        require_at_least(self, 1, "batch_size")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which rows of each global batch a process reads: some of `count` equal parts.

    Processes that hold the same rows (model parallelism across hosts) read the same parts.

    Attributes:
        parts: their indices, ascending.
        count: parts of a batch.
    """

    parts: tuple[int, ...] = (0,)
    count: int = 1

    def __post_init__(self):
        ascending = sorted(set(self.parts) & set(range(self.count)))
        require(
            self.parts and list(self.parts) == ascending,
            f"parts {', '.join(map(str, self.parts)) or 'none'} of {self.count}; use some of 0 "
            "to count - 1, ascending",
        )

    def rows(self, batch_size: int) -> tuple[int, ...]:
        """The rows of the global batch that are this shard's, ascending.

        Raises:
            ValueError: the batch does not divide.
        """
        size, rest = divmod(batch_size, self.count)
        if rest:
            sizes = sorted({max(size, 1) * self.count, (size + 1) * self.count})
            raise ValueError(
                f"batch_size={batch_size} is not divisible by the {self.count} parts that "
                f"processes share; use batch_size={' or '.join(map(str, sizes))}, or a mesh "
                f"whose parts divide {batch_size}"
            )
        return tuple(part * size + row for part in self.parts for row in range(size))


class RowBatches(grain.IterDataset):
    """Batches of some rows, each with the cursors of these rows after it."""

    def __init__(self, plan: StreamPlan, is_packed: bool, rows: Sequence[int], cursors):
        super().__init__()
        self._plan = plan
        self._is_packed = is_packed
        self._rows = list(zip(rows, cursors, strict=True))

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Leaves the rows of worker `sl.start` out of `sl.step`; called by `mp_prefetch`.

        Blocks of rows rather than every `sl.step`-th, so that workers' parts one after
        another are the batch.
        """
        del sequential_slice
        num_rows = len(self._rows)
        start, stop = (num_rows * worker // sl.step for worker in (sl.start, sl.start + 1))
        self._rows = self._rows[start:stop]

    def __iter__(self) -> grain.DatasetIterator:
        streams = [RowStream(self._plan, row, self._is_packed, c) for row, c in self._rows]
        return _RowBatchIterator(self._plan.features, streams)


class _RowBatchIterator(grain.DatasetIterator):
    def __init__(self, features: Features, streams: Sequence[RowStream]):
        super().__init__()
        self._features = features
        self._streams = streams

    def __next__(self) -> tuple[Batch, np.ndarray]:
        batch = self._features.batch([next(stream) for stream in self._streams])
        return batch, np.stack([stream.cursor for stream in self._streams])

    def get_state(self) -> dict:
        return {}  # the cursors are in the batch

    def set_state(self, state: dict) -> None:
        raise RuntimeError("the position is in the cursors beside each batch; restore those")


def join_rows(parts: Sequence[tuple[Batch, np.ndarray]]) -> tuple[Batch, np.ndarray]:
    """One batch from those of the workers."""
    batches, cursors = zip(*parts, strict=True)

    # `asarray` leaves the workers' shared memory: a batch is an ordinary array.
    def join(arrays):
        return np.concatenate([np.asarray(array) for array in arrays])

    return {name: join([b[name] for b in batches]) for name in batches[0]}, join(cursors)
