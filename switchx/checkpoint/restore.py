# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: which one is complete, its parameters, parameters by name.

Nothing here changes the folder. Where several processes run, all of them call each function.
"""

import logging
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from switchx.checkpoint.items import abstract, read_items, require_same_leaves
from switchx.checkpoint.run_folder import RunFolder
from switchx.manifest import find_damage, read_manifest
from switchx.tree import Tree, map_named, named_leaves, num_bytes

logger = logging.getLogger(__name__)


def checkpoint_paths(checkpoints: pathlib.Path) -> list[pathlib.Path]:
    """`<checkpoints>/<step>`, the newest first; complete or not."""
    if not checkpoints.is_dir():
        return []
    steps = (path for path in checkpoints.iterdir() if path.name.isdecimal())
    return sorted(steps, key=lambda path: int(path.name), reverse=True)


def warn_skipped(path: pathlib.Path, damage: str) -> None:
    logger.warning("checkpoint %s is skipped: %s", path, damage)


def first_complete(
    paths: Iterable[pathlib.Path],
    report: Callable[[pathlib.Path, str], None] = warn_skipped,
) -> int | None:
    """Step of the first whole checkpoint; every byte of it is read, by process 0.

    Args:
        report: called with each damaged one on the way, and what is wrong with it.
    """
    step = -1
    if jax.process_index() == 0:
        for path in paths:
            damage = find_damage(path, checksums=True)
            if damage is None:
                step = int(path.name)
                break
            report(path, damage)
    step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    return None if step < 0 else step


def choose_step(run: RunFolder, step: int | Literal["best"] | None = None) -> int:
    """The complete checkpoint meant by `step`: that one, the best, or the newest (None).

    Raises:
        ValueError: there is none; says what was found and how to make one.
    """
    paths = checkpoint_paths(run.checkpoints)
    if step == "best":
        paths = sorted(
            (path for path in paths if _score(path) is not None), key=_score, reverse=True
        )
    elif step is not None:
        paths = [path for path in paths if path.name == str(step)]
    chosen = first_complete(paths)
    if chosen is None:
        wanted = {None: "", "best": " with a score"}.get(step, f" of step {step}")
        names = ", ".join(path.name for path in checkpoint_paths(run.checkpoints))
        raise ValueError(
            f"no complete checkpoint{wanted} in {run.root}: "
            f"{f'found checkpoints {names}' if names else run.found()}; make one with "
            f"`switchx train --gin_file=... --model_dir={run.path}`, or give another folder"
        )
    return chosen


def _score(path: pathlib.Path) -> float | None:
    """The score in the manifest; best of all when unreadable, to be reported as damaged."""
    try:
        return read_manifest(path).score
    except (ValueError, OSError):
        return float("inf")


def restore_params(
    run: str | os.PathLike,
    step: int | Literal["best"] | None = None,
    target: Tree | None = None,
) -> Tree:
    """The parameters alone, without knowing the model or the optimizer.

    Args:
        run: the run folder.
        step: of the checkpoint; None is the newest complete one, "best" the one with the
            best score.
        target: abstract parameters with shardings; None gives NumPy arrays. Copy those
            with `jnp.array`: `jax.device_put` may alias their memory on CPU.

    Raises:
        ValueError: no such checkpoint, or it does not fit `target`.
    """
    folder = RunFolder(run)
    path = folder.checkpoints / str(choose_step(folder, step))
    return read_items(path, {"params": target})["params"]


def restore_by_name(
    target: Tree, source: Tree, name: str = "the source of the parameters"
) -> tuple[Tree, str]:
    """Fills `target` with the arrays of `source` that have the same names.

    Args:
        target: parameters, or ShapeDtypeStructs of them; their shardings are kept.
        source: NumPy or JAX arrays, e.g. of `restore_params`; they are copied.
        name: of the source, for messages.

    Returns:
        The parameters, and one sentence for the log.

    Raises:
        ValueError: arrays are missing, extra, or of another shape or dtype; lists all.
    """
    arrays = named_leaves(source)
    require_same_leaves(named_leaves(target), arrays, name)
    params = map_named(
        lambda leaf_name, leaf: jax.device_put(
            jnp.array(arrays[leaf_name]), abstract(leaf).sharding
        ),
        target,
    )
    num = len(arrays)
    return params, f"restored all {num} parameter arrays by name, {num_bytes(params)} bytes"
