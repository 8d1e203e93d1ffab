# SPDX-License-Identifier: Apache-2.0
"""The Orbax items of a checkpoint: `params`, `train_state` (the rest) and `data`.

The first two are nested dictionaries by name, so that any Orbax reader can open them and the
parameters can be read alone. So is `average`, in a run that averages them; `data` is the data
iterator's state, one JSON file per process.
`manifest.json` (manifest.py) has the checkpoint's step and the list of its files. For a run
with experts on a disk, `experts` is a snapshot of their records (storage/snapshot.py): one
record for each expert and layer, whose arrays have the names of the state's arrays that they
are parts of.

Dims: N layers of a scanned stack, E experts
"""

import base64
import collections
import functools
import itertools
import logging
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import SingleDeviceSharding

from switchx.checkpoint.parts import (
    MANIFEST,
    DamagedCheckpoint,
    description_faults,
    list_names,
    require_of_all,
    require_unchanged,
)
from switchx.object_store import Folder, kvstore, read_json_object
from switchx.storage.record import RecordError
from switchx.storage.snapshot import Snapshot
from switchx.tree import Tree, named_leaves, nested
from switchx.whole_folders import checksum_of, damages, is_damage, read_manifest

RECORDS = "experts"
# TensorStore's words for errors that are not the data's fault.
_OF_STORAGE = (
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED"),
    *("UNAUTHENTICATED", "ABORTED", "CANCELLED"),
)
# What matters in Orbax' log is also raised, and our errors and warnings then report it.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)


def to_items(state: Tree) -> dict[str, Tree]:
    """The items, nested dictionaries by name, of a state that has `params`."""
    leaves = {item_name(name): leaf for name, leaf in named_leaves(state).items()}
    return {"params": {}, "train_state": {}} | nested(leaves)


def item_name(name: str) -> str:
    """The name that a leaf of the state has in the items: for `step`, `train_state/step`."""
    is_own = name.startswith(("params/", "average/"))
    return name if is_own else f"train_state/{name}"


def from_items(items: dict[str, Tree], like: Tree) -> Tree:
    """The inverse of `to_items`, in the structure of `like`."""
    named = named_leaves(items)
    leaves = {name.removeprefix("train_state/"): leaf for name, leaf in named.items()}
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(structure, [leaves[name] for name in named_leaves(like)])


def num_updates(state: Tree) -> int:
    """Number of updates that the optimizer of a state, or of a `train_state`, has counted.

    Schedules follow this count, which continues the source's with `InitConfig.optimizer`. Where
    an optimizer has no count, it is the number of steps that were not skipped.
    """
    leaves = named_leaves(state)
    names = (name for name in leaves if name.startswith("opt_state/"))
    counts = [int(leaves[name]) for name in names if name.endswith("/count")]
    return max(counts, default=int(leaves["step"]) - int(leaves["skipped"]))


def _reporting_deletion(read):
    """Wraps `read` of a checkpoint, to report in its errors a deletion in the meantime."""

    @functools.wraps(read)
    def reading(path: Folder, *arguments):
        try:
            return read(path, *arguments)
        except (ValueError, OSError) as error:
            if path.is_dir():
                raise
            raise ValueError(
                f"checkpoint {path} was deleted while it was read, as a run that trains keeps "
                "the newest and the best; run the same command again, or give a step that stays"
            ) from error

    return reading


def items_of(path: Folder) -> list[str]:
    """Which items of arrays a checkpoint has; a converted model's may have only parameters."""
    return [item for item in ("params", "train_state", "average") if (path / item).is_dir()]


@_reporting_deletion
def stored_items(path: Folder) -> dict[str, Tree]:
    """Orbax' description of each array: `shape`, `dtype`, and its `sharding` when saved.

    Raises:
        DamagedCheckpoint: an item's metadata cannot be read.
    """
    stored = _described(path, items_of(path))
    records = {n: leaf for n, leaf in record_leaves(path).items() if n.split("/")[0] in stored}
    return nested(named_leaves(stored) | records)


def has_records(path: Folder) -> bool:
    """Whether a checkpoint's experts are stored as records."""
    return (path / RECORDS).is_dir()


def require_records_unchanged(path: Folder) -> None:
    """Checks the bytes of the records, which a store then links without reading them.

    Where several processes run, all of them call this, and each reads its share.

    Raises:
        DamagedCheckpoint: some records have changed, here or in another process.
    """
    try:
        faults = _file_faults(path / RECORDS, Snapshot(path / RECORDS).files)
    except RecordError as error:
        faults = [str(error)]
    require_of_all(path, faults)


