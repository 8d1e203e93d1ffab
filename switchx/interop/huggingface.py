# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face's transformers: T5, T5 1.1, mT5 and Switch Transformers.

A local folder with `config.json`, safetensors (one file or shards) and, where it has one, the
vocabulary `spiece.model`.

Our ModelConfig as Hugging Face's `config.json`: T5, or Switch Transformers where sparse.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from switchx.fields import require, require_choice
from switchx.interop.huggingface_config import num_sparse, read_config
from switchx.interop.names import EMBEDDINGS, LM_HEAD, SHARED, SWITCH, UNREAD, tensor_names
from switchx.interop.safetensors_folder import (
    SafetensorsFolder,
    fill,
    read_json,
    require_same_tensors,
    to_torch,
    torch_shape,
    write_safetensors,
)
from switchx.layers.norm import EPSILON
from switchx.models.config import ModelConfig, SwitchConfig, require_our_blocks
from switchx.models.unroll import unrolled
from switchx.tree import named_leaves

VOCABULARY = "spiece.model"
MOST_SHARD_BYTES = 5 * 10**9  # transformers' own
_WAY_OUT = (
    "use the config.json that belongs to these files, and all of the files; what other "
    "classes of transformers add (classifiers, adapters) cannot be converted"
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model from elsewhere.

    Attributes:
        params: NumPy arrays in float32.
        vocabulary: SentencePiece model, or None where the checkpoint has none.
    """

    config: ModelConfig
    params: dict
    vocabulary: pathlib.Path | None


def read_checkpoint(folder: str | os.PathLike, *, overflow: str = "drop") -> Checkpoint:
    """Reads a folder that `save_pretrained` wrote; never runs anything in it.

    Args:
        overflow: of Switch layers, what becomes of a token whose expert is full. `drop`: the
            residual connection alone, as in transformers 4.52 to 4.57 and from 5.19 on;
            `dropless`: nothing is ever full, as in 5.0 to 5.17; `identity`: its normed input
            times its probability, as up to 4.51.

    Raises:
        ValueError: a file is missing, damaged or a pickle; the configuration is none that we
            have; tensors are missing, unexpected or of another shape (all are named).
    """
    require_choice("overflow", overflow, ("drop", "dropless", "identity"))
    folder = pathlib.Path(folder).expanduser()
    require(
        folder.is_dir(),
        f"{folder} is no folder; download the checkpoint first, such as with `hf download "
        "google/switch-base-8 --local-dir DIR`, and give that folder",
    )
    file = folder / "config.json"
    config, family = read_config(read_json(file), str(file), overflow=overflow)
    tensors = SafetensorsFolder(folder)
    found = {name: shape for name, shape in tensors.shapes.items() if name not in UNREAD}
    tables = [name for name in (SHARED, *EMBEDDINGS) if name in found] or [SHARED]
    head_is_copy = LM_HEAD in found and config.tie_embeddings
    if family != SWITCH and LM_HEAD not in found:
        config = dataclasses.replace(config, tie_embeddings=True)  # as transformers 5 does

    names = tensor_names(config, family) | {"embedding/embedding_VD": (tables[0],)}
    expected = {
        name: torch_shape(parameter, config)
        for parameter, theirs in names.items()
        for name in theirs
    }
    table_shape = torch_shape("embedding/embedding_VD", config)
    copies = [*tables[1:], *([LM_HEAD] if head_is_copy else [])]
    require_same_tensors(
        expected | dict.fromkeys(copies, table_shape), found, str(folder), _WAY_OUT
    )
    different = _different_copies(tensors, tables[0], copies)
    if different == [LM_HEAD] and not config.scale_tied_logits:
        # T5 1.1 and mT5, saved by transformers 5: not tied, whatever the file says.
        config = dataclasses.replace(config, tie_embeddings=False)
        names["embedding/w_logits_DV"] = (LM_HEAD,)
        different = []
    require(
        not different,
        f"{folder}: {tables[0]} is not equal to {', '.join(different)}, which config.json says "
        "it is tied to; switchx has one embedding table for both stacks, and divides tied "
        "logits alone: set tie_word_embeddings to false for an lm_head of its own",
    )
    if not config.tie_embeddings:
        config = dataclasses.replace(config, scale_tied_logits=True)  # means nothing there
    vocabulary = folder / VOCABULARY
    return Checkpoint(
        config,
        fill(config, names, tensors.read),
        vocabulary if vocabulary.is_file() else None,
    )


def _different_copies(tensors: SafetensorsFolder, table: str, copies: list[str]) -> list[str]:
    if not copies:
        return []
    table_VD = tensors.read(table)
    return [name for name in copies if not np.array_equal(tensors.read(name), table_VD)]


def write_checkpoint(
    folder: pathlib.Path,
    config: ModelConfig,
    params: dict,
    vocabulary: pathlib.Path | None = None,
    *,
    num_sentinels: int = 100,
    most_shard_bytes: int = MOST_SHARD_BYTES,
) -> list[str]:
    """Writes what `from_pretrained` reads into an existing folder.

    Args:
        params: arrays on the host or on a device.
        vocabulary: a SentencePiece model, copied to `spiece.model`.
        num_sentinels: sentinels that come on top of its pieces.

    Returns:
        What a reader should know, a sentence each: where the export is not the same thing.

    Raises:
        ValueError: transformers has no such model (all reasons are given).
    """
    config, params = unrolled(config, params)
    description, notes = describe(config)
    family = description["model_type"]
    leaves = named_leaves(params)
    tensors = {}
    for parameter, theirs in tensor_names(config, family).items():
        parts = to_torch(parameter, np.asarray(leaves[parameter]))
        tensors |= dict(zip(theirs, parts, strict=True))
    if not description["tie_word_embeddings"]:
        # What is not tied is looked up by every one of its names.
        tensors.setdefault(LM_HEAD, tensors[SHARED].copy())
        if family == SWITCH:
            tensors |= {name: tensors[SHARED].copy() for name in EMBEDDINGS}
    write_safetensors(folder, tensors, most_shard_bytes)
    _write_json(folder / "config.json", description)
    ids = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: description[name] for name in ids})
    if vocabulary is not None:
        shutil.copyfile(vocabulary, folder / VOCABULARY)
        tokenizer = {
            "tokenizer_class": "T5Tokenizer",
            "extra_ids": num_sentinels,
            "pad_token": "<pad>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        }
        _write_json(folder / "tokenizer_config.json", tokenizer)
    return notes


def _write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_new",
    "geglu": "gated-gelu",
    "swiglu": "gated-silu",
}
# Slots of an expert of which none is ever the last.
_UNLIMITED = 2**31 - 1


def describe(config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The content of `config.json`, and what a reader should know beside it.

    Raises:
        ValueError: transformers has no such model; gives all reasons.
    """
    require_our_blocks(config, "transformers")
    reasons = _reasons(config) + (_sparse_reasons(config) if config.switch else [])
    if reasons:
        raise ValueError(
            f"this model cannot be written for transformers: {'; '.join(reasons)}; there are "
            "T5, and Switch Transformers with top-1 routing, to write for"
        )
    description = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "d_kv": config.d_head,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": EPSILON,
        # What is tied is scaled there; what is not is written twice.
        "tie_word_embeddings": config.tie_embeddings and config.scale_tied_logits,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "torch_dtype": config.precision.params,
    }
    if config.switch is None:
        return description | {"feed_forward_proj": _ACTIVATIONS[config.activation]}, []
    switch_fields, notes = _describe_switch(config, config.switch)
    return description | switch_fields, notes


