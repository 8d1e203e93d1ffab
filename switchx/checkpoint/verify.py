# SPDX-License-Identifier: Apache-2.0
"""Verifying checkpoints: everything that can be wrong with one, fault by fault.

Several processes read it together, each its share of the files and of the arrays' parts; a
process has no more than one part of an array in memory. Damaged bytes are found by the
checksums in the lists (parts.py), or by those of the files in an older checkpoint. A checkpoint
whose bytes are as written may still belong to another model, hold a value that is not finite,
or lack rows of the data.
"""

import collections
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from switchx import whole_folders
from switchx.checkpoint.adapter_run import AdapterRecord
from switchx.checkpoint.items import (
    RECORDS,
    has_records,
    item_name,
    items_of,
    read_data_states,
    record_leaves,
    require_opens,
    require_same_leaves,
    stored_items,
)
from switchx.checkpoint.manifest import damages, read_manifest
from switchx.checkpoint.parts import (
    Index,
    ListedArray,
    crc32_of,
    description_faults,
    gathered,
    read_lists,
)
from switchx.checkpoint.restore import stored_model
from switchx.checkpoint.run_folder import RunFolder, read_config, read_model_config
from switchx.data.loader import merge_states
from switchx.models.adapters import abstract_adapters
from switchx.models.params import abstract_params
from switchx.object_store import Folder, kvstore
from switchx.storage.record import RecordError
from switchx.storage.snapshot import Snapshot
from switchx.tree import named_leaves


def checkpoint_faults(run: RunFolder, step: int) -> list[str]:
    """All faults of one checkpoint, each a sentence; empty if it is sound.

    The processes, which all call this and get the same result, together read every byte once.
    The contents of damaged files are not examined.
    """
    path = run.checkpoints / str(step)
    if faults := list(damages(path)):
        return faults
    files = read_manifest(path).files
    hashed = [name for name, (_, crc) in files.items() if crc is not None]
    share = _share({name: files[name][0] for name in hashed})
    mine = whole_folders.damages(path, {name: files[name] for name in share}, "crc32")
    if faults := gathered(list(mine)):
        return faults
    if "params" not in items_of(path):
        return ["it has no parameters"]
    try:
        stored = stored_items(path)
        faults = [
            fault
            for item in items_of(path)
            for fault in description_faults(path / item, _in_orbax(path, stored, item))
        ]
    except (ValueError, OSError) as error:  # from Orbax' descriptions and from the lists
        return [getattr(error, "fault", str(error))]
    if faults:
        return faults
    try:
        spec = getattr(AdapterRecord.read(run), "spec", None)
        expected = abstract_params(stored_model(path, read_model_config(run), spec))
        expected = expected if spec is None else abstract_adapters(expected, spec)
        where = "it is not of the run's model: it"
        require_same_leaves(named_leaves(expected), named_leaves(stored["params"]), where)
    except ValueError as error:
        faults += str(error).splitlines()
    faults += _array_faults(path, stored)
    if "train_state" in stored:
        faults += _step_faults(run, path, step)
    if not faults:
        try:
            require_opens(path)
        except (ValueError, OSError) as error:
            faults.append(getattr(error, "fault", str(error)))
    return faults


def _in_orbax(path: Folder, stored: dict, item: str) -> dict[str, Any]:
    """The arrays of an item that are not stored as records."""
    records = record_leaves(path)
    leaves = named_leaves(stored[item]).items()
    return {name: leaf for name, leaf in leaves if f"{item}/{name}" not in records}


def _share(num_bytes: dict[Any, int]) -> list:
    """This process' share; the next largest item goes to the process with the fewest bytes."""
    loads = [0] * jax.process_count()
    mine = []
    for name in sorted(num_bytes, key=lambda name: -num_bytes[name]):  # stable: all agree
        process = loads.index(min(loads))
        loads[process] += num_bytes[name]
        if process == jax.process_index():
            mine.append(name)
    return mine