def _file_faults(folder: Folder, files: dict[str, list]) -> list[str]:
    """Faults in this process' share of the files of a folder, each of which is read."""
    ordered = sorted(files.items())
    mine = dict(ordered[jax.process_index() :: jax.process_count()])
    return list(damages(folder, mine, "crc32"))


def record_leaves(path: Folder) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays `[N, E, ...]` that a checkpoint has in records, by name in the items."""
    if not has_records(path):
        return {}
    layout = Snapshot(path / RECORDS).layout
    repeats = collections.Counter(name for types in layout.layers.values() for name in types)
    return {
        item_name(name): jax.ShapeDtypeStruct(
            (repeats[name], layout.num_experts, *each.shape), np.dtype(each.dtype)
        )
        for types in layout.layers.values()
        for name, each in types.items()
    }


def _read_records(path: Folder, names: set[str]) -> dict[str, np.ndarray]:
    """Reads the leaves of `record_leaves` with these names, all from the same update.

    Raises:
        RecordError: a record is missing or damaged.
        ValueError: the records are from different updates.
    """
    snapshot = Snapshot(path / RECORDS)
    layout, leaves = snapshot.layout, record_leaves(path)
    arrays = {name: np.empty(leaves[name].shape, leaves[name].dtype) for name in names}
    next_repeat: collections.Counter[str] = collections.Counter()
    updates = set()
    for number, types in enumerate(layout.layers.values()):
        for e in range(layout.num_experts):
            record = snapshot.read(number * layout.num_experts + e)
            updates.add(record.updates)
            for name, array in record.arrays.items():
                if (item := item_name(name)) in names:
                    arrays[item][next_repeat[name], e] = array
        next_repeat.update(types.keys())
    if len(updates) > 1:
        raise ValueError(
            f"checkpoint {path} has experts after {min(updates)} to {max(updates)} updates; "
            "restore another checkpoint"
        )
    return arrays


@_reporting_deletion
def read_items(path: Folder, targets: dict[str, Tree | None]) -> dict[str, Tree]:
    """Reads items of a checkpoint on any mesh, whichever mesh saved it.

    Args:
        path: path of the checkpoint.
        targets: for each item, arrays or ShapeDtypeStructs whose shardings say where the
            leaves go (without one: the default device), or None for NumPy arrays.

    Raises:
        ValueError: leaves are missing, extra, or of another shape or dtype; all are listed.
        DamagedCheckpoint: the arrays cannot be read, or are not what was saved.
    """
    records = record_leaves(path)
    stored = _described(path, targets)
    with ocp.StandardCheckpointer() as reader:
        for item, leaves in stored.items():
            require_of_all(path, description_faults(path / item, named_leaves(leaves)))
        arrays, wanted = named_leaves(stored), {}
        for item, target in targets.items():
            if target is None:
                whole = nested(arrays | records)[item]
                leaves = jax.tree.map(_on_host, whole)
            else:
                leaves = jax.tree.map(abstract, target)
            wanted |= named_leaves({item: leaves})
        # A run with experts on a disk reads its records itself.
        records = {name: leaf for name, leaf in records.items() if name in wanted}
        require_same_leaves(wanted, arrays | records, f"checkpoint {path}")
        in_orbax = nested({name: leaf for name, leaf in wanted.items() if name in arrays})
        read = {item: _restored(reader, path / item, in_orbax[item]) for item in targets}
    for item, tree in read.items():
        require_unchanged(path, item, named_leaves(tree))
    _require_files_unchanged(path, targets)
    if not records:
        return read
    of_experts = _read_records(path, set(records))
    placed = {name: _placed(array, wanted[name]) for name, array in of_experts.items()}
    return nested(named_leaves(read) | placed)


def _require_files_unchanged(path: Folder, items: Iterable[str]) -> None:
    """Checks the files of items without lists of checksums, as in older checkpoints."""
    if bare := tuple(f"{item}/" for item in items if not list_names(path / item)):
        files = read_manifest(path, MANIFEST, "crc32")["files"]
        files = {name: entry for name, entry in files.items() if name.startswith(bare)}
        require_of_all(path, _file_faults(path, files))


class StoredArray:
    """An array of a checkpoint, or a part of one, that is read when NumPy asks for it.

    Attributes:
        place: position in the order in which reading the arrays is cheapest.
    """

    def __init__(self, shape: tuple[int, ...], dtype, place: tuple[int, ...], read):
        self.shape, self.dtype, self.place, self._read = shape, dtype, place, read

    def __getitem__(self, index: int) -> "StoredArray":
        place = (*self.place, index)
        return StoredArray(self.shape[1:], self.dtype, place, lambda: self._read()[index])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self._read())  # and not a NumPy scalar


_TOGETHER_BYTES = 1 << 25  # small arrays are read together: each read opens the checkpoint


@_reporting_deletion
def stored_arrays(path: Folder, targets: dict[str, Any]) -> dict[str, StoredArray]:
    """All arrays of a checkpoint's parameters, by their names in its items.

    What was read last is kept: one array, or several small ones next to each other.

    Args:
        targets: ShapeDtypeStructs with shardings, of the shapes and dtypes that are stored.

    Raises:
        ValueError: as for `read_items`; `DamagedCheckpoint` also when an array is read.
    """
    described, names = _described(path, ["params"]), list(targets)
    require_of_all(path, description_faults(path / "params", named_leaves(described["params"])))
    records = {n: leaf for n, leaf in record_leaves(path).items() if n in targets}
    require_same_leaves(targets, named_leaves(described) | records, f"checkpoint {path}")
    _require_files_unchanged(path, ["params"])
    held: dict[str, np.ndarray] = {}

    def read(at: int) -> np.ndarray:
        if names[at] not in held:
            held.clear()
            sizes = (4 * math.prod(targets[name].shape) for name in names[at:])
            ends = itertools.takewhile(
                lambda end: end <= _TOGETHER_BYTES, itertools.accumulate(sizes)
            )
            taken = names[at : at + max(1, len(list(ends)))]
            leaves = read_leaves(path, {name: targets[name] for name in taken})
            held.update({name: np.asarray(leaf) for name, leaf in leaves.items()})
        return held[names[at]]

    return {
        name: StoredArray(leaf.shape, leaf.dtype, (at,), functools.partial(read, at))
        for at, (name, leaf) in enumerate(targets.items())
    }


@_reporting_deletion
def read_leaves(path: Folder, targets: dict[str, Any]) -> dict[str, jax.Array]:
    """Reads some arrays of a checkpoint, by their names in its items, and nothing else.

    Args:
        targets: ShapeDtypeStructs with shardings, of the shapes and dtypes that are stored.
    """
    records = {name for name in record_leaves(path) if name in targets}
    read = {}
    for item in items_of(path):
        own = {n: leaf for n, leaf in targets.items() if n.split("/")[0] == item}
        wanted = nested({n: leaf for n, leaf in own.items() if n not in records}).get(item)
        if wanted is not None:
            arguments = ocp.args.PyTreeRestore(
                item=wanted,
                restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                partial_restore=True,
            )
            with ocp.PyTreeCheckpointer() as reader:
                restored = named_leaves(_restored(reader, path / item, args=arguments))
            require_unchanged(path, item, restored)
            read |= {f"{item}/{name}": leaf for name, leaf in restored.items()}
    of_experts = _read_records(path, records) if records else {}
    return read | {name: _placed(array, targets[name]) for name, array in of_experts.items()}


def require_opens(path: Folder) -> None:
    """Opens every array as `read_items` does, and reads one number from each.

    Raises:
        DamagedCheckpoint: an array cannot be opened.
    """
    with ocp.StandardCheckpointer() as reader:
        for item, leaves in _described(path, items_of(path)).items():
            _restored(reader, path / item, jax.tree.map(_first_number, leaves), strict=False)


def _first_number(leaf) -> jax.ShapeDtypeStruct:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    shape = leaf.shape if is_key else tuple(min(size, 1) for size in leaf.shape)
    return abstract(jax.ShapeDtypeStruct(shape, leaf.dtype))


def _described(path: Folder, items: Iterable[str]) -> dict[str, Tree]:
    """Orbax' description of the arrays of items."""
    described = {}
    with ocp.StandardCheckpointer() as reader:
        for item in items:
            base = kvstore(path / item)
            try:
                # Orbax says less about an unreadable index, and says it once for every array.
                store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
                store.list().result()
                metadata = reader.metadata(path / item).item_metadata
            except Exception as error:
                raise _unreadable(path / item, error) from error
            if metadata is None:
                raise _unreadable(path / item, "its _METADATA is missing or damaged")
            described[item] = metadata.tree
    return described


