# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.

LoRA format of Hugging Face's PEFT (github.com/huggingface/peft): `lora_A` is `[rank, inputs]`,
`lora_B` `[outputs, rank]`, by the name of the module in the base as transformers has it. Every
expert is a separate module: PEFT fuses them where transformers does.
Dims: E experts, J rank
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.flax import load_file
from safetensors.numpy import save_file

from switchx import tree
from switchx.fields import require
from switchx.interop import decoder_descriptions, decoder_tensors, huggingface_config
from switchx.interop.families import FAMILIES
from switchx.interop.tensor_folder import (
    read_json,
    require_finite,
    require_same_tensors,
    write_json,
)
from switchx.models.adapters import LoRASpec, abstract_adapters, init_adapters, target_of
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings that use A and B in ways that ours do not, and the only values that are read.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "velora_config", "monteclora_config"), (None,)
    ),
}
_TABLES = ("lm_head", "embed_tokens", "shared")
# Initial values that PEFT takes out of the base's weights, also on loading (PiSSA, OLoRA, ...).
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


def write_adapters(
    folder: pathlib.Path, config: ModelConfig, adapters: dict, spec: LoRASpec, base: str
) -> None:
    """Writes adapters for `PeftModel.from_pretrained` into an existing folder.

    Args:
        config, adapters: an unrolled model, and its adapters.
        base: name or folder of the base in transformers, by which PEFT is to find it.

    Raises:
        ValueError: transformers has no such model (all reasons are given).
    """
    leaves, orders = tree.named_leaves(adapters), _orders(config)
    tensors = {
        f"{_PREFIX}{module}.lora_{letter}.weight": np.ascontiguousarray(matrix)
        for name, module, letter, part in _places(config, leaves)
        for own in [np.asarray(leaves[name], np.float32)[part]]
        for matrix in [_to_torch(letter, _reordered(orders, name, own, np.argsort))]
    }
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / CONFIG, content)


def named_base(folder: str | os.PathLike) -> str:
    """The folder or the name of the base that adapters were made for; empty without one.

    Raises:
        ValueError: their description is missing or damaged.
    """
    values = read_json(pathlib.Path(folder).expanduser() / CONFIG)
    named = values.get("base_model_name_or_path")
    return named if isinstance(named, str) else ""


def is_made_for(folder: str | os.PathLike, base: str | os.PathLike) -> bool:
    """Whether `write_adapters` wrote the folder for this base; raises like `named_base`."""
    named = named_base(folder)
    return named != "" and os.path.abspath(named) == os.path.abspath(base)


