# SPDX-License-Identifier: Apache-2.0
"""`pytorch_model.bin` without PyTorch and without unpickling.

`torch.save` writes a zip of `NAME/data.pkl`, a pickle that describes the tensors, and one
uncompressed record `NAME/data/KEY` for each storage. A pickle is a program. Here it is run by a
machine with some thirty of its opcodes, which imports and calls nothing: the only names it
knows are those of `torch._utils._rebuild_tensor_v2`, of a parameter, of an ordered dictionary
and of storages, and they stand for descriptions. Every other name or opcode is refused.

Nothing is allocated by a number in the file before it is compared with the file's size: records
do not overlap and lie inside the file, a tensor lies inside its storage and has no more
elements, and all tensors together have at most a few times the bytes of the file (a table may
occur under four names).
"""

import dataclasses
import io
import math
import os
import pathlib
import pickletools
import struct
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from switchx.fields import require

_STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
}
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_KNOWN = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {name}" for name in _STORAGES),
}
# More than the description of a shard, and the directory of its records, need.
_MOST_PICKLE_BYTES = 1 << 24
_MOST_NAMES_OF_A_TABLE = 4
_MAGIC = b"PK\3\4"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_WAY_OUT = "it is damaged or cut short: fetch or write it again"


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """The place of a tensor in its file.

    Attributes:
        begin: byte offset of its first element.
        strides: strides of the dimensions, in elements.
    """

    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Number of elements from the first to the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


