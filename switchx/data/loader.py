# SPDX-License-Identifier: Apache-2.0
"""The loader: endless training batches, and evaluation batches; each process reads its part.

Training reads one stream per row (`streams.py`). Each batch comes with the cursors of its rows,
so the loader's state is that of the batch last handed out, however far it has read ahead.
"""

import dataclasses
import itertools
import logging
import textwrap
import weakref
from collections.abc import Iterable, Iterator, Sequence

import grain
import numpy as np
from absl import flags

from switchx.data.features import Batch, Features
from switchx.data.mixtures import Mixture, as_mixture
from switchx.data.streams import RowStream, StreamPlan
from switchx.data.tasks import OpenTask, Task, open_task
from switchx.fields import require, require_at_least

# Version of the cursors in a state; raise it whenever streams read differently.
STATE_VERSION = 1

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The shape of a batch.

    Attributes:
        batch_size: number of rows of the global batch, over all processes.
        features: layout of a row, for a model with or without an encoder.
        packed: whether a row has several examples; otherwise it has one.
    """

    features: Features
    batch_size: int
    packed: bool = True

    def __post_init__(self):
        require_at_least(self, 1, "batch_size")


@dataclasses.dataclass(frozen=True)
class Shard:
    """The rows of each global batch that a process reads: some of `count` equal parts.

    Processes that hold the same rows (model parallelism across hosts) read the same parts.

    Attributes:
        parts: indices of the parts, ascending.
        count: number of parts of a batch.
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
            ValueError: the batch does not divide into parts.
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


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Settings of batches that are made ahead of time; the batches do not depend on them.

    Attributes:
        num_batches: number of batches that a thread keeps ready; 0 makes each when it is
            needed.
        num_workers: number of processes among which the rows are divided; 0 for none. A program
            that uses them needs `if __name__ == "__main__":`.
    """

    num_batches: int = 2
    num_workers: int = 0

    def __post_init__(self):
        require_at_least(self, 0, "num_batches", "num_workers")


class TrainLoader:
    """Iterates endlessly over this process's part of the training batches.

    The global batch, which is the parts of all shards in order, is a function of the source,
    the batch config, the seed and the step; not of shards, prefetching or interruptions.

    Args:
        source: a task, or a mixture of several; their training splits are read.
        data_dir: folder of prepared corpora; see `Corpus.open`.

    Raises:
        ValueError: the batch size does not divide by the shards, the seed is below 0, or a
            task does not suit its corpus or the features (`open_task`).
    """

    def __init__(
        self,
        source: Task | Mixture,
        config: BatchConfig,
        *,
        seed: int,
        data_dir: str | None = None,
        shard: Shard = Shard(),
        prefetch: Prefetch = Prefetch(),
    ):
        require(seed >= 0, f"seed={seed}; use 0 or more")
        self._rows = shard.rows(config.batch_size)
        require(
            prefetch.num_workers <= len(self._rows),
            f"num_workers={prefetch.num_workers} for {len(self._rows)} rows of a process; use "
            f"{len(self._rows)} or fewer",
        )
        self._config = config
        self._prefetch = prefetch
        mixture = as_mixture(source)
        tasks = tuple(
            open_task(task, task.train_split, data_dir, config.features)
            for task in mixture.tasks
        )
        mixture.check_rows(config.batch_size)
        probabilities = mixture.probabilities([len(task.records) for task in tasks])
        common = probabilities, config.features, seed, config.batch_size
        self._plan = StreamPlan(tasks, *common, rows_of_tasks=mixture.rows)
        self._begin(0, np.tile(self._plan.new_cursor(), (len(self._rows), 1)))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch, [rows of this shard, length] each; see `features`.

        Raises:
            ValueError: the loader is closed, or what a stream raises (`ExampleStream`).
        """
        require(self._iterators, "the loader is closed; restore a state of it, or make another")
        batch, self._cursors = next(self._iterators[0])
        self._step += 1
        return batch

    def state(self) -> dict:
        """The position of the next batch; plain numbers, lists and strings (JSON)."""
        return {
            "pipeline": self._description(),
            "step": self._step,
            "rows": list(self._rows),
            "cursors": self._cursors.tolist(),
        }

    def restore(self, state: dict) -> None:
        """Continues where a state was taken: the next batch is the one that followed it then.

        Args:
            state: state of this shard, or `merge_states` of the states of all shards. The
                number of shards and prefetching may differ from what they were.

        Raises:
            ValueError: the state is from another source, batch config, seed or version,
                or does not hold this shard's rows.
        """
        _require_same(state["pipeline"], self._description())
        held = dict(zip(state["rows"], state["cursors"], strict=True))
        missing = [row for row in self._rows if row not in held]
        require(
            not missing,
            f"the loader's state holds the rows {_listed(held)} of each batch and not "
            f"{_listed(missing)}, which this process reads; pass merge_states of the states of "
            "all processes",
        )
        self.close()
        self._begin(state["step"], np.array([held[row] for row in self._rows], np.int64))

    def counts(self) -> dict[str, int]:
        """Examples this shard dropped and truncated so far: `task/dropped`, ..."""
        return self._plan.counts(self._cursors)

    def close(self) -> None:
        """Stops threads and worker processes; only `restore` starts them again."""
        self._stop()

    def _begin(self, step: int, cursors: np.ndarray) -> None:
        self._step, self._cursors = step, cursors
        dataset = RowBatches(self._plan, self._config.packed, self._rows, cursors)
        if num_workers := self._prefetch.num_workers:
            if not flags.FLAGS.is_parsed():  # Grain reads some of its own
                flags.FLAGS.mark_as_parsed()
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers))
            dataset = dataset.batch(num_workers, batch_fn=join_rows)
        dataset = grain.experimental.ThreadPrefetchIterDataset(
            dataset, prefetch_buffer_size=self._prefetch.num_batches
        )
        self._iterators = [iter(dataset)]
        # At program exit at the latest: Grain's own clean-up runs later, and would fail.
        self._stop = weakref.finalize(self, _stop, self._iterators)

    def _description(self) -> dict:
        plan, config = self._plan, self._config
        return (
            {
                "state_version": STATE_VERSION,
                "seed": plan.seed,
                "features": repr(config.features),
                "batch_size": config.batch_size,
                "packed": config.packed,
                "tasks": [opened.task.name for opened in plan.tasks],
                "probabilities": plan.probabilities.tolist(),
            }
            | ({} if plan.rows_of_tasks is None else {"rows_of_tasks": [*plan.rows_of_tasks]})
            | {
                f"{opened.task.name}.{key}": value
                for opened in plan.tasks
                for key, value in opened.description.items()
            }
        )


