# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of T5X: T5, T5 1.1 and flaxformer's Switch Transformers."""

import dataclasses
import os
import pathlib

import jax.numpy as jnp
import numpy as np

from switchx.interop.t5x_folder import T5XFolder
from switchx.interop.t5x_names import (
    Place,
    bias_names,
    places,
    shape_of,
    take,
    their_shapes,
)
from switchx.interop.tensors import letters_of, nested, require_same_tensors
from switchx.models.config import ModelConfig
from switchx.models.require import require

_WAY_OUT = (
    "give the gin file of the model that this is, --gin.NAME=VALUE for its sizes; what other "
    "models of flaxformer add (extra_mlp of ST-MoE, biases) cannot be converted"
)


def read_checkpoint(folder: str | os.PathLike, config: ModelConfig) -> tuple[ModelConfig, dict]:
    """Parameters out of `checkpoint_<step>`, whichever layout they are in.

    Args:
        config: the model, which the checkpoint itself does not tell.

    Returns:
        The configuration with unrolled layers, and the parameters as NumPy arrays.

    Raises:
        ValueError: the folder is no checkpoint, is damaged, or holds other arrays than the
            model has (all are named).
    """
    _require_t5(config)
    config = dataclasses.replace(config, scan_layers=False)
    source = T5XFolder(pathlib.Path(folder).expanduser())
    ours = places(config, source.shapes)
    expected = _expected(config, ours, source)
    require_same_tensors(expected, source.shapes, str(source.folder), _WAY_OUT)
    arrays: dict[str, np.ndarray] = {}
    dtype = jnp.dtype(config.precision.params)
    params, last = {}, {place.name: parameter for parameter, place in ours.items()}
    for parameter, place in ours.items():
        if place.name not in arrays:
            arrays[place.name] = source.read(place.name)
        array = take(arrays[place.name], place)
        if letters_of(parameter) == "UH":
            array = _one_bias(parameter.partition("/")[0], source).T
        array = np.ascontiguousarray(array).reshape(shape_of(parameter, config))
        params[parameter] = array.astype(dtype, copy=False)
        if last[place.name] == parameter:  # all blocks of a scanned array have been taken
            del arrays[place.name]
    return config, nested(params)


def _expected(config, ours: dict[str, Place], source: T5XFolder) -> dict[str, tuple[int, ...]]:
    """Shape of every array; of two allowed ones that which is there."""
    expected = {}
    for parameter, place in ours.items():
        repeats = None
        if place.repeat is not None:
            repeats = 1 + max(p.repeat for p in ours.values() if p.name == place.name)
        names = [place.name]
        if letters_of(parameter) == "UH":
            names = bias_names(parameter.partition("/")[0], set(source.shapes))
            repeats = _bias_repeats(config, parameter, names)
        shapes = their_shapes(parameter, config, repeats)
        for name in names:
            is_there = source.shapes.get(name) in shapes
            expected[name] = source.shapes[name] if is_there else shapes[0]
    return expected


def _bias_repeats(config: ModelConfig, parameter: str, names: list[str]) -> int | None:
    stack = parameter.partition("/")[0]
    if names[0] == f"target/{stack}/relpos_bias/rel_embedding":
        return None
    return getattr(config, f"num_{stack}_layers") // len(names)


def _one_bias(stack: str, source: T5XFolder) -> np.ndarray:
    """A stack's relative bias `[H, U]`, which all its blocks have to share."""
    names = bias_names(stack, set(source.shapes))
    arrays = [source.read(name) for name in names]
    if arrays[0].ndim == 2:
        return arrays[0]
    first_HU = arrays[0][:, 0]
    require(
        all(np.array_equal(a, np.broadcast_to(first_HU[:, None], a.shape)) for a in arrays),
        f"{source.folder}: the blocks of the {stack} have relative biases of their own "
        f"({', '.join(names)}); switchx has one a stack, as T5 has, so this model cannot be "
        "converted",
    )
    return first_HU


def _require_t5(config: ModelConfig) -> None:
    switch = config.switch
    reasons = {
        "architecture": config.is_encoder_decoder,
        "norm": config.norm == "rms",
        "positions": config.positions == "relative",
        "use_bias": not config.use_bias,
        "SwitchConfig.sublayers": switch is None or switch.sublayers == "ffn",
        "SwitchConfig.shared_d_ff": switch is None or switch.shared_d_ff is None,
        "SwitchConfig.expert_bias": switch is None or not switch.expert_bias,
        "RouterConfig.kind": switch is None or switch.router.has_weights,
        "RouterConfig.bias_update_rate": switch is None or not switch.router.has_bias,
    }
    wrong = [name for name, is_right in reasons.items() if not is_right]
    require(
        not wrong,
        f"the gin file describes no model of T5X's ({', '.join(wrong)}); give T5 or Switch "
        "Transformers, such as configs/models/switch_base_released.gin",
    )
