# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: finding complete ones, their parameters, and items on any mesh.

Nothing here changes the folder. Where several processes run, all of them call each function.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from switchx.checkpoint.adapter_run import AdapterRecord
from switchx.checkpoint.items import abstract, read_items, stored_arrays, stored_items
from switchx.checkpoint.manifest import MANIFEST, find_damage, read_manifest, scores_of
from switchx.checkpoint.run_folder import RunFolder, read_config
from switchx.data.tokenizers import Vocabulary
from switchx.data.vocabularies import load_vocabulary
from switchx.fields import require
from switchx.models.adapters import LoRASpec, abstract_adapters, merged
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.models.unroll import scanned_blocks, unrolled_blocks
from switchx.object_store import Folder, way_out
from switchx.partitioning.mesh import cpu_device
from switchx.tree import Tree, named_leaves, nested

logger = logging.getLogger(__name__)


def checkpoint_paths(checkpoints: Folder) -> list[Folder]:
    """The paths `<checkpoints>/<step>`, newest first, complete or not."""
    if not checkpoints.is_dir():
        return []
    steps = (path for path in checkpoints.iterdir() if path.name.isdecimal())
    return sorted(steps, key=lambda path: int(path.name), reverse=True)


def warn_skipped(path: Folder, damage: str) -> None:
    logger.warning("checkpoint %s is skipped: %s", path, damage)


def first_complete(
    paths: Iterable[Folder], report: Callable[[Folder, str], None] = warn_skipped
) -> int | None:
    """Step of the first checkpoint whose files exist in the right sizes; no array is read.

    Args:
        report: called with each damaged checkpoint on the way, and what is wrong with it.
    """
    step = -1
    if jax.process_index() == 0:
        for path in paths:
            damage = find_damage(path)
            if damage is None:
                step = int(path.name)
                break
            report(path, damage)
    step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    return None if step < 0 else step


def complete_steps(run: RunFolder) -> list[int]:
    """The steps of all complete checkpoints, in ascending order."""
    paths = checkpoint_paths(run.checkpoints)[::-1]
    return [int(path.name) for path in paths if first_complete([path]) is not None]


def choose_step(run: RunFolder, step: int | Literal["best"] | None = None) -> int:
    """The complete checkpoint meant by `step`: that one, the best, or the newest (None).

    Raises:
        ValueError: there is none; the message says what was found and how to make one.
    """
    paths = checkpoint_paths(run.checkpoints)
    if step == "best":
        scores = _scores(paths)
        scored = (path for path in paths if int(path.name) in scores)
        paths = sorted(scored, key=lambda path: scores[int(path.name)], reverse=True)
    elif step is not None:
        paths = [path for path in paths if path.name == str(step)]
    chosen = first_complete(paths)
    if chosen is None:
        wanted = {None: "", "best": " with a score"}.get(step, f" of step {step}")
        names = ", ".join(path.name for path in checkpoint_paths(run.checkpoints))
        train = f"make one with `switchx train --gin_file=... --model_dir={run.path}`"
        raise ValueError(
            f"no complete checkpoint{wanted} in {run.where}: "
            f"{f'found checkpoints {names}' if names else run.found()}; "
            f"{way_out(run.root, f'{train}, or give another folder')}"
        )
    return chosen


def _scores(paths: Sequence[Folder]) -> dict[int, float]:
    """Scores by step. A checkpoint with an unreadable manifest scores best, so that it is
    reported as damaged."""
    manifests, damaged = [], {}
    for path in paths:
        try:
            manifests.append(read_manifest(path))
        except (ValueError, OSError):
            damaged[int(path.name)] = math.inf
    return scores_of(manifests) | damaged


