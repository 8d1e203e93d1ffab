# SPDX-License-Identifier: Apache-2.0
"""T5X's checkpoints on disk, version 3: a msgpack index, and zarr arrays beside it.

`checkpoint_<step>/checkpoint` is `{"version": 3, "optimizer": {"target": ..., "state": ...}}`;
an array is there itself, or as the description of a zarr folder `target.encoder.x` next to it.
Read without TensorFlow and T5X. Where a description says that its array is (a bucket, another
folder) is not followed: it is looked for in the checkpoint's own folder.
"""

import itertools
import json
import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore
from flax import serialization

from switchx.fields import require

INDEX = "checkpoint"
_VERSION = 3
_DTYPES = {
    "<f4": np.float32,
    "<f8": np.float64,
    "<f2": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
_MOST_CHUNKS = 1 << 20


class T5XFolder:
    """The parameters of a checkpoint.

    Attributes:
        shapes: of every array below `target`, by name: `target/encoder/...`.

    Raises:
        ValueError: it is no such checkpoint, or parts of it are missing or damaged.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._leaves = {f"target/{name}": leaf for name, leaf in _leaves(self._target())}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, leaf in self._leaves.items():
            is_array = isinstance(leaf, np.ndarray)
            self.shapes[name] = leaf.shape if is_array else self._header(name, leaf)[0]

    def read(self, name: str) -> np.ndarray:
        """An array in float32: exact but for one of float64, which is rounded.

        Raises:
            ValueError: it cannot be read whole.
        """
        leaf = self._leaves[name]
        if not isinstance(leaf, np.ndarray):
            leaf = self._read_zarr(name, leaf)
        return leaf.astype(np.float32)

    def _target(self) -> dict[str, Any]:
        file = self.folder / INDEX
        if not file.is_file():
            inside = sorted(path.name for path in self.folder.glob("checkpoint_*"))
            raise ValueError(
                f"{self.folder} has no file {INDEX!r}; give the folder checkpoint_<step> of a "
                f"T5X run" + (f": it has {', '.join(inside[:8])}" if inside else "")
            )
        try:
            content = serialization.msgpack_restore(file.read_bytes())
        # A damaged index fails wherever the damage is.
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            raise ValueError(
                f"{file} cannot be read as msgpack ({error}); it is damaged or cut short: "
                "fetch it again"
            ) from error
        version = content.get("version") if isinstance(content, dict) else None
        require(
            version == _VERSION,
            f"{file} has version={version!r}; expected {_VERSION}: restore and save it with a "
            "T5X of 2021 or later",
        )
        optimizer = content.get("optimizer")
        target = optimizer.get("target") if isinstance(optimizer, dict) else None
        has_target = isinstance(target, dict)
        require(has_target, f"{file} has no parameters, optimizer/target; fetch it again")
        return target

    def _zarr(self, name: str, spec: dict[str, Any]) -> pathlib.Path:
        kvstore = spec["kvstore"]
        path = kvstore.get("path") if isinstance(kvstore, dict) else None
        path = spec.get("path") if path is None else path  # TensorStore before 0.1.14
        plain = path.rstrip("/") if isinstance(path, str) else ""
        is_plain = plain not in ("", ".", "..") and not set(plain) & set("/\\\0")
        require(
            spec["driver"] == "zarr" and is_plain,
            f"{self.folder / INDEX} describes {name} as driver={spec['driver']!r} with "
            f"path={path!r}; expected zarr in a folder of its own beside it: do not use this "
            "checkpoint",
        )
        return self.folder / plain

    def _header(self, name: str, spec: dict[str, Any]):
        """Shape, dtype and chunks that a zarr array has."""
        file = self._zarr(name, spec) / ".zarray"
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
            shape, chunks = tuple(header["shape"]), tuple(header["chunks"])
            numbers = [type(n) is int and n >= 1 for n in (*shape, *chunks)]
            if not all(numbers) or len(shape) != len(chunks):
                raise ValueError(f"shape {shape} in chunks {chunks}")
            dtype = _DTYPES[header["dtype"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{file} describes no array of floats that can be read ({error!r}); fetch the "
                "folder again"
            ) from error
        return shape, dtype, chunks, header.get("dimension_separator", ".")

    def _read_zarr(self, name: str, spec: dict[str, Any]) -> np.ndarray:
        shape, dtype, chunks, separator = self._header(name, spec)
        folder = self._zarr(name, spec)
        grid = [math.ceil(size / chunk) for size, chunk in zip(shape, chunks, strict=True)]
        require(
            math.prod(grid) <= _MOST_CHUNKS and math.prod(chunks) <= 2 * math.prod(shape),
            f"{folder}: shape {list(shape)} in chunks {list(chunks)}; expected at most "
            f"{_MOST_CHUNKS} chunks, none larger than the array",
        )
        # A chunk that is not there would read as zeros.
        for indices in itertools.product(*map(range, grid)):
            chunk = separator.join(map(str, indices))
            is_there = (folder / chunk).is_file()
            require(is_there, f"{folder} has no chunk {chunk}; fetch the folder again")
        kvstore = {"driver": "file", "path": f"{folder.absolute()}/"}
        try:
            store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
            array = np.asarray(store.read().result())
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{folder} cannot be read ({str(error)[:300]}); it is damaged, cut short or in "
                "a form that TensorStore does not read: fetch it again"
            ) from error
        is_that = array.shape == shape and array.dtype == dtype
        require(is_that, f"{folder} holds another array than its .zarray; fetch it again")
        return array


def _leaves(tree: dict[str, Any], prefix: str = ""):
    """Names of arrays and of descriptions of arrays; what else there is is refused."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not {"driver", "kvstore", "metadata"} <= value.keys():
            yield from _leaves(value, f"{name}/")
        elif isinstance(value, np.ndarray | dict):
            yield name, value
        else:
            raise ValueError(
                f"target/{name} is a {type(value).__name__}; expected an array: this is no "
                "checkpoint of T5X's"
            )
