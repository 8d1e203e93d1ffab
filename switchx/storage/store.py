# SPDX-License-Identifier: Apache-2.0
"""Experts on a disk: one file per record, written and read in the background; snapshots.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.1. A file is never changed in place:
tensorstore writes a new one, flushes it and renames it over the old one. A hard link preserves
a record, and a snapshot has a link to each of them (snapshot.py); its manifest has the CRC-32
that each record was written with, so that nothing is read again.

The store's own contents are scratch: a process that was killed leaves records of different
updates. A run resumes from a snapshot, so a store is opened empty.

    FOLDER/store.lock                      held by the one process that has it open
    FOLDER/records/encoder_1/00012         a record, see record.py
    FOLDER/process_3                       the store of process 3, where several train a model
"""

import concurrent.futures
import errno
import fcntl
import functools
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from typing import Any

import tensorstore

from switchx.fields import require
from switchx.object_store import absolute
from switchx.storage.record import (
    Record,
    RecordError,
    StoreError,
    StoreLayout,
    decode,
    encode,
    file_crc32,
    require_types,
)
from switchx.storage.snapshot import (
    Transfer,
    read_snapshot,
    transfer_records,
    write_snapshot,
)

NUM_THREADS = 4
_PROCESS = re.compile(r"process_\d+")