def _restored(reader, item: Folder, *target, **arguments) -> Tree:
    try:
        return reader.restore(item, *target, **arguments)
    except Exception as error:
        raise _unreadable(item, error) from error


def _unreadable(item: Folder, error: Exception | str) -> Exception:
    """The error to raise, as Orbax raises whatever its storage or a device raises."""
    fault = f"its arrays of {item.name} cannot be read: {' '.join(str(error).split())[:300]}"
    if _is_no_damage(error):
        return OSError(
            f"checkpoint {item.parent}: {fault}; nothing says that it is damaged: run the same "
            "command again, with what it lacks"
        )
    if jax.process_count() == 1:
        return DamagedCheckpoint(item.parent, fault)
    # The other processes may have read their parts, and be waiting for this one.
    return ValueError(
        f"checkpoint {item.parent}: {fault}; `switchx checkpoint verify` says whether it is "
        "damaged. Move it away to go on from an older one"
    )


def _is_no_damage(error: Exception | str) -> bool:
    if isinstance(error, OSError):
        return not is_damage(error)
    is_of_device = isinstance(error, MemoryError | jax.errors.JaxRuntimeError)
    return is_of_device or str(error).startswith(_OF_STORAGE)


def _placed(array: np.ndarray, target) -> jax.Array | np.ndarray:
    if isinstance(target, np.ndarray):
        return array
    return jax.make_array_from_callback(array.shape, target.sharding, lambda at: array[at])