def _stop(iterators: list[grain.DatasetIterator]) -> None:
    iterators.pop().close()


def merge_states(states: Sequence[dict]) -> dict:
    """One loader state that holds all rows, from the states of all shards, in any order.

    Raises:
        ValueError: the states are of several steps or pipelines, or disagree about a row.
    """
    merged, held = states[0], {}
    for state in states:
        _require_same(merged["pipeline"], state["pipeline"])
        require(
            state["step"] == merged["step"],
            f"the states of the data iterators are of steps {merged['step']} and "
            f"{state['step']}; pass those of one checkpoint",
        )
        for row, cursor in zip(state["rows"], state["cursors"], strict=True):
            require(
                held.setdefault(row, cursor) == cursor,
                f"two states of data iterators disagree about where row {row} of a batch goes "
                "on; pass those of one checkpoint",
            )
    rows = sorted(held)
    return {
        "pipeline": merged["pipeline"],
        "step": merged["step"],
        "rows": rows,
        "cursors": [held[row] for row in rows],
    }


def evaluation_batches(
    task: Task | OpenTask,
    config: BatchConfig,
    *,
    data_dir: str | None = None,
    shard: Shard = Shard(),
    num_batches: int | None = None,
    task_id: int | None = None,
) -> Iterator[Batch]:
    """This process's part of the task's evaluation batches, the same each time.

    The split is read once, in its order; an example's random choices are fixed by its index.
    The last batch is filled up with padding, whose loss weights are 0. Each process goes
    through all rows and lays out its own: all see equally many batches.

    Args:
        task: a task, whose split is opened, or an `OpenTask` of its evaluation split.
        num_batches: maximum number of batches; None reads the whole split.
        task_id: number of the task in a mixture with `rows`, which the batches then contain.

    Raises:
        ValueError: as for `TrainLoader`, or no example of the split fits the features.
    """
    rows = shard.rows(config.batch_size)
    opened = task
    if isinstance(task, Task):
        opened = open_task(task, task.evaluation_split, data_dir, config.features)
    plan = StreamPlan((opened,), np.ones(1), config.features, seed=0, is_finite=True)
    stream = RowStream(plan, 0, config.packed, plan.new_cursor())

    def batches():
        num_made = 0
        while num_made != num_batches and (
            batch := list(itertools.islice(stream, config.batch_size))
        ):
            batch += [[]] * (config.batch_size - len(batch))
            ids = None if task_id is None else [task_id] * len(rows)
            laid_out = config.features.batch([batch[row] for row in rows], plan.start_id)
            yield with_task_ids(laid_out, ids)
            num_made += 1
        counts = plan.counts(stream.read_cursor)
        require(
            num_made > 0,
            f"task {opened.task.name!r}: split {opened.task.evaluation_split!r} has "
            f"{len(opened.records)} records and no example that fits {config.features} "
            f"({counts}); use longer features, or another split",
        )
        if any(counts.values()):
            _log.warning("evaluation left out or cut examples: %s", counts)

    return batches()