class RecordStore:
    """Records by key; reads and writes are futures, in order of their calls for each key.

    A failed write ends the store: every later call raises the same error.

    Attributes:
        bytes_read, bytes_written: bytes of records read and written since the store was opened.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        layout: StoreLayout,
        keys: Iterable[int] | None = None,
        num_threads: int = NUM_THREADS,
    ):
        """Opens a store without records; whatever an earlier process left there is deleted.

        Args:
            keys: keys of the records that this process stores; None means all.
            num_threads: number of threads that encode and decode records.

        Raises:
            ValueError: another process has it open, or the folder is not a store's.
        """
        self.layout = layout
        self.bytes_read = self.bytes_written = 0
        self._keys = list(range(layout.num_keys)) if keys is None else list(keys)
        self._root = absolute(folder)
        self._records = self._root / "records"
        self._lock_file = _locked(self._root)
        # Bytes and CRC-32 of each record's file, as last written.
        self._written: dict[int, tuple[int, int]] = {}
        self._failure: BaseException | None = None
        # The latest unfinished read or write of each key.
        self._latest: dict[int, concurrent.futures.Future] = {}
        self._lock = threading.Lock()
        self._executor = concurrent.futures.ThreadPoolExecutor(num_threads, "records")
        self._start_empty()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def read(self, key: int) -> concurrent.futures.Future:
        """Reads the Record of a key, after all its writes that were called before.

        The future raises RecordError where the file is missing, damaged, of another version,
        expert or model, or not what was last written.
        """
        return self._submit(key, functools.partial(self._read, key))

    def write(self, key: int, record: Record) -> concurrent.futures.Future:
        """Replaces the record of a key; its arrays must not change until the future is done.

        The future raises StoreError where it could not be written.

        Raises:
            RecordError: the record does not have the layout's arrays.
        """
        try:
            require_types(record, self.layout.types(key))
        except RecordError as error:
            raise RecordError(f"record {self.layout.name(key)}: {error}") from None
        return self._submit(key, functools.partial(self._write, key, record))

    def drain(self) -> None:
        """Waits until all reads and writes called so far are done.

        Raises:
            StoreError: a write failed, now or earlier.
        """
        with self._lock:
            pending = list(self._latest.values())
        concurrent.futures.wait(pending)
        self._require_working()

    def snapshot(
        self, folder: str | os.PathLike, keys: Iterable[int] | None = None
    ) -> Transfer:
        """Saves records as they are now in a folder that is either complete or absent.

        Args:
            keys: keys of the records to save; None means all that this process stores.

        Raises:
            ValueError: something is in the folder.
            RecordError: a record was never written.
            StoreError: an earlier write failed, or there is no space.
        """
        self.drain()
        self._require_all(self._written.keys(), f"store {self._root}")
        keys = self._keys if keys is None else keys
        files = {self.layout.name(key): list(self._written[key]) for key in keys}
        return write_snapshot(
            self._records, pathlib.Path(folder).expanduser(), self.layout, files
        )

    def restore(self, *folders: str | os.PathLike) -> Transfer:
        """Replaces the store's records by those of snapshots.

        Where several processes stored their own records, each of them reads all snapshots.
        Sizes are checked here, bytes when a record is read (or copied).

        Raises:
            RecordError: a snapshot is not whole, is of another model, or lacks a record.
            StoreError: there is no space.
        """
        self.drain()
        names = {self.layout.name(key): key for key in self._keys}
        found = {}
        for folder in map(pathlib.Path, folders):
            files = read_snapshot(folder, self.layout)
            found |= {
                names[name]: (folder, size) for name, size in files.items() if name in names
            }
        self._require_all(found.keys(), f"snapshot {', '.join(map(str, folders))}")
        self._start_empty()
        transfers = []
        for folder in dict.fromkeys(folder for folder, _ in found.values()):
            own = {self.layout.name(k): size for k, (at, size) in found.items() if at == folder}
            transfers.append(transfer_records(folder, self._records, own))
        self._written = {key: tuple(size) for key, (_, size) in found.items()}
        return Transfer(
            sum(each.linked_bytes for each in transfers),
            sum(each.copied_bytes for each in transfers),
        )

    def close(self) -> None:
        """Waits for pending reads and writes, then lets another process open the store."""
        self._executor.shutdown()
        self._lock_file.close()

    def _start_empty(self) -> None:
        shutil.rmtree(self._records, ignore_errors=True)
        self._records.mkdir()
        self._written = {}
        self._files = tensorstore.KvStore.open(
            {"driver": "file", "path": f"{self._records}/"}
        ).result()

    def _submit(self, key: int, work: Callable[[], Any]) -> concurrent.futures.Future:
        self._require_working()
        with self._lock:
            # It was submitted earlier, so it already has a thread: waiting cannot deadlock.
            previous = self._latest.get(key)

            def in_turn():
                if previous is not None:
                    concurrent.futures.wait([previous])
                return work()

            future = self._latest[key] = self._executor.submit(in_turn)
        future.add_done_callback(functools.partial(self._done, key))
        return future

    def _done(self, key: int, future: concurrent.futures.Future) -> None:
        with self._lock:
            if self._latest.get(key) is future:
                del self._latest[key]

    def _read(self, key: int) -> Record:
        name = self.layout.name(key)
        try:
            if key not in self._written:
                raise RecordError("it was never written")
            result = self._files.read(name).result()
            if result.state != "value":
                raise RecordError("it is missing")
            data = result.value  # each access copies the bytes
            record = decode(data, name)
            require_types(record, self.layout.types(key))
            found = len(data), file_crc32(data)
            if found != self._written[key]:
                raise RecordError(
                    f"it is whole, but not the one that was written last: {found} bytes and "
                    f"CRC-32, expected {self._written[key]}"
                )
        except RecordError as error:
            raise RecordError(
                f"record {self._records / name}: {error}; go on from the last checkpoint"
            ) from None
        except BaseException as error:  # tensorstore's errors, or whatever ends this thread
            raise StoreError(
                f"record {self._records / name} cannot be read: {error!r}"
            ) from error
        with self._lock:
            self.bytes_read += len(data)
        return record

    def _write(self, key: int, record: Record) -> None:
        name = self.layout.name(key)
        try:
            data = encode(record, name)
            self._put(name, data)
        except Exception as error:
            # A write's future may never be read, so the next call raises its error.
            self._failure = self._failure or error
            raise
        with self._lock:
            self.bytes_written += len(data)
            self._written[key] = len(data), file_crc32(data)

    def _put(self, name: str, data: bytes) -> None:
        try:
            self._files.write(name, data).result()
        except ValueError as error:  # tensorstore's, for the system's errors
            raise self._write_error(name, len(data), error) from error

    def _write_error(self, name: str, num_bytes: int, error: ValueError) -> StoreError:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else errno.EIO
        free = shutil.disk_usage(self._root).free
        return StoreError(
            number,
            f"record {self._records / name} cannot be written ({os.strerror(number)}): it "
            f"needs {num_bytes:,} bytes, {free:,} are free; snapshots taken before are intact. "
            "Make space and go on from the last one",
        )

    def _require_working(self) -> None:
        if self._failure is not None:
            raise StoreError(f"the store failed before: {self._failure}") from self._failure

    def _require_all(self, found, where: str) -> None:
        missing = [self.layout.name(key) for key in self._keys if key not in found]
        if missing:
            raise RecordError(
                f"{where} has no record {', '.join(missing[:4])}{', ...' * (len(missing) > 4)} "
                f"({len(missing)} of {len(self._keys)} are missing)"
            )


def process_folder(folder: str | os.PathLike, index: int) -> pathlib.Path:
    """The folder of a training process' store, in a folder that the processes share or that
    each machine has for itself."""
    path = pathlib.Path(folder).expanduser()
    return path if index == 0 else path / f"process_{index}"


def remove_stores(folder: str | os.PathLike, first: int) -> None:
    """Deletes the stores of processes numbered `first` or higher, left by an earlier run and
    not open in any process."""
    for path in pathlib.Path(folder).expanduser().glob("process_*"):
        if _PROCESS.fullmatch(path.name) and int(path.name.removeprefix("process_")) >= first:
            try:
                file = _locked(path)
            except ValueError:  # in use by a running process, or not a store
                continue
            with file:
                shutil.rmtree(path, ignore_errors=True)


def _locked(folder: pathlib.Path):
    """An open file that holds the folder for this process until it is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = (path.name for path in folder.iterdir())
        others = sorted(name for name in names if not _PROCESS.fullmatch(name))
        require(
            set(others) <= {"store.lock", "records"} and ("store.lock" in others or not others),
            f"{folder} is not a store of experts, it has {', '.join(others[:4])}; give a "
            "folder that is empty or not there",
        )
        file = (folder / "store.lock").open("a")
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be made ({error.strerror}); give one that this user may write"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            f"{folder} is the store of another run that is not done; wait for it, or give "
            "another folder"
        ) from None
    return file
