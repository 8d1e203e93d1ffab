# SPDX-License-Identifier: Apache-2.0
"""Checksums of a checkpoint's arrays: taken in memory as they are written, compared when read.

Saving: Orbax has each process write a part of each array: the shards of its devices, or where
several devices hold a large shard, an equal slice for each. The process takes the CRC-32
of these parts from the copies in its memory, in threads beside the writing, so that no byte is
read again. When its files are written and flushed it writes one list per item,
`checksums/process_1_of_4.json`: index and CRC-32 of its parts, names and sizes of its files,
the list's own CRC-32. Process 0 then joins names and sizes and the CRC-32 of each list into
`manifest.json` (manifest.py) and renames the folder. A process that dies before that leaves a
folder with a temporary name, which nothing reads.

Restoring: process 0 compares names and sizes. Each process compares what it has read with all
parts that one of its devices holds whole: everything on the mesh that saved it or on fewer
devices, and on more devices whatever is not cut further. Orbax' index has its own checksums
(OCDBT), and a missing chunk is an error, not zeros.

`switchx checkpoint verify` reads every part back from the disk, each process its share
(verify.py). A CRC-32 of values finds what one of files finds, and also what goes wrong between
the devices' memory and the disk. It does not cover Orbax' descriptions of arrays, so these are
compared with the lists by shape and dtype; at the end all arrays are opened as in a restore.
Older checkpoints have a CRC-32 of every file and no lists: for them, both read the files.
"""

import concurrent.futures
import dataclasses
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint._src.metadata import array_metadata_store

from switchx.object_store import Folder, as_folder, files_in
from switchx.tree import named_leaves
from switchx.whole_folders import checksum_of, flush, read_manifest

MANIFEST = "manifest.json"  # the file of a checkpoint, see manifest.py
LISTS = "checksums"  # the folder of the lists in an item
_LIST_CHECKSUM = "crc32"
# Least size of a slice of a shard that several devices hold: each slice is a program
# to compile, and anything smaller is written whole in less time than that takes.
LEAST_SLICE_BYTES = 1 << 20
# zlib releases the interpreter's lock while it computes, 1 to 7 GB/s per thread.
_NUM_THREADS = min(8, os.cpu_count() or 1)

Index = tuple[slice, ...]


class DamagedCheckpoint(ValueError):
    """Arrays read differ from those saved; all processes that read together raise this.

    Attributes:
        fault: a clause that begins with "its".
    """

    def __init__(self, path: Folder, fault: str):
        super().__init__(
            f"checkpoint {path} is damaged: {fault}; `switchx checkpoint verify` names all "
            "faults. Use another step; training goes on from an older one by itself"
        )
        self.fault = fault


def crc32_of(array: np.ndarray) -> int:
    """CRC-32 of an array's values, in row-major order."""
    checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    release(array)
    return checksum


