# SPDX-License-Identifier: Apache-2.0
"""One expert of one layer as bytes: its weights, its optimizer state, and a checksum.

SE-MoE (Shen et al. 2022, arXiv:2205.10034), section 2.1, keeps master weights, momentum and
variance of each expert on an SSD: the data that a step reads and writes together is one record.
Its format, little-endian:

    magic, format version, bytes of the header, bytes of the record        24 bytes
    header: JSON of the record's name, its updates, its arrays' names, dtypes and shapes
    the arrays in C order, each at a multiple of 16 bytes
    CRC-32 of all of the above, as 8 hexadecimal digits

The first and the last line are the same in all versions, so that a record of another version
can be told from a damaged one. The CRC is written as text because the CRC-32 of bytes followed
by their own binary CRC is always the same number, whatever the bytes: the CRC of a file in a
snapshot's manifest would then say nothing.
"""

import dataclasses
import json
import math
import operator
import struct
import zlib
from collections.abc import Mapping
from typing import Any

# NumPy knows bfloat16 by name once this is imported.
import ml_dtypes  # noqa: F401
import numpy as np

VERSION = 1
_MAGIC = b"switchxR"
_FIRST = struct.Struct("<8sIIQ")
_CRC_BYTES = 8
# Python's `bytes` begin at such addresses, so a decoded record's arrays are aligned.
_ALIGNMENT = 16


class RecordError(ValueError):
    """A record cannot be used: it is missing, damaged, of another expert, version or model."""