def read_adapters(
    folder: str | os.PathLike, config: ModelConfig, **base
) -> tuple[LoRASpec, dict, list[str]]:
    """Reads what `save_pretrained` of a PEFT model wrote.

    Args:
        config: configuration of the unrolled base.
        base: the fields `base` and `step` of the `LoRASpec`.

    Returns:
        The spec, the adapters, and sentences that a user should know.

    Raises:
        ValueError: a file is missing or damaged, PEFT's settings are not plain LoRA, or
            tensors are not of this base (all are named), or have numbers that are not finite.
    """
    folder = pathlib.Path(folder).expanduser()
    values = read_json(folder / CONFIG)
    for name, known in _PLAIN.items():
        require(
            values.get(name, known[-1]) in known,
            f"{folder / CONFIG}: {name}={values.get(name)!r:.80} cannot be read; expected "
            f"{known[0]!r}: save plain LoRA of modules, each expert one, or merge it with PEFT "
            "and convert the whole model",
        )
    first = values.get("init_lora_weights")
    require(
        not (isinstance(first, str) and first.lower().startswith(_CHANGES_BASE)),
        f"{folder / CONFIG}: init_lora_weights={first!r:.80} cannot be read: PEFT changes the "
        "base's weights with it; save plain LoRA (path_initial_model_for_weight_conversion of "
        "save_pretrained), or merge it with PEFT and convert the whole model",
    )
    try:
        found = {
            name.removeprefix(_PREFIX): np.asarray(array, np.float32)
            for name, array in load_file(folder / WEIGHTS).items()
        }
        rows = {array.shape[:1] for name, array in found.items() if ".lora_A." in name}
        rank, alpha = values["r"], values["lora_alpha"]
        dropout = values.get("lora_dropout") or 0
        are_numbers = {type(alpha), type(dropout)} <= {int, float}
        require(
            type(rank) is int and rows == {(rank,)} and are_numbers,
            f"{folder}: {CONFIG} says r={rank!r:.80}, lora_alpha={alpha!r:.80}, lora_dropout="
            f"{dropout!r:.80}, matrices A in {WEIGHTS} have {sorted(rows)} rows; expected an "
            "integer, two numbers, and r rows: save it again",
        )
        # rsLoRA divides by the root of the rank (arXiv:2312.03732).
        alpha *= math.sqrt(rank) if values.get("use_rslora") else 1.0
        spec = LoRASpec(rank=rank, alpha=alpha, dropout=dropout, **base)
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} cannot be read: {error!r}; save it again") from error
    params = abstract_params(config)
    present = {target_of(name) for name in tree.named_leaves(params)} - {None}
    everything = dataclasses.replace(spec, targets=tuple(present))
    shapes = tree.named_leaves(abstract_adapters(params, everything))
    places = {
        f"{module}.lora_{letter}.weight": (name, letter, part)
        for name, module, letter, part in _places(config, shapes)
    }
    modules = {name.split(".lora_")[0] for name in found}
    expected = {
        name: _to_torch(letter, np.empty(shapes[path].shape)[part]).shape
        for name, (path, letter, part) in places.items()
        if name.split(".lora_")[0] in modules
    }
    plain = {each: each.partition(".lora_")[0].removesuffix(".weight") for each in found}
    none = sorted(each for each, name in plain.items() if name.endswith(_TABLES))
    require(
        not none,
        f"{folder}: {none[:1]}, adapters of embeddings or of the head, cannot be "
        "read; leave these out of target_modules, or merge them with PEFT and convert the "
        "whole model",
    )
    given = {name: array.shape for name, array in found.items()}
    require_same_tensors(expected, given, str(folder), "give the base that it was made for")
    for name, array in found.items():
        require_finite(array, name, folder / WEIGHTS)
    targets = {target_of(places[name][0].rpartition("/")[0]) for name in found}
    spec = dataclasses.replace(spec, targets=tuple(sorted(targets)))
    fresh = tree.named_leaves(init_adapters(config, spec, jax.random.key(0)))
    leaves = {name: np.array(leaf, np.float32) for name, leaf in fresh.items()}
    missing = set()
    orders = _orders(config)
    for name, (path, _, part) in places.items():
        if name in found:
            array = leaves[path][part]
            array = found[name].T.reshape(array.shape)
            leaves[path][part] = _reordered(orders, path, array)
        elif path in leaves:
            missing.add(name.split(".lora_")[0])
    note = f"without adapters there, and with fresh ones here: {', '.join(sorted(missing))}"
    return spec, tree.nested(leaves), [note] if missing else []


def _places(config: ModelConfig, leaves) -> Iterator[tuple[str, str, str, Any]]:
    """Each matrix A or B: our array's name, the module in transformers, the letter, its part.

    An expert's part is its index, also where all experts share the array; else it is `...`.
    """
    names = _tensor_names(config)
    for name in leaves:
        path, _, last = name.rpartition("/")
        is_of_experts = last[2] == "E"
        for expert, tensor in enumerate(names[path]):
            part = expert if is_of_experts else ...
            yield name, tensor.removesuffix(".weight"), last[0].upper(), part


def _tensor_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    if config.is_encoder_decoder:
        description, _ = huggingface_config.describe(config)
        return FAMILIES[description["model_type"]].tensor_names(config)
    config = decoder_descriptions.config_with_shared_expert(config)
    kin, *_ = decoder_descriptions.describe(config)
    return decoder_tensors.tensor_names(kin, config)


def _orders(config: ModelConfig) -> dict[str, np.ndarray]:
    """`decoder_tensors.orders`: rows of B are those of its weight."""
    if config.is_encoder_decoder:
        return {}
    config = decoder_descriptions.config_with_shared_expert(config)
    kin, *_ = decoder_descriptions.describe(config)
    return decoder_tensors.orders(kin, config)


def _reordered(orders, name: str, array: np.ndarray, of_order=np.asarray) -> np.ndarray:
    """A or B of this name with K in our order, or with `np.argsort`, in that of files."""
    path, _, last = name.rpartition("/")
    order = orders.get(path.rpartition("/")[2]) if last.startswith("b_") else None
    return array if order is None else array[..., of_order(order)]


def _to_torch(letter: str, array: np.ndarray) -> np.ndarray:
    """A as `[rank, inputs]`, B as `[outputs, rank]`; heads are joined."""
    rank = array.shape[-1] if letter == "A" else array.shape[0]
    shape = (-1, rank) if letter == "A" else (rank, -1)
    return array.reshape(shape).T