def release(array: np.ndarray) -> None:
    """Gives back the memory of an array that is mapped from a file; a later use reads the file
    again. Other arrays stay as they are."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


class OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax' handler for NumPy arrays that do not change: it writes them one after the other,
    where Orbax itself copies all arrays and holds all their files in memory."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
        args = [ocp.SaveArgs()] * len(values) if args is None else args
        for value, info, one in zip(values, infos, args, strict=True):
            for written in await super().serialize([value], [info], [one]):
                written.result()
            release(value)
        return []


def own_parts(leaf: jax.Array | np.ndarray) -> list[tuple[Index, Any]]:
    """The parts of one array that this process writes, each on the device that has it.

    Together the processes have every element once. A random key is treated as its words.
    """
    if not isinstance(leaf, jax.Array):
        whole = tuple(slice(0, size) for size in leaf.shape)
        return [(whole, leaf)] if jax.process_index() == 0 else []
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    indices = leaf.sharding.devices_indices_map(leaf.shape).values()
    num_replicas = len(indices) // len({bounds_of(index, leaf.shape) for index in indices})
    shards, parts = leaf.addressable_shards, []
    sizes = shards[0].data.shape
    axis = next((a for a, size in enumerate(sizes) if size % num_replicas == 0), None)
    if math.prod(sizes) // num_replicas * leaf.dtype.itemsize < LEAST_SLICE_BYTES:
        axis = None
    for shard in shards:
        index = tuple(slice(*bounds) for bounds in bounds_of(shard.index, leaf.shape))
        if num_replicas == 1:
            parts.append((index, shard.data))
        elif axis is not None:
            rows = sizes[axis] // num_replicas
            own = slice(shard.replica_id * rows, (shard.replica_id + 1) * rows)
            first = index[axis].start
            at = slice(first + own.start, first + own.stop)
            parts.append((index[:axis] + (at,) + index[axis + 1 :], _rows(shard, axis, own)))
        elif shard.replica_id == 0:
            parts.append((index, shard.data))
    return parts


def bounds_of(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Start and stop of a part in each dimension."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _rows(shard, axis: int, rows: slice) -> jax.Array | np.ndarray:
    if shard.data.sharding.memory_kind == "pinned_host":  # XLA slices its layouts badly
        return np.asarray(shard.data)[(slice(None),) * axis + (rows,)]
    # The array is on one device, and must not be mixed with the mesh set around the caller.
    (device,) = shard.data.devices()
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("one",))):
        return jax.lax.slice_in_dim(shard.data, rows.start, rows.stop, axis=axis)


class ChecksummedArrays(ocp.handlers.StandardCheckpointHandler):
    """Orbax' handler for an item of arrays that also writes this process' list of checksums.

    Attributes:
        hashed_bytes: bytes of the parts that were hashed, in all saves of this process.
        written_bytes: bytes of the files that were written in these saves; process 0 also
            writes the joint index.
    """

    def __init__(self, numpy: ocp.type_handlers.NumpyHandler | None = None):
        """Writes NumPy arrays with the given handler, or as Orbax does."""
        super().__init__()
        arrays = ocp.type_handlers.ArrayHandler(
            min_slice_bytes_for_replica_parallel=LEAST_SLICE_BYTES,
            array_metadata_store=array_metadata_store.Store(),  # as by default; keys need it
        )
        registry = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, numpy or ocp.type_handlers.NumpyHandler()), (jax.Array, arrays)
        )
        self._impl = ocp.handlers.PyTreeCheckpointHandler(type_handler_registry=registry)
        self.hashed_bytes = self.written_bytes = 0
        # One array at a time, where they are written one at a time.
        threads = _NUM_THREADS if numpy is None else 1
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        self._lists = concurrent.futures.ThreadPoolExecutor()
        self._writing: list[concurrent.futures.Future] = []  # one list for each item

    async def async_save(self, directory, item=None, save_args=None, args=None):
        """Saves as the parent does; one more future is done when the list is on the disk."""
        leaves = named_leaves(args.item)
        parts = {name: own_parts(leaf) for name, leaf in leaves.items()}
        for _, data in (each for own in parts.values() for each in own):
            if isinstance(data, jax.Array):
                data.copy_to_host_async()
        # JAX keeps the host copy of a shard with it, and Orbax uses the same copy.
        on_host = {
            name: [(index, np.asarray(data)) for index, data in own]
            for name, own in parts.items()
        }
        commits = await super().async_save(directory, item, save_args, args)
        described = {
            name: {
                "shape": list(_stored(leaves[name]).shape),
                "dtype": str(own[0][1].dtype),
                "parts": [(index, self._pool.submit(crc32_of, x)) for index, x in own],
            }
            for name, own in on_host.items()
            if own
        }
        self.hashed_bytes += sum(x.nbytes for own in on_host.values() for _, x in own)
        folder = as_folder(getattr(directory, "path", directory))
        writing = self._lists.submit(self._write_list, folder, commits, described)
        self._writing.append(writing)
        return [*commits, writing]

    def has_failed(self) -> bool:
        """Whether it is already known that this process cannot write its part of a save."""
        return any(each.done() and each.exception() for each in self._writing)

    def wait(self, seconds: float) -> None:
        """Returns when this process has written its part; raises the error that prevented it.

        Orbax would report it only after a barrier that the other processes do not reach.

        Raises:
            TimeoutError: writing takes longer.
            Exception: the storage's error.
        """
        writing, self._writing = self._writing, []
        concurrent.futures.wait(writing, seconds)
        for each in writing:
            each.result(0)

    def _write_list(self, folder: Folder, commits: list, described: dict) -> None:
        for each in described.values():
            each["parts"] = [
                [[(at.start, at.stop) for at in index], crc.result()]
                for index, crc in each["parts"]
            ]
        for commit in commits:
            commit.result()
        process, count = jax.process_index(), jax.process_count()
        own = f"ocdbt.process_{process}"
        names = [f"{own}/{name}" for name in files_in(folder / own)]
        if (folder / (metadata := f"array_metadatas/process_{process}")).exists():
            names.append(metadata)
        files = {name: flush(folder / name) for name in sorted(names)}
        content: dict[str, Any] = {"files": files, "arrays": described}
        content |= {_LIST_CHECKSUM: checksum_of(content, _LIST_CHECKSUM)}
        path = folder / LISTS / f"process_{process}_of_{count}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
        flush(path)
        self.written_bytes += sum(files.values())

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()
        self._lists.shutdown()
        super().close()


def _stored(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf


@ocp.args.register_with_handler(ChecksummedArrays, for_save=True, for_restore=True)
@dataclasses.dataclass
class SaveArrays(ocp.args.StandardSave):
    """An item of arrays, which tells Orbax that `ChecksummedArrays` saves it."""


@dataclasses.dataclass(frozen=True)
class ListedArray:
    """The entries of all processes' lists for one array.

    Attributes:
        parts: start and stop of each part in each dimension, with its CRC-32.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: list[tuple[Index, int]]

    @property
    def num_listed(self) -> int:
        """Number of elements in all listed parts."""
        return sum(math.prod(at.stop - at.start for at in index) for index, _ in self.parts)


