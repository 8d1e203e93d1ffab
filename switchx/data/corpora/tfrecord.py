# SPDX-License-Identifier: Apache-2.0
"""TFRecord files, read without TensorFlow: sequentially, or by number through an index.

A record is its length (uint64), a checksum of the length, the data, and a checksum of the data,
all little endian. A checksum is the CRC-32C, rotated right by 15 bits, plus 0xA282EAD8
(tensorflow/core/lib/io/record_writer.h). Each is compared with what was read.
"""

import dataclasses
import functools
import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from etils import epath

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import fingerprint_of
from switchx.files import write_atomically

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def read_records(path: str) -> Iterator[bytes]:
    """Data of all records of a file, plain or `.gz`, in order.

    Raises:
        ValueError: the file cannot be read, a checksum differs, or the file ends inside a
            record; the message has the byte (of the unpacked file).
    """
    try:
        with epath.Path(path).open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            offset = 0
            while (data := _read_record(file, path, offset)) is not None:
                yield data
                offset += _HEADER.size + len(data) + _FOOTER.size
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}; get the file anew") from error


@dataclasses.dataclass(frozen=True)
class TfRecordFiles:
    """Random access to the records of plain files, one file after another.

    The offsets of a file's records are written into `tfrecord_indexes` of the data folder when
    the file is first read, eight bytes per record. Can be pickled for Grain's workers.

    Attributes:
        paths: paths of the files, which are not compressed.
        lengths: number of records in each file.
        data_dir: data folder, as `Corpus.open` takes it.
    """

    paths: tuple[str, ...]
    lengths: tuple[int, ...]
    data_dir: str | None = None

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> bytes:
        """Data of record `index`, in [0, len).

        Raises:
            ValueError: a file was damaged, or holds another number of records.
        """
        number = int(np.searchsorted(self._ends, index, side="right"))
        path, length = self.paths[number], self.lengths[number]
        offset = int(self._offsets(number)[index - (int(self._ends[number]) - length)])
        with epath.Path(path).open("rb") as file:
            file.seek(offset)
            return _read_record(file, path, offset)

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    @functools.cached_property
    def _indexes(self) -> dict[int, np.ndarray]:
        return {}

    def _offsets(self, number: int) -> np.ndarray:
        if number not in self._indexes:
            offsets = record_offsets(self.paths[number], self.data_dir)
            length = self.lengths[number]
            if len(offsets) != length:
                raise ValueError(wrong_number(self.paths[number], len(offsets), length))
            self._indexes[number] = offsets
        return self._indexes[number]


def wrong_number(path: str, num_records: int, expected: int) -> str:
    """The message for a file that was cut between two records, or was replaced."""
    return (
        f"{path} holds {num_records} records, its dataset_info.json says {expected}; get the "
        "file anew"
    )


def record_offsets(path: str, data_dir: str | None) -> np.ndarray:
    """The offset of each record in a plain file, int64, from the index or by reading the file.

    Raises:
        ValueError: the checksum of a length differs, or the file ends inside a record.
    """
    state = epath.Path(path).stat()
    key = fingerprint_of("tfrecord index 1", path, state.length, state.mtime)
    index = locations.find_or_place(f"tfrecord_indexes/{key}.npy", data_dir)
    if not index.exists():
        content = io.BytesIO()
        np.save(content, np.fromiter(_go_through(path, state.length), np.int64))
        write_atomically(index, content.getvalue())
    return np.load(index, mmap_mode="r")


def _go_through(path: str, size: int) -> Iterator[int]:
    offset = 0
    with epath.Path(path).open("rb") as file:
        while (length := _read_length(file, path, offset)) is not None:
            yield offset
            offset += _HEADER.size + length + _FOOTER.size
            if offset > size:
                raise _cut(path, size)
            file.seek(offset)


def _read_record(file: BinaryIO, path: str, offset: int) -> bytes | None:
    length = _read_length(file, path, offset)
    if length is None:
        return None
    content = file.read(length + _FOOTER.size)
    if len(content) < length + _FOOTER.size:
        raise _cut(path, offset + _HEADER.size + len(content))
    data = content[:length]
    _check(data, *_FOOTER.unpack(content[length:]), path, offset + _HEADER.size)
    return data


def _read_length(file: BinaryIO, path: str, offset: int) -> int | None:
    """The length of the record that begins here; None at the end of the file."""
    header = file.read(_HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise _cut(path, offset + len(header))
    length, checksum = _HEADER.unpack(header)
    _check(header[:8], checksum, path, offset)
    return length


def _cut(path: str, size: int) -> ValueError:
    return ValueError(f"{path} ends at byte {size}, inside of a record; get the file anew")


def _check(data: bytes, expected: int, path: str, offset: int) -> None:
    found = masked_checksum(data)
    if found != expected:
        raise ValueError(
            f"{path}: the {len(data)} bytes at {offset} have the checksum {found:08x}, "
            f"expected {expected:08x}; it is damaged or no TFRecord file: get it anew"
        )


def masked_checksum(data: bytes) -> int:
    """The CRC-32C of some bytes as TFRecord masks it."""
    import google_crc32c

    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF
