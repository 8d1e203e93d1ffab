# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of T5X, version 3: T5, T5 1.1 and flaxformer's Switch Transformers.

`checkpoint_<step>/checkpoint` is `{"version": 3, "optimizer": {"target": ..., "state": ...}}`
in msgpack; an array is in the file itself, or as the description of a zarr folder
`target.encoder.x` next to it. This module reads it without TensorFlow and T5X. A location
outside the checkpoint that a description gives (a bucket, another folder) is not followed: its
array is read from the checkpoint's own folder.

There are two layouts. By layers: `target/encoder/layers_3/mlp/wi/kernel`. Scanned: the blocks
of one run are stacked along axis 1, `target/encoder/encoder/subblock_1/mlp/wi/kernel`
`[D, N, F]`, without `subblock_1` if all blocks are alike. Kernels are `[in, out]`; heads are
joined or separate.

Dims: V vocabulary, D model, E experts, F ffn, H heads, K head size, N blocks of one scanned
run, U buckets of relative positions
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore
from flax import serialization

from switchx.fields import require
from switchx.interop.tensor_folder import (
    in_dtype,
    letters_of,
    on_disk,
    require_finite,
    require_same_tensors,
    shape_of,
)
from switchx.models.config import ModelConfig, require_our_blocks
from switchx.object_store import absolute, read_json_object, require_no_lfs_pointer
from switchx.tree import nested

INDEX = "checkpoint"
_VERSION = 3
_DTYPES = {name: jnp.dtype(name) for name in ("<f4", "<f8", "<f2", "bfloat16")}
# What a hostile file may not exceed.
_MOST_CHUNKS = 1 << 20
_MOST_HEADER_BYTES = 1 << 20
_MOST_LEVELS = 64
_MOST_SIZE = 1 << 62
_SCAN_AXIS = 1
# A damaged index fails wherever the damage is.
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError)