class StoreError(OSError):
    """Records could not be read or written; snapshots taken earlier are intact."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The state of one expert.

    Attributes:
        arrays: arrays by name; those of a record that was read are read-only.
        updates: number of updates that the optimizer has made to these arrays.
    """

    arrays: Mapping[str, np.ndarray]
    updates: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of an array, in the form that JSON has."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class StoreLayout:
    """Which records a store has, and what is in each.

    Attributes:
        layers: arrays of a record by name, for each Switch layer by its name, in layer order.
    """

    layers: Mapping[str, Mapping[str, ArrayType]]
    num_experts: int

    @property
    def num_keys(self) -> int:
        return len(self.layers) * self.num_experts

    def name(self, key: int) -> str:
        """Name of a record, and of its file: `encoder_1/00012`."""
        layer, expert = divmod(key, self.num_experts)
        return f"{list(self.layers)[layer].replace(' ', '_')}/{expert:05d}"

    def types(self, key: int) -> Mapping[str, ArrayType]:
        """The types of a record's arrays, by name."""
        return list(self.layers.values())[key // self.num_experts]

    @property
    def record_bytes(self) -> int:
        """Bytes of the arrays of the largest record."""
        return max(sum(each.num_bytes for each in a.values()) for a in self.layers.values())

    def described(self) -> dict[str, Any]:
        """The layout as JSON."""
        layers = {
            layer: {name: [each.dtype, list(each.shape)] for name, each in arrays.items()}
            for layer, arrays in self.layers.items()
        }
        return {"layers": layers, "num_experts": self.num_experts}

    @classmethod
    def from_described(cls, description: Mapping[str, Any]) -> "StoreLayout":
        """The inverse of `described`.

        Raises:
            ValueError: it does not describe a layout; a clause that begins with "it".
        """
        try:
            layers = {
                layer: {
                    name: ArrayType(tuple(map(operator.index, shape)), np.dtype(dtype).name)
                    for name, (dtype, shape) in arrays.items()
                }
                for layer, arrays in description["layers"].items()
            }
            return cls(layers, operator.index(description["num_experts"]))
        except (LookupError, TypeError, AttributeError):
            raise ValueError("its manifest describes no layout of records") from None


def types_of(arrays: Mapping[str, np.ndarray]) -> dict[str, ArrayType]:
    return {name: ArrayType(array.shape, array.dtype.name) for name, array in arrays.items()}


def encode(record: Record, name: str) -> bytes:
    """Encodes a record as bytes; the arrays are copied once.

    Args:
        name: name of the layer and the expert; `decode` expects the same name.

    Raises:
        ValueError: an array's dtype is not numeric.
    """
    described = []
    parts = []
    at = 0
    for array_name, array in record.arrays.items():
        array = np.asarray(array)
        _require_numbers(array, array_name)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        described.append([array_name, array.dtype.name, list(array.shape)])
        padding = -at % _ALIGNMENT
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += [bytes(padding), data.data]
        at += padding + array.nbytes
    content = {"name": name, "updates": record.updates, "arrays": described}
    header = json.dumps(content).encode()
    header += b" " * (-(_FIRST.size + len(header)) % _ALIGNMENT)
    total = _FIRST.size + len(header) + at + _CRC_BYTES
    parts = [_FIRST.pack(_MAGIC, VERSION, len(header), total), header, *parts]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([*parts, b"%08x" % crc])


def decode(data: bytes, name: str) -> Record:
    """Decodes a record from bytes; its arrays are views of them.

    Raises:
        RecordError: the bytes are not the whole record of that name. The message is a clause
            that begins with "it" or "its".
    """
    begin = _FIRST.size + _check_bytes(data)
    arrays, at = {}, begin
    try:
        content = json.loads(data[_FIRST.size : begin])
        found = content["name"]
        record = Record(arrays, content["updates"])
        for array_name, dtype, shape in content["arrays"]:
            at += -(at - begin) % _ALIGNMENT
            array = np.frombuffer(data, np.dtype(dtype), math.prod(shape), at)
            arrays[array_name] = array.reshape(shape)
            at += array.nbytes
    except (ValueError, LookupError, TypeError):
        raise RecordError("its header describes no record") from None
    if found != name:
        raise RecordError(f"it is the record of {found!r}, not of {name!r}")
    return record


def file_crc32(data: bytes) -> int:
    """CRC-32 of encoded bytes, derived from the one at their end without reading them."""
    last = data[-_CRC_BYTES:]
    return zlib.crc32(last, int(last, 16))


def require_types(record: Record, types: Mapping[str, ArrayType]) -> None:
    """Raises RecordError, with a clause, unless a record has exactly these arrays."""
    got = types_of(record.arrays)
    if got != dict(types):
        wrong = [
            f"{name} is {got.get(name, 'missing')}, expected {types.get(name, 'no such array')}"
            for name in sorted(got.keys() | types.keys())
            if got.get(name) != types.get(name)
        ]
        raise RecordError(f"it is of another model or optimizer: {'; '.join(wrong)}")


def _check_bytes(data: bytes) -> int:
    """Size of the header in bytes, after checking all bytes against their CRC.

    Raises:
        RecordError: see `decode`.
    """
    if len(data) < _FIRST.size + _CRC_BYTES:
        raise RecordError(f"it has {len(data)} bytes and was cut off")
    magic, version, header_bytes, total = _FIRST.unpack_from(data)
    is_intact = data[-_CRC_BYTES:] == b"%08x" % zlib.crc32(memoryview(data)[:-_CRC_BYTES])
    if magic != _MAGIC:
        raise RecordError("it does not begin as a record does; it is another file or damaged")
    if not is_intact and total != len(data):
        raise RecordError(f"it has {len(data)} bytes of {total}")
    if not is_intact:
        raise RecordError("its bytes have changed since it was written (CRC-32)")
    if version != VERSION:
        raise RecordError(
            f"it has format version {version}, and this switchx reads {VERSION}; use the "
            "switchx that wrote it"
        )
    return header_bytes


def _require_numbers(array: Any, name: str) -> None:
    # Kind V: bfloat16 and the like, which NumPy finds by their names.
    if array.dtype.kind not in "biufcV" or array.dtype.name.startswith("void"):
        raise ValueError(f"array {name!r} has dtype {array.dtype}; store numbers")
