# SPDX-License-Identifier: Apache-2.0
"""Where experts are before they come to the device: all in host memory, or read from a disk.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 3.2, Figure 5, loads all experts from files
on an SSD into host memory, and from there to the device. Where host memory has no room for all,
`StoredExperts` reads those that are chosen, one by one, and `storage.Cache` decides which stay.
Files are an artifact's weights, of which an expert is a slice, or the records of a checkpoint
of training with experts on a disk.
"""

import concurrent.futures
import dataclasses
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from switchx import tree
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.storage import PolicyName
from switchx.storage.cache import Cache, Moment, make_policy
from switchx.storage.cached_store import CachedStore
from switchx.storage.record import Record, RecordError
from switchx.storage.snapshot import Snapshot

NUM_THREADS = 4
# Of one expert `[1, ...]` or of all of a layer `[E, ...]`, by name: w_in_EDF, ...
Weights = dict[str, Any]
# (layer, number of the expert) -> its weights; called by several threads.
ReadExpert = Callable[[int, int], Weights]


class ExpertSource(Protocol):
    """A source of experts that are not on the device.

    Attributes:
        expert_bytes: bytes of one expert.
        like: shape structs of one expert's arrays.
        stored: traffic of experts that are read from files; None where all are in host memory.
    """

    expert_bytes: int
    like: Weights
    stored: "StoredTraffic | None"

    def request(self, layer: int, experts: np.ndarray, moment: Moment) -> None:
        """Says which experts of a layer are needed soon; returns before they are there."""

    def is_here(self, layer: int, expert: int) -> bool:
        """Whether `expert` would return a requested expert without waiting, or raise."""

    def expert(self, layer: int, expert: int) -> Weights:
        """A requested expert."""


@dataclasses.dataclass(frozen=True)
class StoredTraffic:
    """Counts of what the cache in host memory has done so far.

    Attributes:
        host_bytes: bytes of the experts that the cache has room for.
        requested, hits: experts that were not on the device, and how many were in the cache.
        read_bytes: bytes read from files.
    """

    host_bytes: int
    requested: int
    hits: int
    read_bytes: int

    def __str__(self) -> str:
        mib = 2**20
        rate = self.hits / self.requested if self.requested else 0.0
        return (
            f"{self.host_bytes / mib:,.2f} MiB of experts in host memory: {rate:.1%} of "
            f"{self.requested:,} hits, {self.read_bytes / mib:,.2f} MiB read"
        )


class HostExperts:
    """All experts in host memory; see `ExpertSource`."""

    stored = None

    def __init__(self, layers: Sequence[Weights]):
        """Takes the experts of each Switch layer, NumPy arrays that do not change."""
        self._layers = layers
        self.like = _shapes(self.expert(0, 0))
        self.expert_bytes = tree.num_bytes(self.like)

    def request(self, layer: int, experts: np.ndarray, moment: Moment) -> None:
        pass

    def is_here(self, layer: int, expert: int) -> bool:
        return True

    def expert(self, layer: int, expert: int) -> Weights:
        return slice_of(self._layers[layer], expert)


class StoredExperts:
    """Experts in files, of which host memory has some; see `ExpertSource`."""

    def __init__(
        self,
        config: ModelConfig,
        read: ReadExpert,
        host_bytes: int,
        slots: int,
        policy: PolicyName,
    ):
        """Reads one expert, to know its size.

        Args:
            host_bytes: most bytes of experts that stay in host memory.
            slots: slots of a layer on the device, the number of experts that are needed at
                once.

        Raises:
            ValueError: `host_bytes` has no room for as many experts as there are slots.
        """
        num_layers, E = len(config.sparse_layer_names), config.switch.num_experts
        self._num_experts = E
        self.like = _shapes(read(0, 0))
        self.expert_bytes = size = tree.num_bytes(self.like)
        capacity = min(host_bytes // size, num_layers * E)
        require(
            capacity >= slots,
            f"host_bytes={host_bytes:,} holds {capacity} experts of {size:,} bytes, but "
            f"expert_slots={slots} of one layer are needed at once; use host_bytes of at least "
            f"{slots * size:,}, or fewer expert_slots",
        )
        self._cache = Cache(capacity, make_policy(policy, num_layers, E, sweeps=1))
        self._cached = CachedStore(_Reader(read, E), self._cache)

    @property
    def stored(self) -> StoredTraffic:
        cache, size = self._cache, self.expert_bytes
        misses = cache.num_requested - cache.num_hits
        return StoredTraffic(
            cache.capacity * size, cache.num_requested, cache.num_hits, misses * size
        )

    def request(self, layer: int, experts: np.ndarray, moment: Moment) -> None:
        self._cached.request(layer * self._num_experts + np.asarray(experts), moment)

    def is_here(self, layer: int, expert: int) -> bool:
        return self._cached.is_here(layer * self._num_experts + expert)

    def expert(self, layer: int, expert: int) -> Weights:
        return self._cached.get(layer * self._num_experts + expert)


class _Reader:
    """The part of a `RecordStore` that `CachedStore` reads: futures by key."""

    def __init__(self, read: ReadExpert, num_experts: int):
        self._read, self._num_experts = read, num_experts
        self._executor = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "experts")

    def read(self, key: int) -> concurrent.futures.Future:
        return self._executor.submit(self._read, *divmod(key, self._num_experts))


