# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds: the Orbax items `params`, `train_state` (the rest) and `data`.

The first two are nested dictionaries by name, so that any Orbax reader can open them and the
parameters can be read alone; `data` is the data iterator's state, one JSON file a process.
`manifest.json` says of which step they are, how they scored, and which files there are.
"""

import base64
import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from switchx import manifest
from switchx.tree import Tree, named_leaves

MANIFEST = "manifest.json"
# Orbax changes these after the manifest is written; nothing is read from them.
_COMMIT_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")
# What matters of Orbax' log it also raises, and then our errors and warnings say it.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)


def to_items(state: Tree) -> dict[str, Tree]:
    """The items of a state that has `params`: nested dictionaries by name."""
    items = {"params": {}, "train_state": {}}
    for name, leaf in named_leaves(state).items():
        path = name if name.startswith("params/") else f"train_state/{name}"
        *parents, last = path.split("/")
        node = items
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return items


def from_items(items: dict[str, Tree], like: Tree) -> Tree:
    """The inverse of `to_items`, in the structure of `like`."""
    named = named_leaves(items)
    leaves = {name.removeprefix("train_state/"): leaf for name, leaf in named.items()}
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(structure, [leaves[name] for name in named_leaves(like)])


def items_of(path: pathlib.Path) -> list[str]:
    """Which of the items of arrays a checkpoint has: a converted model's has parameters."""
    return [item for item in ("params", "train_state") if (path / item).is_dir()]


def stored_items(path: pathlib.Path) -> dict[str, Tree]:
    """What Orbax says of each array: `shape`, `dtype`, and `sharding` when it was saved.

    Raises:
        ValueError: an item's metadata cannot be read.
    """
    with ocp.StandardCheckpointer() as reader:
        try:
            return {
                item: reader.metadata(path / item).item_metadata.tree for item in items_of(path)
            }
        except Exception as error:
            raise ValueError(f"checkpoint {path} cannot be read: {error}") from error


def read_items(path: pathlib.Path, targets: dict[str, Tree | None]) -> dict[str, Tree]:
    """Items of a checkpoint on any mesh, whichever saved it.

    Args:
        path: of the checkpoint.
        targets: for each item arrays or ShapeDtypeStructs whose shardings say where the
            leaves go (without one: the first device), or None for NumPy arrays.

    Raises:
        ValueError: leaves are missing, extra, or of another shape or dtype; lists all.
    """
    with ocp.StandardCheckpointer() as reader:
        stored = {item: reader.metadata(path / item).item_metadata.tree for item in targets}
        targets = {
            item: jax.tree.map(_on_host, stored[item])
            if target is None
            else jax.tree.map(abstract, target)
            for item, target in targets.items()
        }
        require_same_leaves(named_leaves(targets), named_leaves(stored), f"checkpoint {path}")
        return {item: reader.restore(path / item, target) for item, target in targets.items()}


def abstract(leaf) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf; without a sharding, the first device."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
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


def write_manifest(folder: pathlib.Path, about: Manifest) -> None:
    """Records all files of a checkpoint, flushed to the disk."""
    content = dataclasses.asdict(about)
    manifest.write_manifest(folder, MANIFEST, content, "crc32", left_out=_COMMIT_FILES)


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
