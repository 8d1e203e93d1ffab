# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a store: folders of records that exist whole or not at all.

    SNAPSHOT/encoder_1/00012    a record, see record.py
    SNAPSHOT/manifest.json      layers, arrays, size and CRC-32 of every file (whole_folders.py)

Where there are several processes, each keeps its part of the records in such a folder,
SNAPSHOT/process_1_of_2; the snapshot is whole when it has all parts.

A store never changes a file in place, so a hard link preserves a record: a snapshot takes no
space until records change. On another file system it is a copy.
"""

import dataclasses
import errno
import logging
import os
import pathlib
import shutil
import zlib
from collections.abc import Mapping, Sequence

from switchx.storage.record import (
    Record,
    RecordError,
    StoreError,
    StoreLayout,
    decode,
    require_types,
)
from switchx.whole_folders import new_folder, read_manifest, write_manifest

MANIFEST = "manifest.json"
_WAY_OUT = "restore an older checkpoint"
# A file system without hard links, or without ones to another, or with no more for a file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Bytes of a snapshot's records that were linked, and bytes that were copied."""

    linked_bytes: int
    copied_bytes: int


def write_snapshot(
    records: pathlib.Path,
    folder: pathlib.Path,
    layout: StoreLayout,
    files: Mapping[str, Sequence[int]],
) -> Transfer:
    """Links records on the disk into a new folder.

    Args:
        files: bytes and CRC-32 of each record, known from when it was written.

    Raises:
        ValueError: something is in the folder.
        StoreError: there is no space.
    """
    with new_folder(folder) as partial:
        transfer = transfer_records(records, partial, files)
        try:
            write_manifest(partial, MANIFEST, layout.described(), "crc32", known=files)
            for path in {partial, *(partial / os.path.dirname(name) for name in files)}:
                _flush_folder(path)
        except OSError as error:
            raise _no_transfer(error, folder, 0) from error
    _flush_folder(folder.absolute().parent)
    return transfer


def part_of(folder: pathlib.Path, index: int, count: int) -> pathlib.Path:
    """The folder where process `index` of `count` keeps its records of a snapshot."""
    return folder if count == 1 else folder / f"process_{index}_of_{count}"