def restore_params(
    run: str | os.PathLike,
    step: int | Literal["best"] | None = None,
    target: Tree | None = None,
    *,
    model: ModelConfig | None = None,
) -> Tree:
    """Restores only the parameters; the optimizer need not be known.

    For an adapter run they are the base's, with the adapters merged into them.

    Args:
        run: the run folder.
        step: step of the checkpoint; None is the newest complete one, "best" the one with the
            best score.
        target: abstract parameters with shardings: every device reads its part, and no
            process holds more than its devices' parts. None gives NumPy arrays; copy them with
            `jnp.array`: `jax.device_put` may alias their memory on CPU.
        model: configuration of the model that `target` belongs to, where its layers may be
            scanned and the checkpoint's unrolled, or vice versa; None where the layouts are
            the same.

    Raises:
        ValueError: there is no such checkpoint, or it does not fit `target`; the message lists
            all differences. Or the adapters' base is missing, or is a different one.
    """
    folder = RunFolder(run)
    path = folder.checkpoints / str(choose_step(folder, step))
    if (record := AdapterRecord.read(folder)) is None:
        return restore_items(path, {"params": target}, model)["params"]
    return merged_with_base(folder, path, record, target, model)


def merged_with_base(
    run: RunFolder,
    path: Folder,
    record: AdapterRecord,
    target: Tree | None,
    model: ModelConfig | None,
    item: str = "params",
) -> Tree:
    """An adapter run's base merged with a checkpoint's adapters, as for `restore_params`.

    Args:
        path: the checkpoint.
        item: `params`, or `average`, the moving average of the adapters.
    """
    require_base(run, record)
    params = restore_params(record.spec.base, record.spec.step, target, model=model)
    adapters = read_items(path, {item: None})[item]
    if model is not None:
        adapters = _in_layout_of(adapters, model, record.spec)
    return merged(params, adapters, record.spec)


def stored_params(
    run: str | os.PathLike, step: int | Literal["best"] | None, model: ModelConfig
) -> tuple[ModelConfig, Tree]:
    """A checkpoint's parameters as arrays that are read one by one, by `np.asarray`.

    For an adapter run they are merged, in memory.

    Returns:
        The model, with its layers as they are stored, scanned or unrolled, and the parameters.

    Raises:
        ValueError: as for `restore_params`; a damaged array is found when it is read.
    """
    folder = RunFolder(run)
    with jax.default_device(cpu_device()):
        if AdapterRecord.read(folder) is not None:
            target = jax.tree.map(abstract, abstract_params(model))
            return model, restore_params(run, step, target, model=model)
        path = folder.checkpoints / str(choose_step(folder, step))
        model = stored_model(path, model)
        targets = {"params": jax.tree.map(abstract, abstract_params(model))}
    return model, nested(stored_arrays(path, named_leaves(targets)))["params"]


def require_base(run: RunFolder, record: AdapterRecord) -> None:
    """Checks that the base of an adapter run is the one that the adapters were trained with.

    Raises:
        ValueError: it is missing, or is a different one.
    """
    spec, base = record.spec, RunFolder(record.spec.base)
    way_out = f"put it back, or write the folder of a copy into {run.adapter} as its base"
    named = f"{run.where} has adapters of checkpoint {spec.step} of {spec.base}"
    try:
        choose_step(base, spec.step)
        found = checkpoint_fingerprint(base, spec.step, load_vocabulary(base.root))
    except (ValueError, OSError) as error:
        raise ValueError(f"{named}, which is not there: {error}; {way_out}") from error
    require(
        found == record.fingerprint,
        f"{named}, whose fingerprint was {record.fingerprint[:12]}; that folder has another "
        f"model now, of {found[:12]}: {way_out}",
    )


def _in_layout_of(adapters: Tree, model: ModelConfig, spec: LoRASpec) -> Tree:
    """NumPy adapters with layers stacked or unrolled like the model's."""
    wanted = abstract_adapters(abstract_params(model), spec)
    if _shapes(adapters) == _shapes(wanted):
        return adapters
    if model.scan_layers:
        return scanned_blocks(adapters, model.period)
    return unrolled_blocks(adapters)


