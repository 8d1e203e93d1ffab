# SPDX-License-Identifier: Apache-2.0
"""The training state of a model whose experts were changed (`models/reshape.py`, `upcycle.py`).

An expert and its router column continue with the statistics of what they are made of
(`Reshaped.origin_NE`). New parameters, and those of another form, get the statistics of a new
run, at the count of the old one.
Dims: E experts
"""

import collections
import re
from typing import Any

import numpy as np
import optax

from switchx.checkpoint.items import items_of, read_items
from switchx.checkpoint.restore import stored_model
from switchx.models.config import ModelConfig
from switchx.models.reshape import Reshaped
from switchx.models.unroll import unrolled_blocks
from switchx.object_store import Folder
from switchx.optim.protocol import NEW_AT_OLD_COUNT, param_of
from switchx.tree import Tree, named_leaves, nested


def reshaped_state(
    path: Folder,
    transformation: optax.GradientTransformationExtraArgs,
    earlier: ModelConfig,
    found: Reshaped,
) -> tuple[Tree | None, str]:
    """The item `train_state` of a reshaped model, layers unrolled, and a sentence about it.

    Args:
        path: checkpoint of the earlier model.
        transformation: optimizer of its run.
        earlier: configuration of the earlier model.

    Returns:
        None in place of the state if the checkpoint has none, or that of another optimizer, or
        the optimizer has none for the new parameters.
    """
    if "train_state" not in items_of(path):
        return None, "no state of an optimizer is there to go along"
    stored = read_items(path, {"train_state": None})["train_state"]
    if stored_model(path, earlier).scan_layers:
        stored = unrolled_blocks(stored)
    old, params = named_leaves(stored), named_leaves(found.params)
    fresh: dict[str | None, dict[str, Any]] = collections.defaultdict(dict)
    try:
        begun_anew = transformation.init(found.params)
    except ValueError as error:  # such as a rate of parameters that are no longer there
        return None, f"the optimizer's state stays behind: {error}"
    for name, leaf in named_leaves({"opt_state": begun_anew}).items():
        fresh[param_of(name, params)][name] = np.asarray(leaf)
    state = {name: leaf for name, leaf in old.items() if not name.startswith("opt_state/")}
    begun = []
    for param, leaves in fresh.items():
        arrays = {name: _array_before(old, name, param, earlier, found) for name in leaves}
        fits = all(
            getattr(arrays[name], "shape", None) == leaves[name].shape for name in leaves
        )
        state |= arrays if fits else leaves
        begun += [] if fits or param is None else [param]
    if len(begun) == len(fresh.keys() - {None}):
        return None, "the optimizer's state is that of another optimizer, and stays behind"
    kinds = ", ".join(sorted({name.rpartition("/")[2] for name in begun}))
    new = kinds and f", new for {kinds} ({NEW_AT_OLD_COUNT})"
    return nested(state), f"the optimizer's state goes along{new}"


def _array_before(
    old: dict[str, Any], name: str, param: str | None, earlier: ModelConfig, found: Reshaped
) -> np.ndarray | None:
    """The old value of an optimizer's array, with the new model's experts; None if new."""
    layers = found.config.sparse_layer_names  # none of a dense model, whose FFNs begin anew
    names = ["{}/blocks/layer_{}".format(*layer.split()) for layer in layers]
    block, _, rest = (param or "").partition("/ffn/")
    if block not in names or rest.startswith("shared_"):
        return old.get(name)
    origin_E = found.origin_NE[names.index(block)]
    if earlier.switch is None:  # `experts/w_in_EDF/v_row_ED` was `w_in_DF/v_row_D`
        was = old.get(re.sub(r"_E([A-Z]+)(?=/|$)", r"_\1", name.replace("experts/", "")))
        return None if was is None else np.repeat(was[None], len(origin_E), axis=0)
    was, letters = old.get(name), name.rpartition("_")[2]
    if was is None or "E" not in letters or was.ndim != len(letters):
        return was
    return np.take(was, origin_E, axis=letters.index("E"))
