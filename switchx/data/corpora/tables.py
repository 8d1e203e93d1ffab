# SPDX-License-Identifier: Apache-2.0
"""Tables of Apache Arrow: Parquet, Arrow's streams and files, and data sets saved by Hugging
Face's library `datasets` (`save_to_disk`), which are streams with a list of them.

They are read by `pyarrow`. Its stream reader takes the end of a file for the end of the stream,
so a file cut between two batches would silently be short: the end marker is required.
"""

import contextlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from switchx.fields import require
from switchx.object_store import Folder, read_json_object

KINDS = (".parquet", ".arrow")
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_FILE_MARK = b"ARROW1"
# Errors of damaged files: a length may ask for any amount of memory, a name may not be text.
_FAULTS = (MemoryError, OverflowError, UnicodeDecodeError)
_PARQUET_FRAME = 12  # magic bytes at both ends, and the length of the metadata
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def read_table(
    path: Folder, tally: Counter, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a table as Python values by column, each with its place.

    Args:
        tally: counter of the rows, as `rows`.
        columns: columns to read; None is all.

    Raises:
        ValueError: the table cannot be read, is damaged, has two columns of one name, or
            lacks one of `columns`.
    """
    with _opened(path, columns) as (schema, batches):
        number = itertools.count(1)
        names = [name for name in schema.names if columns is None or name in columns]
        for batch in batches:
            batch = batch.select(names)
            batch.validate(full=True)
            cells = [
                [_plain(value, schema.field(name).type) for value in _values(batch[name])]
                for name in names
            ]
            for values in zip(*cells, strict=True):
                tally["rows"] += 1
                yield f"{path}: row {next(number)}", dict(zip(names, values, strict=True))


def columns_of(path: Folder) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Names of a table's columns, and of the classes that `datasets` knows, by field: `a/b` is
    field `b` inside column `a`, and places in lists are left out.

    Raises:
        ValueError: as for `read_table`.
    """
    with _opened(path) as (schema, _):
        described = (schema.metadata or {}).get(b"huggingface", b"{}")
        try:
            features = (json.loads(described).get("info") or {}).get("features") or {}
            classes = dict(_classes_in(features))
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise OSError(f"its description by `datasets` is damaged ({error!r})") from error
        return schema.names, classes


def _classes_in(feature: Any, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fields within a feature of `datasets` that are classes, with the classes' names."""
    if isinstance(feature, list):
        yield from _classes_in(*feature, path)
    elif isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
        yield path, tuple(feature["names"])
    elif isinstance(feature, dict) and feature.get("_type") in (
        "Sequence",
        "List",
        "LargeList",
    ):
        yield from _classes_in(feature["feature"], path)
    elif isinstance(feature, dict):
        for name, inner in feature.items():
            yield from _classes_in(inner, f"{path}/{name}".removeprefix("/"))


@contextlib.contextmanager
def _opened(
    path: Folder, columns: Sequence[str] | None = None
) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema, and the batches, which have at least `columns`."""
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".parquet":
                table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
                schema, batches = table.schema_arrow, _all_rows(table, columns, _size(file))
            elif file.read(len(_FILE_MARK)) == _FILE_MARK:
                table = pyarrow.ipc.open_file(file)
                numbers = range(table.num_record_batches)
                schema, batches = table.schema, map(table.get_batch, numbers)
            else:
                file.seek(0)
                table = pyarrow.ipc.open_stream(file)
                schema, batches = table.schema, _whole(table, file)
            names = (name for name in schema.names if columns is None or name in columns)
            twice = [name for name, times in Counter(names).items() if times > 1]
            require(not twice, f"{path} has the column {', '.join(twice)} twice; rename one")
            missing = [name for name in columns or () if name not in schema.names]
            require(
                not missing,
                f"{path} has no column {', '.join(missing)}; use some of "
                f"{', '.join(schema.names)}",
            )
            yield schema, batches
    except (pyarrow.ArrowException, OSError, *_FAULTS) as error:
        raise ValueError(f"{path} cannot be read: {error}; get the file anew") from error


def _size(file: BinaryIO) -> int:
    position = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(position)
    return size


def _all_rows(table, columns: Sequence[str] | None, num_bytes: int) -> Iterator[Any]:
    """Batches of a Parquet file, whose metadata have no checksum: their numbers must agree."""
    metadata, num_read = table.metadata, 0
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    if not groups and num_bytes > metadata.serialized_size + _PARQUET_FRAME:
        raise OSError("it describes no rows, and holds some")
    for batch in table.iter_batches(columns=columns):
        num_read += batch.num_rows
        yield batch
    stated = {metadata.num_rows, sum(group.num_rows for group in groups)}
    if stated != {num_read}:
        raise OSError(f"it says that it has {metadata.num_rows} rows, and gives {num_read}")


def _whole(stream, file: BinaryIO) -> Iterator[Any]:
    yield from stream
    end = file.tell()
    file.seek(max(end - len(_END_OF_STREAM), 0))
    if file.read() != _END_OF_STREAM:
        raise OSError(f"no stream ends at byte {end}: it was cut, or another one follows")


def _values(column) -> list:
    """Python values, but Arrow's own for nanoseconds, which Python lacks."""
    return list(column) if "[ns" in str(column.type) else column.to_pylist()


def _plain(value: Any, kind: Any) -> Any:
    """A value of Arrow's type `kind`; single precision as the shortest equal number."""
    import pyarrow
    from pyarrow import types

    if isinstance(value, pyarrow.Scalar):  # from `_values`, with nanoseconds
        if not value.is_valid:
            return None
        has_parts = types.is_nested(kind) or types.is_dictionary(kind)
        if not has_parts and "[ns" not in str(kind):
            value = value.as_py()
    if value is None:
        return None
    if isinstance(value, bytes):  # texts that the writer did not mark as such, or pictures
        return _text_or_bytes(value)
    if types.is_float32(kind) or types.is_float16(kind):
        return shortest(kind.to_pandas_dtype()(value))
    if types.is_dictionary(kind):
        return _plain(value, kind.value_type)
    if types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if types.is_nested(kind) and hasattr(kind, "value_type"):
        return [_plain(item, kind.value_type) for item in value]
    return value


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def shortest(value: np.floating) -> float:
    """The number of fewest digits that equals this one in its precision: 3.8, not 3.7999999."""
    return float(str(value))


def saved_splits(folder: Path) -> dict[str, Path]:
    """Split -> folder, of what `datasets` saved; empty if it saved nothing.

    Raises:
        ValueError: a description cannot be read, or a split is missing.
    """
    if (folder / _SPLITS).is_file():
        names = _described(folder / _SPLITS, "splits")
        missing = [name for name in names if not (folder / name / _STATE).is_file()]
        require(not missing, f"{folder} has no {missing[:1]} of {_SPLITS}; save it anew")
        return {name: folder / name for name in names}
    if any(folder.glob("*.arrow")) and saved_tables(folder):
        return {_described(folder / _STATE, "_split") or "train": folder}
    return {}


def saved_tables(folder: Folder) -> list[Folder]:
    """Files of one saved split in their order; none if `datasets` saved nothing.

    Raises:
        ValueError: one is missing, or a selection of rows lies beside them (`indices`).
    """
    state = folder / _STATE
    if not state.is_file() or not (listed := _described(state, "_data_files")):
        return []
    require(
        not _described(state, "_indices_data_files"),
        f"{folder} keeps its choice of rows apart; save it anew after flatten_indices()",
    )
    names = [each["filename"] for each in listed]
    missing = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
    require(not missing, f"{folder} has no {', '.join(missing)} of {_STATE}; copy it anew")
    return [folder / name for name in names]


def _described(file: Folder, key: str) -> Any:
    try:
        return read_json_object(file).get(key)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; get the file anew") from error