def slice_of(weights: Weights, expert: int) -> Weights:
    """One expert of a layer's arrays, `[1, ...]`: parts of them, or read from their file."""
    return jax.tree.map(lambda x: x[expert : expert + 1], weights)


def _shapes(weights: Weights) -> Weights:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)


# Files.


class OpenFile:
    """A file that stays as it was opened when its path is replaced or removed.

    It is closed when nothing refers to it any more. Any thread may read it.
    """

    def __init__(self, path: pathlib.Path):
        """Raises OSError: it cannot be opened."""
        self.path, self._descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A copy of an array whose first byte is at `offset`.

        Raises:
            ValueError: the file ends before it.
        """
        data = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        done = 0
        while more := os.preadv(self._descriptor, [data[done:]], offset + done):
            done += more
        require(
            done == data.size,
            f"{self.path} was cut off while it was read: it has {done:,} bytes at {offset:,}, "
            f"not {data.size:,}",
        )
        return data.view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class FileArray:
    """An array in a file; slices along its first dimension are read.

    Attributes:
        offset: byte offset of its first element in the file.
    """

    file: OpenFile
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """A copy of some rows.

        Raises:
            ValueError: the file ends before them.
        """
        first, end, step = rows.indices(self.shape[0])
        require(step == 1, f"rows {rows} with steps; read neighbours")
        row, shape = math.prod(self.shape[1:]), (max(0, end - first), *self.shape[1:])
        return self.file.array(
            self.offset + first * row * self.dtype.itemsize, shape, self.dtype
        )


def expert_of_snapshot(folder: pathlib.Path, config: ModelConfig) -> ReadExpert:
    """Returns the reader of a checkpoint's experts; each record is compared with its checksum.

    Raises:
        ValueError: the records are of another model; a record that is read is damaged, or of
            another update than the first one.
    """
    snapshot = Snapshot(folder)
    E, layers = config.switch.num_experts, list(snapshot.layout.layers)
    require(
        (layers, snapshot.layout.num_experts) == (config.sparse_layer_names, E),
        f"{folder} has records of {snapshot.layout.num_experts} experts in "
        f"{', '.join(layers)}; the model has {E} in {', '.join(config.sparse_layer_names)}",
    )
    updates = snapshot.read(0).updates

    def read(layer: int, expert: int) -> Weights:
        if not folder.is_dir():
            raise RecordError(
                f"{folder} was removed after it was loaded, as a run that trains removes old "
                "checkpoints; load the model again, or load an artifact or a copy, which stay"
            )
        record = snapshot.read(layer * E + expert)
        if record.updates != updates:
            name = snapshot.layout.name(layer * E + expert)
            raise RecordError(
                f"record {folder / name} has had {record.updates} updates, others {updates}; "
                "use an older checkpoint"
            )
        return _weights_of(record)

    return read


def _weights_of(record: Record) -> Weights:
    """Copies: a view would keep the optimizer's statistics in memory, too."""
    return {
        name.rpartition("/")[2]: np.array(array)[None]
        for name, array in record.arrays.items()
        if name.startswith("params/")
    }