def restore_items(
    path: Folder,
    targets: dict[str, Tree | None],
    model: ModelConfig | None,
    spec: LoRASpec | None = None,
) -> dict[str, Tree]:
    """Reads a checkpoint's items as arrays of `model`, on any mesh and in its layer layout.

    Layers saved in the other layout, scanned or unrolled, are read as they are stored, each
    device reading its part, and cut or stacked there, one array at a time.

    Args:
        targets: nested dictionaries of ShapeDtypeStructs with shardings, by item; see
            `read_items`.
        model: configuration of the model; None reads the layers as they are stored.
        spec: the adapters that are stored in place of the parameters.

    Raises:
        ValueError: leaves are missing, extra, or of another shape or dtype; all are listed.
    """
    if model is None or stored_model(path, model, spec) == model:
        return read_items(path, targets)
    if model.scan_layers:
        stored = unrolled_blocks(jax.tree.map(_StackedStruct, targets))
        stored = jax.tree.map(lambda leaf: getattr(leaf, "struct", leaf), stored)
        repeats = scanned_blocks(read_items(path, stored), model.period, _Repeats)
        return jax.tree.map(_stack, repeats, targets)
    repeats = scanned_blocks(targets, model.period, _Repeats)
    arrays = read_items(path, jax.tree.map(_stacked_struct, repeats))
    return unrolled_blocks(jax.tree.map(_cut, repeats, arrays))


def stored_model(path: Folder, model: ModelConfig, spec: LoRASpec | None = None) -> ModelConfig:
    """The model with its layers scanned or unrolled, as a checkpoint has them or its adapters.

    It is the model itself where the checkpoint fits neither.
    """
    if not model.can_be_scanned:
        return model
    other = dataclasses.replace(model, scan_layers=not model.scan_layers)
    stored, params = _shapes(stored_items(path).get("params", {})), abstract_params(other)
    expected = params if spec is None else abstract_adapters(params, spec)
    return other if stored == _shapes(expected) else model


def _shapes(params: Tree) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(params).items()}


@dataclasses.dataclass(frozen=True)
class _Repeats:
    """One parameter in all repeats of a scanned layer: N arrays or structs."""

    layers: Sequence[jax.Array | jax.ShapeDtypeStruct]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.layers), *self.layers[0].shape

    def __getitem__(self, repeat: int) -> jax.Array | jax.ShapeDtypeStruct:
        return self.layers[repeat]


@dataclasses.dataclass(frozen=True)
class _StackedStruct:
    """A ShapeDtypeStruct of N stacked layers, from which single layers can be taken."""

    struct: jax.ShapeDtypeStruct

    @property
    def shape(self) -> tuple[int, ...]:
        return self.struct.shape

    def __getitem__(self, repeat: int) -> jax.ShapeDtypeStruct:
        sharding = self.struct.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(self.shape[1:], self.struct.dtype, sharding=sharding)


def _stacked_struct(leaf) -> jax.ShapeDtypeStruct:
    """The struct of all repeats together; every device has its part of each of them."""
    if not isinstance(leaf, _Repeats):
        return leaf
    one = leaf[0]
    sharding = one.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct(leaf.shape, one.dtype, sharding=sharding)


def _stack(leaf, target: jax.ShapeDtypeStruct) -> jax.Array:
    if not isinstance(leaf, _Repeats):
        return leaf
    if isinstance(target.sharding, SingleDeviceSharding):
        # The host's arrays, with which programs on a mesh of several devices cannot compute.
        stacked = jax.device_put(np.stack(leaf.layers), target.sharding)
    else:
        stacked = jax.jit(jnp.stack, out_shardings=target.sharding)(leaf.layers)
    for layer in leaf.layers:
        layer.delete()
    return stacked


def _cut(target, array: jax.Array) -> jax.Array | _Repeats:
    if not isinstance(target, _Repeats):
        return array
    shardings = [layer.sharding for layer in target.layers]
    layers = jax.jit(list, out_shardings=shardings)(array)
    array.delete()
    return _Repeats(layers)


def checkpoint_fingerprint(run: RunFolder, step: int, vocabulary: Vocabulary | None) -> str:
    """SHA-256 that identifies a checkpoint's model: of its manifest, configuration, vocabulary.

    No parameter is read: the manifest has the parameters' checksums.
    """
    parts = [
        (run.checkpoints / str(step) / MANIFEST).read_bytes(),
        json.dumps(read_config(run)["model"], sort_keys=True).encode(),
        vocabulary.fingerprint().encode() if vocabulary else b"",
    ]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()
