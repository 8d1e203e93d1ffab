# SPDX-License-Identifier: Apache-2.0
"""A store's records in host memory: `Cache` decides, `RecordStore` reads and writes.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.2: experts in use are taken from host
memory if they are there, otherwise from the disk; a changed one is written before it is
dropped. It is for one thread; the store's threads do the waiting.
"""

import collections
import concurrent.futures
from collections.abc import Sequence

import numpy as np

from switchx.storage.cache import Cache, Moment
from switchx.storage.record import Record
from switchx.storage.store import NUM_THREADS, RecordStore


class CachedStore:
    """A cache in host memory of a store's records.

    Records being written back stay in memory until they are on the disk; there are no more of
    these than the store has threads.
    """

    def __init__(self, store: RecordStore, cache: Cache):
        self.store = store
        self.cache = cache
        self._records: dict[int, concurrent.futures.Future] = {}
        self._write_backs: collections.deque[concurrent.futures.Future] = collections.deque()

    def request(self, keys: Sequence[int] | np.ndarray, moment: Moment) -> None:
        """Begins to read the records that are not resident, and returns at once.

        A record whose read failed is read again.

        Raises:
            ValueError: see `Cache.request`.
            StoreError: a record evicted to make room could not be written.
        """
        admission = self.cache.request(keys, moment)
        changed = set(admission.written_back.tolist())
        for key in admission.evicted.tolist():
            record = self._records.pop(key)
            if key in changed:
                self._write_back(key, record.result())
        for key in np.asarray(keys).tolist():
            if key not in self._records or _has_failed(self._records[key]):
                self._records[key] = self.store.read(key)

    def __contains__(self, key: int) -> bool:
        """Whether a record is in memory, or is being read."""
        return key in self._records

    def is_here(self, key: int) -> bool:
        """Whether a requested record has been read, so that `get` does not wait or raise."""
        future = self._records[key]
        return future.done() and not _has_failed(future)

    def get(self, key: int) -> Record:
        """Returns a requested record as soon as it has been read.

        Raises:
            KeyError: the record is not resident.
            RecordError, StoreError: see `RecordStore.read`.
        """
        return self._records[key].result()

    def put(self, key: int, record: Record) -> None:
        """Changes a resident record; the disk gets it when it is evicted or flushed.

        Raises:
            ValueError: the record is not resident.
        """
        self.cache.mark_dirty([key])
        self.replace(key, record)

    def replace(self, key: int, record: Record) -> None:
        """Replaces a resident record by one that can be remade from the disk's at any time."""
        self._records[key] = concurrent.futures.Future()
        self._records[key].set_result(record)

    def flush(self) -> None:
        """Writes all changed records, as before a snapshot; they stay in memory.

        Raises:
            StoreError: a record could not be written.
        """
        for key in self.cache.dirty.tolist():
            self._write_back(key, self.get(key))
        while self._write_backs:
            self._write_backs.popleft().result()
        self.cache.mark_clean(self.cache.dirty)

    def _write_back(self, key: int, record: Record) -> None:
        if len(self._write_backs) == NUM_THREADS:
            self._write_backs.popleft().result()
        self._write_backs.append(self.store.write(key, record))


def _has_failed(future: concurrent.futures.Future) -> bool:
    return future.done() and future.exception() is not None
