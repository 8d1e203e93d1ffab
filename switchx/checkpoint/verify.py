# SPDX-License-Identifier: Apache-2.0
"""Everything that can be wrong with a checkpoint, named fault by fault.

Damaged bytes are found by the manifest. A checkpoint whose bytes are what was written may
still be of another model, hold a value that is not finite, or lack rows of the data.
"""

import pathlib

import jax.numpy as jnp
import numpy as np

from switchx.checkpoint.items import (
    damages,
    items_of,
    read_data_states,
    read_items,
    require_same_leaves,
)
from switchx.checkpoint.restore import stored_model
from switchx.checkpoint.run_folder import RunFolder, read_config, read_model_config
from switchx.data.loader import merge_states
from switchx.models.params import abstract_params
from switchx.tree import named_leaves


def checkpoint_faults(run: RunFolder, step: int) -> list[str]:
    """All faults of one checkpoint, each a sentence; none where it is sound.

    Every byte is read. What is in damaged files is not looked into.
    """
    path = run.checkpoints / str(step)
    if faults := list(damages(path, checksums=True)):
        return faults
    if "params" not in items_of(path):
        return ["it has no parameters"]
    try:
        items = read_items(path, dict.fromkeys(items_of(path)))
    except Exception as error:  # Orbax raises what its storage does
        return [f"its arrays cannot be read: {' '.join(str(error).split())[:300]}"]
    try:
        expected = named_leaves(abstract_params(stored_model(path, read_model_config(run))))
        got = named_leaves(items["params"])
        require_same_leaves(expected, got, "it is not of the run's model: it")
    except ValueError as error:
        faults += str(error).splitlines()
    faults += [fault for item in items.values() for fault in _value_faults(item)]
    if "train_state" in items:
        saved = int(items["train_state"].get("step", step))
        if saved != step:
            faults.append(f"its state is of step {saved}, its folder of step {step}")
        faults += _data_faults(run, path, step)
    return faults


def _value_faults(item) -> list[str]:
    faults = []
    for name, leaf in named_leaves(item).items():
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        if bad := int(np.count_nonzero(~np.isfinite(np.asarray(leaf, np.float32)))):
            faults.append(f"{name} has {bad} of {leaf.size} values that are not finite")
    return faults


def _data_faults(run: RunFolder, path: pathlib.Path, step: int) -> list[str]:
    """Whether the data goes on where the state does, for each row of a batch."""
    try:
        states = read_data_states(path)
        if not all(isinstance(state, dict) and "cursors" in state for state in states):
            return [] if set(map(type, states)) == {type(None)} else ["its data is no loader's"]
        state = merge_states(states)
    except (ValueError, KeyError) as error:
        return [str(error)]
    faults, rows = [], read_config(run).get("batch_size")
    if state["step"] != step:
        faults.append(f"its data goes on at step {state['step']}, its state at step {step}")
    missing = set(range(rows or 0)) - set(state["rows"])
    if missing:
        faults.append(f"its data has no state of rows {', '.join(map(str, sorted(missing)))}")
    return faults