def _array_faults(path: Folder, stored: dict) -> list[str]:
    """Finds parts that differ from what was saved, and numbers that are not finite."""
    parts: dict[tuple[str, int], tuple[tensorstore.TensorStore, Index, int | None]] = {}
    faults = []
    num_bytes = {}
    sizes = {}
    for item in items_of(path):
        listed, _ = read_lists(path / item)
        for name in _in_orbax(path, stored, item):
            opened = _open(path / item, name)
            each = listed.get(name) or _chunks(opened)
            sizes[name] = math.prod(opened.shape)
            if each.num_listed != sizes[name]:
                faults.append(
                    f"its array {item}/{name} has {sizes[name]} numbers, of which "
                    f"{each.num_listed} are listed"
                )
            for number, (index, crc) in enumerate(each.parts):
                key = f"{item}/{name}", number
                parts[key] = opened, index, crc
                num_bytes[key] = opened[index].size * opened.dtype.numpy_dtype.itemsize
    found: list = []  # faults, and counts of numbers that are not finite, by array
    for key in _share(num_bytes):
        found.append(_part_fault(key[0], *parts[key]))
    found += _record_faults(path)
    bad: collections.Counter[str] = collections.Counter()
    for each in filter(None, gathered(found)):
        if isinstance(each, str):
            faults.append(each)
        else:
            bad[each[0]] += each[1]
    of_records = record_leaves(path).items()
    sizes |= {name.partition("/")[2]: math.prod(leaf.shape) for name, leaf in of_records}
    return [*dict.fromkeys(faults)] + [
        f"{name} has {count} of {sizes[name]} values that are not finite"
        for name, count in bad.items()
    ]


def _open(item: Folder, name: str) -> tensorstore.TensorStore:
    """Opens an array as Orbax stores it. A missing chunk is an error."""
    store = {"driver": "ocdbt", "base": kvstore(item), "path": f"{name.replace('/', '.')}/"}
    spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
    return tensorstore.open(spec, open=True, read=True).result()


def _chunks(array: tensorstore.TensorStore) -> ListedArray:
    """The parts in which an array without lists is read: its chunks."""
    shape, chunk = array.shape, array.chunk_layout.write_chunk.shape or ()  # None for a scalar
    starts = [range(0, size, step) for size, step in zip(shape, chunk, strict=True)]
    parts = [
        tuple(
            slice(start, min(start + step, size))
            for start, step, size in zip(corner, chunk, shape, strict=True)
        )
        for corner in itertools.product(*starts)
    ]
    dtype = str(array.dtype.numpy_dtype)
    return ListedArray(tuple(shape), dtype, [(index, None) for index in parts])


def _part_fault(
    name: str, array: tensorstore.TensorStore, index: Index, crc: int | None
) -> str | tuple[str, int] | None:
    try:
        values = array[index].read().result()
    except Exception as error:  # whatever tensorstore's drivers raise
        reason = " ".join(str(error).split())[:300]
        return f"its array {name} cannot be read: {reason}"
    if crc is not None and crc32_of(values) != crc:
        where = ",".join(f"{at.start}:{at.stop}" for at in index)
        return f"its array {name}[{where}] is not what was saved (CRC-32)"
    return _not_finite(name.partition("/")[2], values)


def _not_finite(name: str, values: np.ndarray) -> tuple[str, int] | None:
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        return None
    bad = int(np.count_nonzero(~np.isfinite(values.astype(np.float32))))
    return (name, bad) if bad else None


def _record_faults(path: Folder) -> list:
    """Faults, as for parts, of this process' share of the records, in unchanged files."""
    if not has_records(path):
        return []
    snapshot = Snapshot(path / RECORDS)
    found = []
    updates = set()
    layout = snapshot.layout
    for key in range(jax.process_index(), layout.num_keys, jax.process_count()):
        try:
            record = snapshot.read(key)
        except RecordError as error:
            found.append(str(error))
            continue
        updates.add(record.updates)
        for name, array in record.arrays.items():
            found.append(_not_finite(item_name(name).partition("/")[2], array))
    if len(updates) > 1:
        found.append(f"its experts are of {min(updates)} to {max(updates)} updates")
    return found


def _step_faults(run: RunFolder, path: Folder, step: int) -> list[str]:
    """Checks that the state and the data are at the folder's step."""
    faults = []
    try:
        saved = int(_open(path / "train_state", "step").read().result())
    except Exception:  # reported with the arrays, if it exists; only a run has it
        saved = step
    if saved != step:
        faults.append(f"its state is of step {saved}, its folder of step {step}")
    return faults + _data_faults(run, path, step)


def _data_faults(run: RunFolder, path: Folder, step: int) -> list[str]:
    """Checks that the data continues where the state does, for each row of a batch."""
    try:
        states = read_data_states(path)
        if not all(isinstance(state, dict) and "cursors" in state for state in states):
            return [] if set(map(type, states)) == {type(None)} else ["its data is no loader's"]
        state = merge_states(states)
    except (ValueError, KeyError) as error:
        return [getattr(error, "fault", str(error))]
    faults, rows = [], read_config(run).get("batch_size")
    if state["step"] != step:
        faults.append(f"its data goes on at step {state['step']}, its state at step {step}")
    missing = set(range(rows or 0)) - set(state["rows"])
    if missing:
        faults.append(f"its data has no state of rows {', '.join(map(str, sorted(missing)))}")
    return faults
