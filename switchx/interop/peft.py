# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.

Hugging Face's PEFT (github.com/huggingface/peft), format of LoRA: `lora_A` is `[rank, inputs]`,
`lora_B` `[outputs, rank]`, by the name of the module in the base as transformers has it. Every
expert is a module of its own: PEFT fuses them where transformers does.
Dims: E experts, J rank
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.flax import load_file
from safetensors.numpy import save_file

from switchx import tree
from switchx.fields import require
from switchx.interop import decoder_families, huggingface_config
from switchx.interop.families import FAMILIES
from switchx.interop.tensor_folder import read_json, require_same_tensors, write_json
from switchx.models.adapters import LoRASpec, abstract_adapters, target_of
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings that make of A and B what ours do not, and the only values that are read.
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
}


def write_adapters(
    folder: pathlib.Path, config: ModelConfig, adapters: dict, spec: LoRASpec, base: str
) -> None:
    """Writes adapters for `PeftModel.from_pretrained` into an existing folder.

    Args:
        config, adapters: an unrolled model, and its adapters.
        base: name or folder of the base in transformers, for whom PEFT is to find it.

    Raises:
        ValueError: transformers has no such model (all reasons are given).
    """
    leaves = tree.named_leaves(adapters)
    tensors = {
        f"{_PREFIX}{module}.lora_{letter}.weight": np.ascontiguousarray(matrix)
        for name, module, letter, part in _places(config, leaves)
        for matrix in [_to_torch(letter, np.asarray(leaves[name], np.float32)[part])]
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


def read_adapters(
    folder: str | os.PathLike, config: ModelConfig, fresh, **base
) -> tuple[LoRASpec, dict, list[str]]:
    """Reads what `save_pretrained` of a PEFT model wrote.

    Args:
        config: configuration of the unrolled base.
        fresh: function of a `LoRASpec` that returns its first adapters: those of weights that
            have none in the folder.
        base: the fields `base` and `step` of the `LoRASpec`.

    Returns:
        The spec, the adapters, and sentences that a reader should know.

    Raises:
        ValueError: a file is missing or damaged, PEFT's settings are not of plain LoRA, or
            tensors are not of this base (all are named).
    """
    folder = pathlib.Path(folder).expanduser()
    values = read_json(folder / CONFIG)
    for name, known in _PLAIN.items():
        value = values.get(name, known[-1])
        require(
            value in known,
            f"{folder / CONFIG}: {name}={value!r:.80} cannot be read; expected {known[0]!r}: "
            "save plain LoRA of whole modules, each expert a module, or merge it with PEFT and "
            "convert the whole model",
        )
    rank, alpha = values.get("r"), values.get("lora_alpha")
    try:
        found = {
            name.removeprefix(_PREFIX): np.asarray(array, jnp.float32)
            for name, array in load_file(folder / WEIGHTS).items()
        }
        # rsLoRA divides by the root of the rank (arXiv:2312.03732).
        alpha = alpha * math.sqrt(rank) if values.get("use_rslora") else alpha
        spec = LoRASpec(rank=rank, alpha=alpha, dropout=values.get("lora_dropout", 0.0), **base)
    except (OSError, SafetensorError, TypeError) as error:
        raise ValueError(f"{folder} cannot be read: {error}; save it again") from error
    all_targets = _spec_of(spec, ("attention", "dense_ffn", "experts", "routers"), config)
    shapes = tree.named_leaves(abstract_adapters(abstract_params(config), all_targets))
    places = {
        f"{module}.lora_{letter}.weight": (name, letter, part)
        for name, module, letter, part in _places(config, shapes)
    }
    expected = {
        name: _to_torch(letter, np.empty(shapes[path].shape)[part]).shape
        for name, (path, letter, part) in places.items()
        if name in found
    }
    there = {name: array.shape for name, array in found.items()}
    require_same_tensors(expected, there, str(folder), "give the base that it was made for")
    targets = {target_of(places[name][0].rpartition("/")[0]) for name in found}
    spec = _spec_of(spec, targets, config)
    leaves = {
        name: np.array(leaf, np.float32)
        for name, leaf in tree.named_leaves(fresh(spec)).items()
    }
    own = [name for name in places if places[name][0] in leaves]
    for name in found.keys() & set(own):
        path, letter, part = places[name]
        array = leaves[path][part]
        leaves[path][part] = found[name].T.reshape(array.shape)
    missing = sorted({name.split(".lora_")[0] for name in own if name not in found})
    notes = [f"without adapters there, and with fresh ones here: {', '.join(missing)}"]
    return spec, tree.nested(leaves), notes if missing else []


def _spec_of(spec: LoRASpec, targets, config: ModelConfig) -> LoRASpec:
    """The spec with those of `targets` that the model has."""
    there = {target_of(name) for name in tree.named_leaves(abstract_params(config))}
    return dataclasses.replace(spec, targets=tuple(sorted(there & set(targets))))


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
    kin, *_ = decoder_families.describe(config)
    return decoder_families.tensor_names(kin, config)


def _to_torch(letter: str, array: np.ndarray) -> np.ndarray:
    """A as `[rank, inputs]`, B as `[outputs, rank]`; heads are joined."""
    rank = array.shape[-1] if letter == "A" else array.shape[0]
    shape = (-1, rank) if letter == "A" else (rank, -1)
    return array.reshape(shape).T