class TorchFile:
    """The tensors of one file that `torch.save` wrote from a dictionary of them.

    Attributes:
        tensors: places of the tensors, by name.

    Raises:
        ValueError: the file is not such a file, is damaged, or asks for anything but tensors.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            self.tensors = self._described()
        except _Refused as error:
            raise ValueError(f"{path} {error}") from error
        # The error of a damaged archive or description depends on where the damage is.
        except (
            zipfile.BadZipFile,
            RuntimeError,  # for records that are encrypted, or compressed in another way
            OSError,
            ValueError,
            LookupError,
            TypeError,
            OverflowError,
            struct.error,
        ) as error:
            raise ValueError(f"{path} cannot be read ({error}); {_WAY_OUT}") from error

    @property
    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Each tensor's type, as safetensors would name it, and its shape."""
        return {
            name: (_TYPES.get(tensor.dtype.name, tensor.dtype.name), tensor.shape)
            for name, tensor in self.tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """A tensor in its own dtype, its elements in row-major order."""
        tensor = self.tensors[name]
        size = tensor.dtype.itemsize
        data = np.fromfile(
            self.path, np.uint8, count=tensor.span * size, offset=tensor.begin
        ).view(tensor.dtype)
        require(len(data) == tensor.span, f"{self.path} has become shorter; read it again")
        strides = [stride * size for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(data, tensor.shape, strides)
        return np.ascontiguousarray(view)

    def _described(self) -> dict[str, TorchTensor]:
        with _BoundedFile(self.path) as file:
            is_zip = file.read(4) == _MAGIC
            if not is_zip:
                raise _Refused(
                    "is no zip archive: PyTorch before 1.6 wrote one pickle after the other, "
                    "which is not read here; load and save it with a PyTorch of 2020 or later"
                )
            records, data = _records(file)
        storages = _Storages(records)
        result = _run(data, storages)
        if not isinstance(result, dict):
            raise _Refused(f"holds a {type(result).__name__}, expected tensors by name")
        for name, value in result.items():
            if not isinstance(value, TorchTensor):
                raise _Refused(
                    f"has a {type(value).__name__} under the name {name[:80]!r}, expected "
                    "tensors alone: save the model's state_dict()"
                )
        num_bytes = sum(math.prod(t.shape) * t.dtype.itemsize for t in result.values())
        most = _MOST_NAMES_OF_A_TABLE * sum(size for _, size in records.values())
        if num_bytes > most:
            raise _Refused(
                f"describes {num_bytes} bytes of tensors in {most // _MOST_NAMES_OF_A_TABLE} "
                "bytes of storages: many tensors share one; save a model without shared views"
            )
        return result


class _Refused(ValueError):
    """A refused request by a file; its message is a clause whose subject is the file."""


class _BoundedFile(io.FileIO):
    """A file from which no more is read at once than a directory of records needs."""

    def read(self, size=-1) -> bytes:
        if size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MOST_PICKLE_BYTES:
            raise _Refused(
                f"has a description or directory of {size} bytes, expected "
                f"{_MOST_PICKLE_BYTES} at most"
            )
        return super().read(size)


def _records(file: _BoundedFile) -> tuple[dict[str, tuple[int, int]], bytes]:
    """First byte and size of each storage's record, by its key, and the description."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    end = file.seek(0, io.SEEK_END)
    places = {}
    for entry in sorted(entries, key=lambda entry: entry.header_offset, reverse=True):
        name = entry.filename
        if entry.compress_type or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise _Refused(
                f"has the record {name[:80]!r} compressed or encrypted, which PyTorch never "
                "writes; do not use this file"
            )
        file.seek(entry.header_offset)
        magic, *lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        begin = entry.header_offset + _LOCAL_HEADER.size + sum(lengths)
        if magic != _MAGIC or begin + entry.file_size > end or name in places:
            raise _Refused(
                f"has the record {name[:80]!r} twice, in another record or outside of the "
                "file; do not use this file"
            )
        places[name] = begin, entry.file_size
        end = entry.header_offset
    pickles = [name for name in places if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise _Refused(
            f"is a zip archive with {len(pickles)} records NAME/data.pkl, expected one: give a "
            "file that torch.save wrote"
        )
    root = pickles[0].removesuffix("data.pkl")

    def content(name: str) -> bytes:
        begin, size = places[name]
        file.seek(begin)
        return file.read(size)

    order = f"{root}byteorder"
    if order in places and content(order) != b"little":
        raise _Refused("was written on a big-endian machine; save it again on another")
    prefix = f"{root}data/"
    storages = {
        name.removeprefix(prefix): place
        for name, place in places.items()
        if name.startswith(prefix)
    }
    return storages, content(pickles[0])


@dataclasses.dataclass(frozen=True)
class _Name:
    """A name that the description may use; it is never imported."""

    text: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    begin: int
    dtype: np.dtype
    num_elements: int


@dataclasses.dataclass(frozen=True)
class _Storages:
    """Storages and tensors as a description asks for them, compared with the records."""

    records: dict[str, tuple[int, int]]

    def storage(self, reference) -> _Storage:
        kind, dtype, key, _, num_elements = reference
        is_known = kind == "storage" and isinstance(dtype, _Name) and isinstance(key, str)
        dtype = _STORAGES[dtype.text.removeprefix("torch ")] if is_known else None
        if dtype is None or type(num_elements) is not int:
            raise _Refused("describes a storage in a form that PyTorch does not write")
        begin, size = self.records.get(key, (0, -1))
        if size != num_elements * dtype.itemsize:
            raise _Refused(
                f"describes storage {key[:80]!r} as {num_elements} x {dtype}, its record has "
                f"{max(size, 0)} bytes; {_WAY_OUT}"
            )
        return _Storage(begin, dtype, num_elements)

    def call(self, function, arguments):
        """The value of the call of a known name."""
        match function, arguments:
            case _Name("collections OrderedDict"), ():
                return {}
            case _Name("torch._utils _rebuild_parameter"), (TorchTensor() as tensor, _, _):
                return tensor
            case (
                _Name("torch._utils _rebuild_tensor_v2"),
                (_Storage() as storage, int(offset), tuple(shape), tuple(strides), *_),
            ):
                return self._tensor(storage, offset, shape, strides)
        name = function.text if isinstance(function, _Name) else type(function).__name__
        raise _Refused(f"calls {name[:80]} in a form that PyTorch does not write")

    def _tensor(self, storage: _Storage, offset: int, shape: tuple, strides: tuple):
        numbers = (offset, *shape, *strides)
        is_form = all(type(n) is int and n >= 0 for n in numbers) and len(shape) <= 32
        if not is_form or len(shape) != len(strides):
            raise _Refused("describes a tensor in a form that PyTorch does not write")
        begin = storage.begin + offset * storage.dtype.itemsize
        tensor = TorchTensor(begin, storage.dtype, shape, strides)
        most = storage.num_elements
        if offset + tensor.span > most or math.prod(shape) > most:
            raise _Refused(
                f"describes a tensor of shape {list(shape)}, strides {list(strides)} and "
                f"offset {offset} in a storage of {most} elements; do not use this file"
            )
        return tensor


def _run(data: bytes, storages: _Storages):
    """The value of a description: dictionaries of `TorchTensor`s, numbers and texts."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks below the marks
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, below.pop()
        return items

    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                below.append(stack)
                stack = []
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2":
                stack.append(argument)
            case "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "GLOBAL":
                stack.append(_known(argument))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_known(f"{_text(module)} {_text(name)}"))
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                items = since_mark()
                stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][_text(key)] = value
            case "SETITEMS":
                items = since_mark()
                pairs = zip(map(_text, items[::2]), items[1::2], strict=True)
                stack[-1].update(pairs)
            case "BINPERSID":
                stack.append(storages.storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(storages.call(function, arguments))
            case "BUILD":  # attributes of a state_dict, such as its versions
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise _Refused("sets attributes of what is no dictionary")
            case other:
                raise _Refused(f"has the pickle opcode {other}, which no tensor needs")
    raise ValueError("its description has no end")


def _known(name: str) -> _Name:
    if name not in _KNOWN:
        raise _Refused(
            f"asks for {name[:80].replace(' ', '.')}, which is no part of a tensor and may run "
            "any program; nothing was run: do not use this file, or load and save it with "
            "transformers where you trust it"
        )
    return _Name(name)


def _text(value) -> str:
    if not isinstance(value, str):
        raise _Refused(f"has a name that is a {type(value).__name__}")
    return value
