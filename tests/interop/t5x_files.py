# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in T5X's form, version 3, by hand: raw or gzipped zarr chunks, msgpack.

The names are those of T5X's and flaxformer's trees, written out.
"""

import dataclasses
import gzip
import itertools
import json
import math
import pathlib

import numpy as np
from flax import serialization

from switchx.models.config import ModelConfig, SwitchConfig
from switchx.tree import named_leaves
from tests.interop.folders import T5

SWITCH = dataclasses.replace(
    T5, num_encoder_layers=4, num_decoder_layers=2, switch=SwitchConfig(3, every=2)
)


def by_layers(config: ModelConfig, params: dict, *, heads_apart: bool = False) -> dict:
    """Our unrolled parameters in T5X's tree: `target/...` -> array."""
    ours = {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}
    tree = {"token_embedder/embedding": ours["embedding/embedding_VD"]}
    if "embedding/w_logits_DV" in ours:
        tree["decoder/logits_dense/kernel"] = ours["embedding/w_logits_DV"]
    for stack in ("encoder", "decoder"):
        tree[f"{stack}/relpos_bias/rel_embedding"] = ours[f"{stack}/relative_bias/bias_UH"].T
        tree[f"{stack}/{stack}_norm/scale"] = ours[f"{stack}/norm/scale_D"]
        for layer in range(getattr(config, f"num_{stack}_layers")):
            prefix = f"{stack}/blocks/layer_{layer}/"
            block = {n.removeprefix(prefix): x for n, x in ours.items() if n.startswith(prefix)}
            for name, value in block.items():
                tree |= {
                    f"{stack}/layers_{layer}/{theirs}": array
                    for theirs, array in _theirs(stack, name, value, heads_apart).items()
                }
    if config.is_gated:  # `wi` has a number beside a second one
        tree = {name.replace("/wi/", "/wi_0/"): array for name, array in tree.items()}
    return {f"target/{name}": np.ascontiguousarray(array) for name, array in tree.items()}


def _theirs(stack, name, value, heads_apart) -> dict[str, np.ndarray]:
    attention = "attention" if stack == "encoder" else "self_attention"
    norms = {
        "self_attention_norm": f"pre_{attention}_layer_norm",
        "cross_attention_norm": "pre_cross_attention_layer_norm",
        "ffn_norm": "pre_mlp_layer_norm",
    }
    part, last = name.rsplit("/", 1)
    if part in norms:
        return {f"{norms[part]}/scale": value}
    if part in ("self_attention", "cross_attention"):
        where = attention if part == "self_attention" else "encoder_decoder_attention"
        kind = last.split("_")[1]
        if not heads_apart:
            D = value.shape[-1] if kind == "out" else value.shape[0]
            value = value.reshape(-1, D) if kind == "out" else value.reshape(D, -1)
        return {f"{where}/{kind}/kernel": value}
    matrix = {"in": "wi", "gate": "wi_1", "out": "wo", "router": ""}[last.split("_")[1]]
    if not matrix:
        return {"mlp/router/router_weights/w/kernel": value}
    return {f"mlp/{'expert/' if 'experts' in part else ''}{matrix}/kernel": value}


def scanned(tree: dict, period: int, *, own_bias: bool = False) -> dict:
    """The tree with its blocks stacked along axis 1, `period` of them a subblock each.

    Args:
        own_bias: every block has the relative bias, as flaxformer's scanned blocks do.
    """
    result, stacks = {}, {}
    for name, array in tree.items():
        parts = name.split("/")
        if not parts[2].startswith("layers_"):
            result[name] = array
            continue
        layer = int(parts[2].removeprefix("layers_"))
        block = [f"subblock_{layer % period}"] if period > 1 else []
        new = "/".join(["target", parts[1], parts[1], *block, *parts[3:]])
        stacks.setdefault(new, []).append((layer, array))
    result |= {
        name: np.stack([array for _, array in sorted(items, key=lambda item: item[0])], axis=1)
        for name, items in stacks.items()
    }
    if own_bias:
        for stack in ("encoder", "decoder"):
            bias = result.pop(f"target/{stack}/relpos_bias/rel_embedding")
            inside = f"target/{stack}/{stack}/"
            for norm in [n for n in result if n.startswith(inside) and "pre_mlp" in n]:
                name = norm.replace("pre_mlp_layer_norm/scale", "relpos_bias/rel_embedding")
                repeats = result[norm].shape[1]
                result[name] = np.repeat(bias[:, None], repeats, axis=1)
    return result


def write_t5x(
    folder: pathlib.Path, tree: dict, *, driver: str = "file", compressor: str | None = None
) -> pathlib.Path:
    """Writes `checkpoint` and the zarr folders; norms' scales stay in the index itself.

    Args:
        driver: what the descriptions say of where they are: `file`, or `gcs` for a bucket.
    """
    folder.mkdir(parents=True)
    nested: dict = {}
    for name, array in tree.items():
        leaf = (
            array if name.endswith("/scale") else _write_zarr(folder, name, array, compressor)
        )
        if driver == "gcs" and isinstance(leaf, dict):
            leaf["kvstore"] |= {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
        *parents, last = name.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    content = {"version": 3, "optimizer": nested | {"state": {"step": np.int32(7)}}}
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(content))
    return folder


def _write_zarr(folder, name: str, array: np.ndarray, compressor: str | None) -> dict:
    """One array in chunks of at most half its size, zarr version 2; the description of it."""
    path = name.replace("/", ".")
    chunks = [math.ceil(size / 2) for size in array.shape]
    dtype = {"float32": "<f4", "bfloat16": "bfloat16"}[str(array.dtype)]
    metadata = {
        "shape": list(array.shape),
        "chunks": chunks,
        "compressor": compressor and {"id": compressor, "level": 1},
    }
    header = metadata | {
        "dtype": dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "zarr_format": 2,
        "dimension_separator": ".",
    }
    (folder / path).mkdir()
    (folder / path / ".zarray").write_text(json.dumps(header))
    grid = [range(math.ceil(s / c)) for s, c in zip(array.shape, chunks, strict=True)]
    for index in itertools.product(*grid):
        chunk = np.zeros(chunks, array.dtype)
        part = array[
            tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))
        ]
        chunk[tuple(slice(size) for size in part.shape)] = part
        data = chunk.tobytes()
        data = gzip.compress(data, 1) if compressor == "gzip" else data
        (folder / path / ".".join(map(str, index))).write_bytes(data)
    return {
        "driver": "zarr",
        "dtype": str(array.dtype),
        "kvstore": {"driver": "file", "path": path},
        "metadata": metadata,
    }