def abstract(leaf) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf; without a sharding, the default device."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        (device,) = jnp.zeros(()).devices()
        sharding = SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _on_host(leaf) -> np.ndarray:
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # asks Orbax for a NumPy array


def require_same_leaves(expected: dict[str, Any], got: dict[str, Any], source: str) -> None:
    """Raises one ValueError that names every missing, extra and differently formed leaf."""
    names = sorted(expected.keys() | got.keys())
    pairs = [(name, _form(expected.get(name)), _form(got.get(name))) for name in names]
    problems = [
        f"  {name}: expected {wanted}, got {found}"
        for name, wanted, found in pairs
        if wanted != found
    ]
    if problems:
        listing = "\n".join(problems)
        raise ValueError(
            f"{source} does not fit; {len(problems)} of {len(names)} arrays differ:\n"
            f"{listing}\nuse the configuration that it was made with, or another source"
        )


def _form(leaf) -> str:
    if leaf is None:
        return "nothing"
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # Orbax stores a key as its words
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return f"{leaf.dtype}{list(leaf.shape)}"


def data_file() -> str:
    """Name of this process' file in the item `data`."""
    return f"process_{jax.process_index()}_of_{jax.process_count()}.json"


def encode_data_state(state: Any) -> dict[str, Any]:
    """An iterator's state, bytes or anything that JSON takes, as JSON with its own CRC-32."""
    if isinstance(state, bytes):
        content = {"base64": base64.b64encode(state).decode()}
    else:
        content = {"json": state}
    return content | {"crc32": checksum_of(content, "crc32")}


def decode_data_state(content: dict[str, Any]) -> Any:
    """The inverse of `encode_data_state`."""
    return base64.b64decode(content["base64"]) if "base64" in content else content["json"]


def read_data_states(path: Folder) -> list[Any]:
    """The iterator states in a checkpoint, one for each process that saved it.

    Raises:
        ValueError: a process' state is missing.
        DamagedCheckpoint: a process' state has changed.
    """
    files = {file.name: file for file in sorted((path / "data").glob("process_*_of_*.json"))}
    count = int(next(iter(files), "of_0.json").removesuffix(".json").rpartition("_")[2])
    wanted = [f"process_{index}_of_{count}.json" for index in range(count)]
    if set(wanted) != files.keys() or not wanted:
        raise ValueError(
            f"checkpoint {path} has data iterator states {', '.join(files) or 'none'}, not one "
            "of each process that saved it; restore another checkpoint"
        )
    return [decode_data_state(_data_content(files[name])) for name in wanted]


def _data_content(file: Folder) -> dict[str, Any]:
    try:
        content = read_json_object(file)
        claimed = content.pop("crc32", None)  # earlier versions had it only in the manifest
        is_same = claimed in (None, checksum_of(content, "crc32"))
        if not is_same or content.keys() not in ({"json"}, {"base64"}):
            raise ValueError
    except (ValueError, AttributeError):
        raise DamagedCheckpoint(
            file.parents[1], f"its file data/{file.name} has changed since it was written"
        ) from None
    return content
