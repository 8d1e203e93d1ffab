# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: the Orbax items `params`, `train_state` (the rest) and `data`.

The first two are nested dictionaries by name, so that any Orbax reader can open them and the
parameters can be read alone, and so is `average`, of a run that averages them; `data` is the
data iterator's state, one JSON file a process.
`manifest.json` says of which step they are, how they scored, and which files there are. Of a
run with experts on a disk, `experts` is a snapshot of their records (storage/snapshot.py): one
an expert and layer, whose arrays have the names of those of the state that they are parts of.

Dims: N layers of a scanned stack, E experts
"""

import base64
import collections
import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterator
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from switchx import manifest
from switchx.storage.snapshot import Snapshot
from switchx.tree import Tree, named_leaves, nested

MANIFEST = "manifest.json"
EXPERTS = "experts"
# Orbax changes these after the manifest is written; nothing is read from them.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")
# What matters of Orbax' log it also raises, and then our errors and warnings say it.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)


def to_items(state: Tree) -> dict[str, Tree]:
    """The items of a state that has `params`: nested dictionaries by name."""
    leaves = {item_name(name): leaf for name, leaf in named_leaves(state).items()}
    return {"params": {}, "train_state": {}} | nested(leaves)


def item_name(name: str) -> str:
    """The name in the items of a leaf of the state: of `step`, `train_state/step`."""
    is_own = name.startswith(("params/", "average/"))
    return name if is_own else f"train_state/{name}"


def from_items(items: dict[str, Tree], like: Tree) -> Tree:
    """The inverse of `to_items`, in the structure of `like`."""
    named = named_leaves(items)
    leaves = {name.removeprefix("train_state/"): leaf for name, leaf in named.items()}
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(structure, [leaves[name] for name in named_leaves(like)])


def items_of(path: pathlib.Path) -> list[str]:
    """Which of the items of arrays a checkpoint has: a converted model's has parameters."""
    return [item for item in ("params", "train_state", "average") if (path / item).is_dir()]


def stored_items(path: pathlib.Path) -> dict[str, Tree]:
    """What Orbax says of each array: `shape`, `dtype`, and `sharding` when it was saved.

    Raises:
        ValueError: an item's metadata cannot be read.
    """
    with ocp.StandardCheckpointer() as reader:
        try:
            stored = {
                item: reader.metadata(path / item).item_metadata.tree for item in items_of(path)
            }
        except Exception as error:
            raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
    records = {n: leaf for n, leaf in _record_leaves(path).items() if n.split("/")[0] in stored}
    return nested(named_leaves(stored) | records)


def has_records(path: pathlib.Path) -> bool:
    """Whether the experts of a checkpoint are records."""
    return (path / EXPERTS).is_dir()