class T5XFolder:
    """The parameters of a T5X checkpoint.

    Attributes:
        shapes: shape of every array below `target`, by name: `target/encoder/...`.

    Raises:
        ValueError: the folder is not such a checkpoint, or parts are missing or damaged.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._leaves = {f"target/{name}": leaf for name, leaf in _leaves(self._target())}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, leaf in self._leaves.items():
            is_array = isinstance(leaf, np.ndarray)
            self.shapes[name] = leaf.shape if is_array else self._header(name, leaf)[1]

    def read(self, name: str) -> np.ndarray:
        """Reads an array as float32; only float64 is rounded.

        Raises:
            ValueError: the array cannot be read completely, or a number is not finite.
        """
        leaf = self._leaves[name]
        array = leaf if isinstance(leaf, np.ndarray) else self._read_zarr(name, leaf)
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        require_finite(array, name, self.folder)
        return array

    def _target(self) -> dict[str, Any]:
        file = self.folder / INDEX
        if not file.is_file():
            inside = sorted(path.name for path in self.folder.glob("checkpoint_*"))
            raise ValueError(
                f"{self.folder} has no file {INDEX!r}; give the folder checkpoint_<step> of a "
                f"T5X run" + (f": it has {', '.join(inside[:8])}" if inside else "")
            )
        require_no_lfs_pointer(file)
        try:
            content = serialization.msgpack_restore(file.read_bytes())
        except _DAMAGE as error:
            raise ValueError(
                f"{file} cannot be read as msgpack ({error}); it is damaged or cut short: "
                "fetch it again"
            ) from error
        version = content.get("version") if isinstance(content, dict) else None
        require(
            version == _VERSION,
            f"{file} has version={version!r}; expected {_VERSION}: restore and save it with a "
            "T5X of 2021 or later",
        )
        optimizer = content.get("optimizer")
        target = optimizer.get("target") if isinstance(optimizer, dict) else None
        has_target = isinstance(target, dict)
        require(has_target, f"{file} has no parameters, optimizer/target; fetch it again")
        return target

    def _header(self, name: str, spec: dict[str, Any]):
        """Folder, shape, dtype, chunks and separator of a zarr array."""
        kvstore = spec["kvstore"]
        path = kvstore.get("path") if isinstance(kvstore, dict) else None
        path = spec.get("path") if path is None else path  # TensorStore before 0.1.14
        plain = path.rstrip("/") if isinstance(path, str) else ""
        is_plain = plain not in ("", ".", "..") and not set(plain) & set("/\\\0")
        require(
            spec["driver"] == "zarr" and is_plain,
            f"{self.folder / INDEX} describes {name} as driver={spec['driver']!r} with "
            f"path={path!r}; expected zarr in a folder of its own beside it: do not use this "
            "checkpoint",
        )
        file = self.folder / plain / ".zarray"
        try:
            header = read_json_object(file, _MOST_HEADER_BYTES)
            shape, chunks = tuple(header["shape"]), tuple(header["chunks"])
            numbers = [type(n) is int and 1 <= n <= _MOST_SIZE for n in (*shape, *chunks)]
            if not all(numbers) or len(shape) != len(chunks):
                raise ValueError(f"shape {shape} in chunks {chunks}")
            dtype = _DTYPES[header["dtype"]]
            if (separator := header.get("dimension_separator", ".")) not in (".", "/"):
                raise ValueError(f"dimension_separator {separator!r:.80}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} describes no array of floats that can be read ({error!r:.300}); fetch "
                "the folder again"
            ) from error
        return file.parent, shape, dtype, chunks, separator

    def _read_zarr(self, name: str, spec: dict[str, Any]) -> np.ndarray:
        folder, shape, dtype, chunks, separator = self._header(name, spec)
        grid = [math.ceil(size / chunk) for size, chunk in zip(shape, chunks, strict=True)]
        require(
            math.prod(grid) <= _MOST_CHUNKS and math.prod(chunks) <= 2 * math.prod(shape),
            f"{folder}: shape {list(shape)} in chunks {list(chunks)}; expected at most "
            f"{_MOST_CHUNKS} chunks, none larger than the array",
        )
        # A missing chunk would be read as zeros.
        for indices in itertools.product(*map(range, grid)):
            chunk = separator.join(map(str, indices))
            is_there = (folder / chunk).is_file()
            require(is_there, f"{folder} has no chunk {chunk}; fetch the folder again")
        kvstore = {"driver": "file", "path": f"{absolute(folder)}/"}
        try:
            store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
            array = np.asarray(store.read().result())
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{folder} cannot be read ({str(error)[:300]}); it is damaged, cut short or in "
                "a form that TensorStore does not read: fetch it again"
            ) from error
        is_that = array.shape == shape and array.dtype == dtype
        require(is_that, f"{folder} holds another array than its .zarray; fetch it again")
        return array


def _leaves(tree: dict[str, Any], prefix: str = ""):
    """Names of arrays and of descriptions of arrays; anything else is refused."""
    if prefix.count("/") > _MOST_LEVELS:
        raise ValueError(f"target/{prefix:.60} is nested too deeply: do not use it")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not {"driver", "kvstore", "metadata"} <= value.keys():
            yield from _leaves(value, f"{name}/")
        elif isinstance(value, np.ndarray | dict):
            yield name, value
        else:
            raise ValueError(
                f"target/{name} is a {type(value).__name__}; expected an array: this is no "
                "checkpoint of T5X's"
            )


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where one of our parameters is in a T5X checkpoint.

    Attributes:
        name: name of the array in T5X.
        repeat: number of the block among those stacked in the array; None if the whole array
            is the parameter.
    """

    name: str
    repeat: int | None = None


def origins(config: ModelConfig, found: Iterable[str]) -> dict[str, Origin]:
    """Maps the name of each of our parameters to where T5X keeps it.

    Args:
        config: configuration of an unrolled encoder-decoder.
        found: names in the checkpoint, which determine the layout.
    """
    found = set(found)
    result = {"embedding/embedding_VD": Origin("target/token_embedder/embedding")}
    if not config.tie_embeddings:
        result["embedding/w_logits_DV"] = Origin("target/decoder/logits_dense/kernel")
    for stack in ("encoder", "decoder"):
        result[f"{stack}/norm/scale_D"] = Origin(f"target/{stack}/{stack}_norm/scale")
        result[f"{stack}/relative_bias/bias_UH"] = Origin(bias_names(stack, found)[0])
        for layer in range(getattr(config, f"num_{stack}_layers")):
            folder, repeat = _block(config, stack, layer, found)
            for ours, theirs in _names_of_block(config, stack, layer).items():
                name = f"{stack}/blocks/layer_{layer}/{ours}"
                result[name] = Origin(f"{folder}/{theirs}", repeat)
    return result