class RowBatches(grain.IterDataset):
    """Batches of some rows, each with the cursors of these rows after it."""

    def __init__(self, plan: StreamPlan, is_packed: bool, rows: Sequence[int], cursors):
        super().__init__()
        self._plan, self._is_packed = plan, is_packed
        self._rows = list(zip(rows, cursors, strict=True))

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Keeps the rows of worker `sl.start` of `sl.step`; called by `mp_prefetch`.

        Takes blocks of rows rather than every `sl.step`-th, so that the workers' parts in
        order are the batch.
        """
        num_rows = len(self._rows)
        start, stop = (num_rows * worker // sl.step for worker in (sl.start, sl.start + 1))
        self._rows = self._rows[start:stop]

    def __iter__(self) -> grain.DatasetIterator:
        streams = [RowStream(self._plan, row, self._is_packed, c) for row, c in self._rows]
        tasks = [self._plan.task_of(row) for row, _ in self._rows]
        ids = None if self._plan.rows_of_tasks is None else tasks
        return _RowBatchIterator(self._plan, streams, ids)


class _RowBatchIterator(grain.DatasetIterator):
    def __init__(self, plan: StreamPlan, streams: Sequence[RowStream], task_ids):
        super().__init__()
        self._features, self._start_id = plan.features, plan.start_id
        self._streams = streams
        self._task_ids = task_ids

    def __next__(self) -> tuple[Batch, np.ndarray]:
        rows = [next(stream) for stream in self._streams]
        batch = self._features.batch(rows, self._start_id)
        batch = with_task_ids(batch, self._task_ids)
        return batch, np.stack([stream.cursor for stream in self._streams])

    def get_state(self) -> dict:
        return {}  # the cursors are in the batch

    def set_state(self, state: dict) -> None:
        raise RuntimeError("the position is in the cursors beside each batch; restore those")


def with_task_ids(batch: Batch, task_ids: Sequence[int] | None) -> Batch:
    """The batch, with each row's task in `task_ids` `[B]` if that is known."""
    return batch if task_ids is None else batch | {"task_ids": np.array(task_ids, np.int32)}


def join_rows(parts: Sequence[tuple[Batch, np.ndarray]]) -> tuple[Batch, np.ndarray]:
    """One batch from the batches of the workers."""
    batches, cursors = zip(*parts, strict=True)

    # `asarray` detaches from the workers' shared memory: a batch is an ordinary array.
    def join(arrays):
        return np.concatenate([np.asarray(array) for array in arrays])

    return {name: join([b[name] for b in batches]) for name in batches[0]}, join(cursors)


def _listed(rows: Iterable[int]) -> str:
    return textwrap.shorten(", ".join(map(str, rows)), 80, placeholder=" ...")


def _require_same(taken: dict, here: dict) -> None:
    names = [name for name in {**here, **taken} if taken.get(name) != here.get(name)]
    each = [f"{name}: {taken.get(name)!r} there, {here.get(name)!r} here" for name in names]
    ways = "use the settings it was taken with"
    if any(name.endswith("corpus") for name in names):
        ways = "restore the files that were read, which the run's corpora.json counts"
    require(
        not names,
        f"the loader's state was taken from another pipeline ({'; '.join(each)}); {ways}, or "
        "begin the data anew: a new model_dir, with INIT_FROM",
    )