def parts_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders of records in a snapshot.

    Raises:
        RecordError: a part is missing.
    """
    found = {path.name for path in folder.glob("process_*_of_*")}
    if not found:
        return [folder]
    count = int(next(iter(found)).rpartition("_")[2])
    parts = [part_of(folder, index, count) for index in range(count)]
    if found != {part.name for part in parts}:
        raise RecordError(
            f"snapshot {folder} has {', '.join(sorted(found))}, not a part of each process "
            f"that saved it; {_WAY_OUT}"
        )
    return parts


def read_snapshot(folder: pathlib.Path, layout: StoreLayout) -> dict[str, Sequence[int]]:
    """Bytes and CRC-32 of a snapshot's records; names and sizes are checked.

    Raises:
        RecordError: the snapshot is incomplete, or of another model.
    """
    snapshot = Snapshot(folder)
    if difference := _difference(snapshot.layout.described(), layout.described()):
        raise RecordError(f"snapshot {folder} is of another model or optimizer: {difference}")
    for name, (num_bytes, _) in snapshot.files.items():
        path = folder / name
        if not path.is_file():
            raise RecordError(f"snapshot {folder}: its record {name} is missing; {_WAY_OUT}")
        if path.stat().st_size != num_bytes:
            raise RecordError(
                f"snapshot {folder}: its record {name} has {path.stat().st_size} bytes, not "
                f"{num_bytes}; {_WAY_OUT}"
            )
    return snapshot.files


class Snapshot:
    """A snapshot that is read record by record.

    Attributes:
        layout: layout of the store, which names its records.
        files: bytes and CRC-32 by path below the folder.
    """

    def __init__(self, folder: str | os.PathLike):
        """Reads the manifest, or each part's manifest.

        Raises:
            RecordError: a manifest is missing or damaged, or the parts are not of one model.
        """
        self._folder = pathlib.Path(folder)
        self.files: dict[str, Sequence[int]] = {}
        self._paths: dict[str, pathlib.Path] = {}
        layouts = []
        for part in parts_of(self._folder):
            try:
                manifest = read_manifest(part, MANIFEST, "crc32")
                layouts.append(StoreLayout.from_described(manifest))
            except ValueError as error:
                raise RecordError(f"snapshot {part}: {error}; {_WAY_OUT}") from None
            for name, file in manifest["files"].items():
                self._paths[name] = part / name
                self.files[str((part / name).relative_to(self._folder))] = file
        self.layout = layouts[0]
        for layout in layouts:
            if difference := _difference(layout.described(), self.layout.described()):
                raise RecordError(
                    f"snapshot {folder} has parts of different models: {difference}; {_WAY_OUT}"
                )

    def read(self, key: int) -> Record:
        """Reads a record, checking every byte.

        Raises:
            RecordError: the record is missing, damaged, or another expert's.
        """
        name = self.layout.name(key)
        path = self._paths.get(name, self._folder / name)
        try:
            record = decode(path.read_bytes(), name)
            require_types(record, self.layout.types(key))
        except FileNotFoundError:
            raise RecordError(f"record {path}: it is missing; {_WAY_OUT}") from None
        except RecordError as error:
            raise RecordError(f"record {path}: {error}; {_WAY_OUT}") from None
        return record


def transfer_records(
    source: pathlib.Path, target: pathlib.Path, files: Mapping[str, Sequence[int]]
) -> Transfer:
    """Links files into another folder, or copies them where links are impossible, and says so.

    Args:
        files: bytes and CRC-32 by name.

    Raises:
        RecordError: a file is missing, or one to be copied has changed since it was written.
        StoreError: there is no space.
    """
    left = dict(files)
    try:
        for layer in {os.path.dirname(name) for name in files}:
            (target / layer).mkdir(exist_ok=True)
        for name in files:
            try:
                os.link(source / name, target / name)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                copied = _copy(source, target, left, error.strerror)
                return Transfer(_num_bytes(files) - copied, copied)
            del left[name]
    except FileNotFoundError as error:
        raise RecordError(f"record {error.filename} is missing") from None
    except OSError as error:
        raise _no_transfer(error, target, _num_bytes(left)) from error
    return Transfer(_num_bytes(files), 0)


def _copy(
    source: pathlib.Path, target: pathlib.Path, files: Mapping[str, Sequence[int]], reason: str
) -> int:
    """Copies files and checks their bytes; returns the number of bytes."""
    total = _num_bytes(files)
    free = shutil.disk_usage(target).free
    if total > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    logging.getLogger(__name__).info(
        f"copying {total:,} bytes of records from {source} to {target}, which cannot be linked "
        f"({reason}); on one file system a snapshot takes no space"
    )
    for name, (num_bytes, crc) in files.items():
        data = (source / name).read_bytes()
        if (len(data), zlib.crc32(data)) != (num_bytes, crc):
            raise RecordError(
                f"record {source / name}: its bytes have changed since it was written (CRC-32)"
            )
        with (target / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    return total


def _no_transfer(error: OSError, folder: pathlib.Path, num_bytes: int) -> StoreError:
    """The error to raise where files cannot be linked or copied."""
    free = shutil.disk_usage(folder.absolute().parent).free
    return StoreError(
        error.errno,
        f"records cannot be put into {folder} ({error.strerror}): {num_bytes:,} bytes are "
        f"left, {free:,} are free; snapshots taken before are intact. Make space and go on "
        "from the last one",
    )


def _difference(got: Mapping, expected: Mapping) -> str:
    """A description of the first difference between two layouts; empty if there is none."""
    pairs = {
        "number of experts": (got.get("num_experts"), expected["num_experts"]),
        "layers": (list(got.get("layers", {})), list(expected["layers"])),
    }
    for layer, arrays in expected["layers"].items():
        pairs[f"arrays of {layer}"] = (got.get("layers", {}).get(layer), arrays)
    for what, (one, other) in pairs.items():
        if one != other:
            return f"its {what}: {one}, expected {other}"
    return ""


def _num_bytes(files: Mapping[str, Sequence[int]]) -> int:
    return sum(num_bytes for num_bytes, _ in files.values())


def _flush_folder(folder: pathlib.Path) -> None:
    """Flushes a folder, so that the names in it are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