def bias_names(stack: str, found: set[str]) -> list[str]:
    """Names of a stack's relative bias: one, or one per block if blocks are scanned."""
    shared = f"target/{stack}/relpos_bias/rel_embedding"
    scanned = re.compile(rf"target/{stack}/{stack}/(subblock_\d+/)?relpos_bias/rel_embedding")
    own = sorted(filter(scanned.fullmatch, found))
    return own if own and shared not in found else [shared]


def _block(config, stack: str, layer: int, found: set[str]) -> tuple[str, int | None]:
    """The folder of a block, and its number in it if blocks are scanned."""
    scanned = f"target/{stack}/{stack}/"
    if not any(name.startswith(scanned) for name in found):
        return f"target/{stack}/layers_{layer}", None
    if not any(name.startswith(f"{scanned}subblock_") for name in found):
        return scanned.removesuffix("/"), layer
    period = len({n.split("/")[3] for n in found if n.startswith(f"{scanned}subblock_")})
    return f"{scanned}subblock_{layer % period}", layer // period


def _names_of_block(config: ModelConfig, stack: str, layer: int) -> dict[str, str]:
    """Our parameters of one block -> theirs, both relative to the block."""
    attentions = {"self_attention": ("attention", "pre_attention_layer_norm")}
    if stack == "decoder":
        attentions = {
            "self_attention": ("self_attention", "pre_self_attention_layer_norm"),
            "cross_attention": ("encoder_decoder_attention", "pre_cross_attention_layer_norm"),
        }
    names = {"ffn_norm/scale_D": "pre_mlp_layer_norm/scale"}
    for ours, (theirs, norm) in attentions.items():
        names[f"{ours}_norm/scale_D"] = f"{norm}/scale"
        for part in ("query", "key", "value"):
            names[f"{ours}/w_{part}_DHK"] = f"{theirs}/{part}/kernel"
        names[f"{ours}/w_out_HKD"] = f"{theirs}/out/kernel"
    is_sparse = config.is_sparse(layer, stack)
    ours, theirs, E = ("ffn/experts", "mlp/expert", "E") if is_sparse else ("ffn", "mlp", "")
    if is_sparse:
        names["ffn/w_router_DE"] = "mlp/router/router_weights/w/kernel"
    names[f"{ours}/w_in_{E}DF"] = f"{theirs}/{'wi_0' if config.is_gated else 'wi'}/kernel"
    if config.is_gated:
        names[f"{ours}/w_gate_{E}DF"] = f"{theirs}/wi_1/kernel"
    names[f"{ours}/w_out_{E}FD"] = f"{theirs}/wo/kernel"
    return names


def their_shapes(parameter: str, config: ModelConfig, repeats: int | None) -> list[tuple]:
    """Shapes in which T5X may keep a parameter, heads joined first.

    Args:
        repeats: number of blocks stacked in one array; None if they are not stacked.
    """
    shape, letters = shape_of(parameter, config), letters_of(parameter)
    shapes = [shape]
    if letters == "UH":
        shapes = [shape[::-1]]
    elif "HK" in letters:
        first = letters.index("HK")
        joined = (*shape[:first], math.prod(shape[first : first + 2]), *shape[first + 2 :])
        shapes = [joined, shape]
    if repeats is not None:
        shapes = [(*s[:_SCAN_AXIS], repeats, *s[_SCAN_AXIS:]) for s in shapes]
    return shapes


_WAY_OUT = (
    "give the gin file of the model that this is, --gin.NAME=VALUE for its sizes; what other "
    "models of flaxformer add (extra_mlp of ST-MoE, biases) cannot be converted"
)