def read_lists(item: Folder) -> tuple[dict[str, ListedArray], dict[str, int]]:
    """Reads arrays by name, and sizes of files by their names in the item.

    Both are empty for an item that was saved without lists.

    Raises:
        DamagedCheckpoint: a list is missing or damaged.
    """
    arrays: dict[str, ListedArray] = {}
    files: dict[str, int] = {}
    for name in list_names(item):
        try:
            content = read_manifest(item / LISTS, name, _LIST_CHECKSUM)
            files |= content["files"]
            for array, each in content["arrays"].items():
                listed = ListedArray(tuple(each["shape"]), each["dtype"], [])
                listed = arrays.setdefault(array, listed)
                listed.parts.extend(
                    (tuple(slice(*map(int, bounds)) for bounds in index), crc)
                    for index, crc in each["parts"]
                )
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DamagedCheckpoint(
                item.parent, f"its file {item.name}/{LISTS}/{name} is damaged"
            ) from None
    return arrays, files


def description_faults(item: Folder, stored: dict[str, Any]) -> list[str]:
    """Differences between Orbax' description of an item's arrays and the lists.

    Args:
        stored: Orbax' description of the arrays, by name, with shape and dtype.
    """
    listed, _ = read_lists(item)
    if not listed:
        return []
    actual = {
        name: f"{_stored(leaf).dtype}{list(_stored(leaf).shape)}"
        for name, leaf in stored.items()
    }
    wanted = {name: f"{each.dtype}{list(each.shape)}" for name, each in listed.items()}
    return [
        f"its array {item.name}/{name} is {actual.get(name, 'missing')}, and was saved as "
        f"{wanted.get(name, 'nothing')}"
        for name in sorted(actual.keys() | wanted.keys())
        if actual.get(name) != wanted.get(name)
    ]


def list_names(item: Folder) -> list[str]:
    """Names of the lists that an item has.

    Raises:
        DamagedCheckpoint: a process' list is missing.
    """
    found = {path.name for path in (item / LISTS).glob("process_*_of_*.json")}
    if not found:
        return []
    count = int(min(found).removesuffix(".json").rpartition("_")[2])
    wanted = [f"process_{index}_of_{count}.json" for index in range(count)]
    if found != set(wanted):
        raise DamagedCheckpoint(
            item.parent,
            f"its {item.name}/{LISTS} has {', '.join(sorted(found)[:3])}, and not one list of "
            f"each of {count} processes",
        )
    return wanted


def require_unchanged(path: Folder, item: str, leaves: dict[str, Any]) -> None:
    """Checks arrays that were read against the checksums of the parts that this process holds.

    Where several processes run, all of them call this. A part that several devices hold is
    compared by one of them.

    Args:
        path: path of the checkpoint.
        leaves: arrays of one item, by their names in it and as they are stored.

    Raises:
        DamagedCheckpoint: some arrays differ, here or in another process.
    """
    listed, _ = read_lists(path / item)
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        compared = [
            (name, pool.submit(lambda x=x, crc=crc: crc32_of(x) == crc))
            for name, leaf in leaves.items()
            # JAX reads float64 as float32 where 64 bits are not enabled.
            if name in listed and listed[name].dtype == str(_stored(leaf).dtype)
            for x, crc in _held(leaf, listed[name].parts)
        ]
    changed = dict.fromkeys(name for name, is_same in compared if not is_same.result())
    require_of_all(
        path, [f"its array {item}/{name} is not what was saved (CRC-32)" for name in changed]
    )


def _held(leaf, parts: list[tuple[Index, int]]) -> Iterator[tuple[np.ndarray, int]]:
    """The parts that are whole in one of this process' shards, and their checksums."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        shards = [
            (bounds_of(each.index, leaf.shape), each.data)
            for each in leaf.addressable_shards
            if each.replica_id == 0
        ]
    else:
        shards = [(tuple((0, size) for size in leaf.shape), leaf)]
    for bounds, data in shards:
        inside = [
            (index, crc)
            for index, crc in parts
            if all(
                first <= at.start and at.stop <= last
                for at, (first, last) in zip(index, bounds, strict=True)
            )
        ]
        on_host = np.asarray(data) if inside else None
        for index, crc in inside:
            at = tuple(
                slice(each.start - a, each.stop - a)
                for each, (a, _) in zip(index, bounds, strict=True)
            )
            yield on_host[at], crc


def require_of_all(path: Folder, faults: list[str]) -> None:
    """Raises DamagedCheckpoint in every process if any process has faults."""
    total = len(faults)
    if jax.process_count() > 1:
        total = int(np.sum(multihost_utils.process_allgather(np.int32(len(faults)))))
    if total:
        seen = "; ".join(faults[:3]) or "its part that another process read has changed"
        raise DamagedCheckpoint(path, seen)


def gathered(values: list) -> list:
    """The JSON values of all processes, in the order of the processes."""
    if jax.process_count() == 1:
        return values
    data = np.frombuffer(json.dumps(values).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [
        value
        for row, size in zip(rows, sizes, strict=True)
        for value in json.loads(bytes(row[:size]))
    ]