def _record_leaves(path: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays `[N, E, ...]` that a checkpoint has in records, by name in the items."""
    if not has_records(path):
        return {}
    layout = Snapshot(path / EXPERTS).layout
    repeats = collections.Counter(name for types in layout.layers.values() for name in types)
    return {
        item_name(name): jax.ShapeDtypeStruct(
            (repeats[name], layout.num_experts, *each.shape), np.dtype(each.dtype)
        )
        for types in layout.layers.values()
        for name, each in types.items()
    }


def _read_records(path: pathlib.Path, names: set[str]) -> dict[str, np.ndarray]:
    """Those of `_record_leaves` with these names, all of one update.

    Raises:
        RecordError: a record is missing or damaged.
        ValueError: records are of different updates.
    """
    snapshot = Snapshot(path / EXPERTS)
    layout, leaves = snapshot.layout, _record_leaves(path)
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


def read_items(path: pathlib.Path, targets: dict[str, Tree | None]) -> dict[str, Tree]:
    """Items of a checkpoint on any mesh, whichever saved it.

    Args:
        path: of the checkpoint.
        targets: for each item arrays or ShapeDtypeStructs whose shardings say where the
            leaves go (without one: the default device), or None for NumPy arrays.

    Raises:
        ValueError: leaves are missing, extra, or of another shape or dtype; lists all.
    """
    records = _record_leaves(path)
    with ocp.StandardCheckpointer() as reader:
        stored = {item: reader.metadata(path / item).item_metadata.tree for item in targets}
        arrays, wanted = named_leaves(stored), {}
        for item, target in targets.items():
            if target is None:
                whole = nested(arrays | records)[item]
                leaves = jax.tree.map(_on_host, whole)
            else:
                leaves = jax.tree.map(abstract, target)
            wanted |= named_leaves({item: leaves})
        # A run with experts on a disk takes its records itself.
        records = {name: leaf for name, leaf in records.items() if name in wanted}
        require_same_leaves(wanted, arrays | records, f"checkpoint {path}")
        in_orbax = nested({name: leaf for name, leaf in wanted.items() if name in arrays})
        read = {item: reader.restore(path / item, in_orbax[item]) for item in targets}
    if not records:
        return read
    of_experts = _read_records(path, set(records))
    placed = {name: _placed(array, wanted[name]) for name, array in of_experts.items()}
    return nested(named_leaves(read) | placed)


def read_leaves(path: pathlib.Path, targets: dict[str, Any]) -> dict[str, jax.Array]:
    """Some arrays of a checkpoint, by their names in its items, and nothing else of it.

    Args:
        targets: ShapeDtypeStructs with shardings, of the shapes and dtypes that are stored.
    """
    records = {name for name in _record_leaves(path) if name in targets}
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
                read |= named_leaves({item: reader.restore(path / item, args=arguments)})
    of_experts = _read_records(path, records) if records else {}
    return read | {name: _placed(array, targets[name]) for name, array in of_experts.items()}


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
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # asks Orbax for NumPy


def require_same_leaves(expected: dict[str, Any], got: dict[str, Any], source: str) -> None:
    """Raises one ValueError with every missing, extra and differently formed leaf."""
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
    """An iterator's state, bytes or anything that JSON takes, as JSON."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"json": state}


def read_data_states(path: pathlib.Path) -> list[Any]:
    """The iterator states in a checkpoint, of each process that saved it.

    Raises:
        ValueError: one of them is missing.
    """
    files = {file.name: file for file in sorted((path / "data").glob("process_*_of_*.json"))}
    count = int(next(iter(files), "of_0.json").removesuffix(".json").rpartition("_")[2])
    wanted = [f"process_{index}_of_{count}.json" for index in range(count)]
    if set(wanted) != files.keys() or not wanted:
        raise ValueError(
            f"checkpoint {path} has data iterator states {', '.join(files) or 'none'}, not one "
            "of each process that saved it; restore another checkpoint"
        )
    contents = [json.loads(files[name].read_text()) for name in wanted]
    return [
        base64.b64decode(content["base64"]) if "base64" in content else content["json"]
        for content in contents
    ]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps trained.
        score: what keep-best compares, higher is better; None without an evaluation.
        metrics: the evaluation's numbers.
        files: path below the checkpoint -> [bytes, CRC-32].
    """

    step: int
    score: float | None
    metrics: dict[str, float]
    files: dict[str, list[int]] = dataclasses.field(default_factory=dict)


def numbers_of(metrics: dict[str, Any]) -> dict[str, float]:
    """An evaluation's numbers by name, as a checkpoint has them and keep-best names them.

    Those of `tasks` are `tasks/NAME/accuracy`; those of generated texts are named by task and
    metric alone, `glue_cola/matthews_corrcoef`. Lists (by layer) have no number.
    """
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            prefix = "" if name == "texts" else f"{name}/"
            numbers |= {f"{prefix}{inner}": x for inner, x in numbers_of(value).items()}
        elif isinstance(value, Real) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def write_manifest(folder: pathlib.Path, about: Manifest) -> None:
    """Records all files of a checkpoint, flushed to the disk."""
    content = dataclasses.asdict(about)
    known = {}
    if has_records(folder):
        files = Snapshot(folder / EXPERTS).files
        known = {f"{EXPERTS}/{name}": list(each) for name, each in files.items()}
    manifest.write_manifest(
        folder, MANIFEST, content, "crc32", left_out=_COMMIT_FILES, known=known
    )


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises:
        ValueError: it is missing, damaged, or of another step; a clause that says which.
    """
    content = manifest.read_manifest(folder, MANIFEST, "crc32")
    del content["crc32"]
    try:
        about = Manifest(**content)
    except TypeError:
        raise ValueError(f"its {MANIFEST} is damaged") from None
    if str(about.step) != folder.name:
        raise ValueError(f"its {MANIFEST} is of step {about.step}")
    return about


def damages(folder: pathlib.Path, *, checksums: bool) -> Iterator[str]:
    """All that is wrong with the files of a checkpoint, a clause each.

    Args:
        checksums: read every byte; otherwise only that files are there in their sizes.
    """
    try:
        files = read_manifest(folder).files
    except (ValueError, OSError) as error:
        yield str(error) if isinstance(error, ValueError) else f"it cannot be read ({error})"
        return
    yield from manifest.damages(folder, files, "crc32" if checksums else None)


def find_damage(folder: pathlib.Path, *, checksums: bool) -> str | None:
    """The first thing wrong with a checkpoint, or None when it is whole."""
    return next(damages(folder, checksums=checksums), None)
