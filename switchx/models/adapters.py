# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of a model: which weights get one, their first values, and merging.

Hu et al. 2021 (LoRA, arXiv:2106.09685), section 4.1. Adapters are a tree of their own, with A
and B by the path of their weight: `decoder/blocks/layer_0/ffn/w_in_DF/a_DJ`, `.../b_JF`. They
are all that is trained. With 4 or 8 bits the experts of the base are quantized (Dettmers et al.
2023, QLoRA, arXiv:2305.14314), and the merged model is then the one that was trained.
Dims: N stacked layers, E experts, D model, F ffn, J rank
"""

import dataclasses
import math
import os
import re
import zlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QTensor, dequantize, quantize
from pallas_kernels.implementations import form_of_int4
from switchx import tree
from switchx.axes import dims_of
from switchx.fields import (
    at_resume,
    require,
    require_above_zero,
    require_at_least,
    require_below_one,
    require_choice,
)
from switchx.layers.adapted_weight import AdaptedWeight, adapter_dims
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.models.unroll import scanned_blocks

# Weights by the kind of layer they belong to; patterns match whole paths.
TARGETS = {
    "attention": r".*attention/w_(query|key|value|out)_\w+",
    "dense_ffn": r".*/(ffn|shared_expert)/w_(in|gate|out)_(DF|FD)",
    "experts": r"(.*/)?experts/w_(in|gate|out)_(EDF|EFD)",
    "routers": r".*/w_router_DE",
}
ALL_BUT_ROUTERS = ("attention", "dense_ffn", "experts")
_QUANTIZED = TARGETS["experts"]


@dataclasses.dataclass(frozen=True)
class LoRASpec:
    """The adapters of a model, and the base that they are added to.

    Attributes:
        base: run folder of the base, a trained or converted model.
        step: step of the base's checkpoint; None is the newest complete one when the run
            begins, and the run keeps that one when it is resumed.
        rank: columns of A and rows of B, LoRA's r.
        alpha: factor of the adapters' products, which are scaled by alpha / rank.
        dropout: dropout rate of the inputs of A; those of routers are never dropped.
        targets: weights that get an adapter, out of attention, dense_ffn, experts and routers;
            None is all of these that the model has, except routers.
        shared_by_experts: whether the experts of a layer share one A and one B for each of
            their weights; otherwise each expert has its own.
        bits: bits of the base's experts, 4 or 8, which are quantized when they are read
            (QLoRA); None leaves them as they are.
        group_size: number of channels that share a scale, with `bits`; None is all of them.
    """

    base: str | os.PathLike = at_resume()
    step: int | Literal["best"] | None = at_resume(None)
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    shared_by_experts: bool = False
    bits: int | None = None
    group_size: int | None = None

    def __post_init__(self):
        require_at_least(self, 1, "rank", "group_size")
        require_above_zero(self, "alpha")
        require_below_one(self, "dropout")
        for target in self.targets or ():
            require_choice("LoRASpec.targets", target, TARGETS)
        require(
            self.targets is None or len(set(self.targets)) == len(self.targets) > 0,
            f"LoRASpec.targets={self.targets}: nothing would be trained, or a name stands "
            f"twice; use some of {', '.join(TARGETS)}, or None for all but routers",
        )
        if self.targets is not None:
            object.__setattr__(self, "targets", tuple(self.targets))
        require(
            self.bits in (None, 4, 8),
            f"LoRASpec.bits={self.bits}; use 4 or 8, or None for the base as it is",
        )
        require(
            self.bits is not None or self.group_size is None,
            f"LoRASpec.group_size={self.group_size} without bits: nothing is quantized; give "
            "bits=4 or 8, or leave group_size out",
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def target_of(name: str) -> str | None:
    """The target that a weight of this path belongs to, or None."""
    return next((t for t, pattern in TARGETS.items() if re.fullmatch(pattern, name)), None)


def abstract_adapters(params: dict, spec: LoRASpec) -> dict:
    """The names and shapes of a model's adapters.

    Args:
        params: the model's parameters, arrays or shape structs, not quantized.

    Raises:
        ValueError: a target matches no weight of the model.
    """
    leaves = tree.named_leaves(params)
    found = {}
    matched = set()
    for name, leaf in leaves.items():
        matched.add(target := target_of(name))
        if target not in (spec.targets or ALL_BUT_ROUTERS):
            continue
        dims = dims_of(name.rpartition("/")[2], leaf.ndim)
        sizes = dict(zip(dims, leaf.shape, strict=True)) | {"J": spec.rank}
        own = adapter_dims(dims.removeprefix("N"), is_shared=spec.shared_by_experts)
        for letter, letters in zip("ab", own, strict=True):
            stacked = ("N" if dims.startswith("N") else "") + letters
            shape = tuple(sizes[each] for each in stacked)
            # As in PEFT: small updates in bfloat16 would be rounded away.
            dtype = jnp.promote_types(leaf.dtype, jnp.float32)
            found[f"{name}/{letter}_{letters}"] = jax.ShapeDtypeStruct(shape, dtype)
    missing = [target for target in spec.targets or () if target not in matched]
    require(
        not missing and bool(found),
        f"LoRASpec.targets={spec.targets} matches no weight of {', '.join(missing) or 'them'}: "
        f"this model has {', '.join(t for t in TARGETS if t in matched) or 'none'}; use these",
    )
    return tree.nested(found)


def init_adapters(config: ModelConfig, spec: LoRASpec, key) -> dict:
    """Adapters that change nothing: A uniform within 1 / sqrt(inputs), as in PEFT, B zero.

    Each is drawn by the path of its weight and its layer, whether layers are scanned or not.
    """

    def draw(name: str, leaf):
        dims = name.rpartition("_")[2]
        if not dims.endswith("J"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        sizes = zip(dims, leaf.shape, strict=True)
        bound = math.prod(size for letter, size in sizes if letter not in "EJ") ** -0.5
        return jax.random.uniform(_key_of(key, name), leaf.shape, leaf.dtype, -bound, bound)

    alone = dataclasses.replace(config, scan_layers=False)
    adapters = tree.map_named(draw, abstract_adapters(abstract_params(alone), spec))
    return (
        scanned_blocks(adapters, config.period, jnp.stack) if config.scan_layers else adapters
    )


def _key_of(key, name: str):
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def quantized_base(params: dict, spec: LoRASpec, platform: str | None = None) -> dict:
    """The base's parameters, with its experts as `QTensor`s if `spec` has bits.

    Raises:
        ValueError: the model has no experts; see `pallas_kernels.quantize`.
    """
    if spec.bits is None:
        return params
    require(
        any(re.fullmatch(_QUANTIZED, name) for name in tree.named_leaves(params)),
        f"LoRASpec.bits={spec.bits} of a model without experts, whose matrices alone are "
        "quantized; use bits=None, or a sparse model",
    )
    form = form_of_int4(platform)
    form = "native" if form == "fragments" else form  # results of float32 are made of parts

    def as_read(w_EDF):
        return getattr(quantize(w_EDF, spec.bits, group_size=spec.group_size), form)()

    def convert(name, leaf):
        if not re.fullmatch(_QUANTIZED, name):
            return leaf
        return as_read(leaf) if leaf.ndim == 3 else jax.vmap(as_read)(jnp.asarray(leaf))

    return tree.map_named(convert, params)


def with_adapters(base: dict, adapters: dict, spec: LoRASpec, key=None) -> dict:
    """The model's parameters, with `AdaptedWeight`s in place of the weights with adapters.

    Args:
        base: parameters that `quantized_base` returns.
        key: random key of dropout; None is deterministic.
    """

    pairs: dict[str, list] = {}
    for name, leaf in tree.named_leaves(adapters).items():  # A before B
        path, _, last = name.rpartition("/")
        pairs.setdefault(path, []).append((last.rpartition("_")[2], leaf))

    def put(path, leaf):
        if (name := tree.path_name(path)) not in pairs:
            return leaf
        (a_dims, a), (b_dims, b) = pairs[name]
        if target_of(name) == "routers":  # small, and read by no product that takes an adapter
            return (leaf + spec.scale * (a @ b)).astype(leaf.dtype)
        own = None if key is None or not spec.dropout else _key_of(key, name)
        if own is not None and a.ndim > len(a_dims):
            own = jax.random.split(own, a.shape[0])
        dims = name.rpartition("_")[2], a_dims, b_dims
        return AdaptedWeight(leaf, a, b, own, dims, spec.scale, spec.dropout)

    return jax.tree_util.tree_map_with_path(
        put, base, is_leaf=lambda leaf: isinstance(leaf, QTensor)
    )


def merged(params: dict, adapters: dict, spec: LoRASpec) -> dict:
    """Parameters W + s A B, in the dtypes, the shardings and the kind of arrays of `params`.

    Args:
        params: the base's parameters, not quantized: with `LoRASpec.bits` each of its experts
            is quantized and dequantized, so that the model is the one that was trained.
    """

    def merge(leaf, changed):
        if changed is leaf:
            return leaf
        if isinstance(leaf, jax.Array):
            whole = jax.jit(_whole, out_shardings=leaf.sharding, static_argnums=1)
            return whole(changed, leaf.dtype)
        return np.asarray(_whole(changed, leaf.dtype))

    base = quantized_base(params, spec)
    return jax.tree.map(merge, params, with_adapters(base, adapters, spec))


def _whole(changed, dtype):
    """The matrix that an adapted or a quantized weight stands for."""
    if isinstance(changed, AdaptedWeight):
        return (_whole(changed.base, jnp.float32) + changed.product()).astype(dtype)
    if isinstance(changed, QTensor):
        stacked = changed.values.ndim > 3
        changed = (jax.vmap(dequantize) if stacked else dequantize)(changed)
    return jnp.asarray(changed, dtype)