def read_checkpoint(
    folder: str | os.PathLike, config: ModelConfig, scratch: pathlib.Path | None = None
) -> tuple[ModelConfig, dict]:
    """Parameters from `checkpoint_<step>`, whichever layout they are in.

    One array at a time is in memory, with all layers of a scanned one.

    Args:
        config: the model, which the checkpoint itself does not describe.
        scratch: folder for the parameters, which are then mapped from files; None keeps them in
            memory.

    Returns:
        The configuration with unrolled layers, and the parameters as NumPy arrays.

    Raises:
        ValueError: the folder is not a checkpoint, is damaged, or holds other arrays than the
            model has (all are named).
    """
    reasons = not_t5(config)
    if config.switch is not None and not config.switch.router.has_weights:
        reasons.append(f"RouterConfig.kind={config.switch.router.kind!r}")
    has_bias = config.switch is not None and config.switch.router.has_logit_bias
    reasons += unexpected(
        ("relative_bias_per_layer", config.relative_bias_per_layer, False),
        ("RouterConfig.has_logit_bias", has_bias, False),
    )
    require(
        not reasons,
        f"the gin file describes no model of T5X's: {'; '.join(reasons)}; give T5 or Switch "
        "Transformers, such as configs/models/switch_base_released.gin",
    )
    config = dataclasses.replace(config, scan_layers=False)
    source = T5XFolder(pathlib.Path(folder).expanduser())
    ours = origins(config, source.shapes)
    expected = _expected(config, ours, source)
    require_same_tensors(expected, source.shapes, str(source.folder), _WAY_OUT)
    params: dict[str, np.ndarray] = {}
    by_name = sorted(ours.items(), key=lambda item: item[1].name)
    array_of = functools.lru_cache(1)(source.read)
    for parameter, place in by_name:
        array = array_of(place.name)
        if place.repeat is not None:
            array = array.take(place.repeat, axis=_SCAN_AXIS)
        if letters_of(parameter) == "UH":
            array = _one_bias(parameter.partition("/")[0], source).T
        array = np.ascontiguousarray(array).reshape(shape_of(parameter, config))
        array = in_dtype(parameter, array, config.precision.params)
        params[parameter] = on_disk(array, scratch)
    return config, nested({parameter: params[parameter] for parameter in ours})


def _expected(config, ours: dict[str, Origin], source: T5XFolder) -> dict[str, tuple[int, ...]]:
    """Shape of every array; of two allowed ones, the one that is found."""
    expected = {}
    for parameter, place in ours.items():
        repeats = None
        if place.repeat is not None:
            repeats = 1 + max(p.repeat for p in ours.values() if p.name == place.name)
        names, stack = [place.name], parameter.partition("/")[0]
        if letters_of(parameter) == "UH":
            names = bias_names(stack, set(source.shapes))
            is_shared = names[0] == f"target/{stack}/relpos_bias/rel_embedding"
            num_blocks = getattr(config, f"num_{stack}_layers")
            repeats = None if is_shared else num_blocks // len(names)
        shapes = their_shapes(parameter, config, repeats)
        for name in names:
            is_there = source.shapes.get(name) in shapes
            expected[name] = source.shapes[name] if is_there else shapes[0]
    return expected


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


def not_t5(config: ModelConfig) -> list[str]:
    """A model's features that T5 and Switch Transformers lack, and theirs instead.

    Raises:
        ValueError: the module is a user's own.
    """
    require_our_blocks(config, "conversion")
    switch = config.switch
    wanted = [
        ("architecture", config.architecture, "encoder_decoder"),
        ("norm", config.norm, "rms"),
        ("positions", config.positions, "relative"),
        ("use_bias", config.use_bias, False),
        ("attention_bias", config.biases_of_attention, "none"),
        ("num_kv_heads", config.kv_heads, config.num_heads),
        ("qk_norm", config.qk_norm, "none"),
        ("norm_place", config.norm_place, "before"),
        ("scale_attention", config.scale_attention, False),
        ("separate_embeddings", config.separate_embeddings, False),
    ]
    if switch is not None:
        wanted += [
            ("SwitchConfig.sublayers", switch.sublayers, "ffn"),
            ("SwitchConfig.shared_d_ff", switch.shared_d_ff, None),
            ("SwitchConfig.expert_bias", switch.expert_bias, False),
            ("RouterConfig.bias_update_rate", switch.router.bias_update_rate, None),
            ("RouterConfig.score", switch.router.score, "softmax"),
            ("RouterConfig.gate_scale", switch.router.gate_scale, 1.0),
            ("RouterConfig.num_expert_groups", switch.router.num_expert_groups, 1),
            ("RouterConfig.balance_load", switch.router.balance_load, "current"),
            ("RouterConfig.counts_merged", switch.router.counts_merged, False),
            ("RouterConfig.num_copies", switch.router.num_copies, 1),
        ]
    return unexpected(*wanted)


def unexpected(*wanted: tuple[str, Any, Any]) -> list[str]:
    """Descriptions of the values that differ from the expected ones."""
    return [
        f"{name}={value!r} (expected {expected!r})"
        for name, value, expected in wanted
        if value != expected
    ]