def _describe_switch(
    config: ModelConfig, switch: SwitchConfig
) -> tuple[dict[str, Any], list[str]]:
    notes, capacity = [], switch.expert_capacity
    if switch.router.overflow == "dropless" or capacity is None:
        capacity = _UNLIMITED
    if switch.router.overflow == "drop" and switch.expert_capacity is None:
        notes.append(
            "transformers counts an expert's slots for each sequence, switchx here by a "
            f"capacity factor ({switch.eval_capacity_factor} in evaluation) in groups of up to "
            f"{switch.group_size} tokens: the export drops nothing. Set expert_capacity in its "
            "config.json for a limit"
        )
    if switch.router.overflow == "identity":
        notes.append(
            "a token whose expert is full keeps its input here, as in transformers up to 4.51; "
            "later releases drop it"
        )
    blocks = _sparse_blocks(config)
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": SWITCH,
        "dense_act_fn": _ACTIVATIONS[config.activation],
        "num_experts": switch.num_experts,
        "expert_capacity": capacity,
        "num_sparse_encoder_layers": num_sparse(config.num_encoder_layers, blocks["encoder"]),
        "num_sparse_decoder_layers": num_sparse(config.num_decoder_layers, blocks["decoder"]),
        "router_bias": False,
        "router_dtype": "float32",
        "router_jitter_noise": switch.router.jitter
        if switch.router.exploration == "jitter"
        else 0.0,
    }, notes


def _sparse_blocks(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        stack: tuple(
            layer
            for layer in range(getattr(config, f"num_{stack}_layers"))
            if config.is_sparse(layer, stack)
        )
        for stack in ("encoder", "decoder")
    }


def _reasons(config: ModelConfig) -> list[str]:
    wanted = {
        "architecture": "encoder_decoder",
        "norm": "rms",
        "positions": "relative",
        "use_bias": False,
        "scale_attention": False,
    }
    return [
        f"{name}={getattr(config, name)!r} (expected {value!r})"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]


def _sparse_reasons(config: ModelConfig) -> list[str]:
    switch, router = config.switch, config.switch.router
    reasons = [
        f"{name}={value!r} (expected {expected!r})"
        for name, value, expected in (
            ("SwitchConfig.sublayers", switch.sublayers, "ffn"),
            ("SwitchConfig.shared_d_ff", switch.shared_d_ff, None),
            ("SwitchConfig.expert_bias", switch.expert_bias, False),
            ("SwitchConfig.d_ff", switch.d_ff or config.d_ff, config.d_ff),
            ("RouterConfig.kind", router.kind, "top_k"),
            ("RouterConfig.num_selected", router.num_selected, 1),
            ("RouterConfig.bias_update_rate", router.bias_update_rate, None),
            ("Precision.router", config.precision.router, "float32"),
        )
        if value != expected
    ]
    if router.overflow == "reroute":
        reasons.append("RouterConfig.overflow='reroute' (expected 'drop' or 'dropless')")
    if config.is_gated:
        reasons.append(
            f"activation={config.activation!r} with experts (its experts have one input "
            "matrix: expected 'relu' or 'gelu')"
        )
    if config.is_encoder_decoder:
        for stack, blocks in _sparse_blocks(config).items():
            count = getattr(config, f"num_{stack}_layers")
            if num_sparse(count, blocks) is None:
                reasons.append(
                    f"the sparse blocks {', '.join(map(str, blocks))} of the {count} of the "
                    f"{stack} (expected 1 and every n-th after it, all or none)"
                )
    return reasons
