# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of a model: which weights get one, their first values, and merging.

Hu et al. 2021 (LoRA, arXiv:2106.09685), section 4.1. Adapters are a tree of their own, with A
and B by the path of their weight: `decoder/blocks/layer_0/ffn/w_in_DF/a_DJ`, `.../b_JF`. They
are all that is trained. With 4 or 8 bits the experts of the base are quantized (Dettmers et al.
2023, QLoRA, arXiv:2305.14314), and what is merged then is what was trained on.
Dims: N stacked layers, E experts, D model, F ffn, J rank
"""

import dataclasses
import functools
import math
import os
import re
import zlib
from typing import Any, Literal

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

# Weights by what they are of; patterns of whole paths.
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
    """The adapters of a model, and the base that they stand beside.

    Attributes:
        base: run folder of the base: of a trained or a converted model.
        step: step of the base's checkpoint; None is the newest complete one when the run
            begins, and the run keeps that one when it is resumed.
        rank: columns of A and rows of B, LoRA's r.
        alpha: factor of the adapters' products, which are scaled by alpha / rank.
        dropout: dropout rate of what A reads; of routers nothing is dropped.
        targets: weights that get an adapter, out of attention, dense_ffn, experts and routers;
            None is all of these that the model has, without routers.
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
    leaves, found, matched = tree.named_leaves(params), {}, set()
    for name, leaf in leaves.items():
        target = target_of(name)
        if target is None:
            continue
        matched.add(target)
        if target not in (spec.targets or ALL_BUT_ROUTERS):
            continue
        dims = dims_of(name.rpartition("/")[2], leaf.ndim)
        sizes = dict(zip(dims, leaf.shape, strict=True)) | {"J": spec.rank}
        is_shared = spec.shared_by_experts and target == "experts"
        for letter, own in zip(
            "ab", adapter_dims(dims.lstrip("N"), is_shared=is_shared), strict=True
        ):
            stacked = "N" * (dims[0] == "N") + own
            shape = tuple(sizes[each] for each in stacked)
            found[f"{name}/{letter}_{own}"] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    missing = [target for target in spec.targets or () if target not in matched]
    require(
        not missing and bool(found),
        f"LoRASpec.targets={spec.targets} matches no weight of {', '.join(missing) or 'them'}: "
        f"this model has {', '.join(t for t in TARGETS if t in matched) or 'none'}; use these",
    )
    return tree.nested(found)


def init_adapters(config: ModelConfig, spec: LoRASpec, key) -> dict:
    """Adapters that change nothing: A uniform within 1 / sqrt(inputs), as PEFT's, B zero.

    Each is drawn by the path of its weight and its layer, whether layers are scanned or not.
    """

    def draw(name: str, leaf):
        last = name.rpartition("/")[2]
        if last.startswith("b_"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        dims = dims_of(last, leaf.ndim)
        inputs = (size for d, size in zip(dims, leaf.shape, strict=True) if d not in "NEJ")
        bound = 1 / math.sqrt(math.prod(inputs))
        uniform = functools.partial(
            jax.random.uniform, dtype=leaf.dtype, minval=-bound, maxval=bound
        )
        if dims[0] != "N":
            return uniform(_key_of(key, name), leaf.shape)
        layer = int(re.search(r"/layer_(\d+)/", name)[1])
        layers = (n * config.period + layer for n in range(leaf.shape[0]))
        names = (name.replace(f"/layer_{layer}/", f"/layer_{each}/") for each in layers)
        keys = [_key_of(key, each) for each in names]
        return jnp.stack([uniform(each, leaf.shape[1:]) for each in keys])

    return tree.map_named(draw, abstract_adapters(abstract_params(config), spec))


def _key_of(key, name: str):
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def quantized_base(params: dict, spec: LoRASpec, platform: str | None = None) -> dict:
    """The base's parameters, its experts `QTensor`s where `spec` has bits.

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
    one_layer = functools.partial(quantize, bits=spec.bits, group_size=spec.group_size)

    def convert(name, leaf):
        if not re.fullmatch(_QUANTIZED, name):
            return leaf
        form = form_of_int4(platform or jax.default_backend())

        def as_read(w_EDF):
            return getattr(one_layer(w_EDF), form)()

        return as_read(leaf) if leaf.ndim == 3 else jax.vmap(as_read)(leaf)

    return tree.map_named(convert, params)


def with_adapters(base: dict, adapters: dict, spec: LoRASpec, key=None) -> dict:
    """The model's parameters, `AdaptedWeight`s in the place of the weights with adapters.

    Args:
        base: parameters that `quantized_base` returns.
        key: random key of dropout; None is deterministic.
    """

    def put(path, leaf):
        name = tree.path_name(path)
        if (pair := pairs.get(name)) is None:
            return leaf
        (a_name, a), (b_name, b) = sorted(pair.items())
        if re.fullmatch(TARGETS["routers"], name):  # D by E numbers, of which no product is cut
            return leaf + spec.scale * (a @ b).astype(leaf.dtype)
        stacked = a.ndim - len(a_name.rpartition("_")[2])
        own = None if key is None or not spec.dropout else _key_of(key, name)
        own = jax.random.split(own, a.shape[0]) if own is not None and stacked else own
        dims = tuple(each.rpartition("_")[2] for each in (name, a_name, b_name))
        return AdaptedWeight(leaf, a, b, own, dims, spec.scale, spec.dropout)

    pairs = _pairs(adapters)
    return jax.tree_util.tree_map_with_path(put, base, is_leaf=_is_quantized)


def merged(params: dict, adapters: dict, spec: LoRASpec) -> dict:
    """Parameters W + s A B, in the dtypes, the shardings and the kind of arrays of `params`.

    Args:
        params: the base's parameters, not quantized: with `LoRASpec.bits` each of its experts
            is quantized and dequantized, so that the model is the one that was trained.
    """
    pairs = _pairs(adapters)

    def merge(name, leaf):
        pair = pairs.get(name)
        is_rounded = spec.bits is not None and re.fullmatch(_QUANTIZED, name)
        if pair is None and not is_rounded:
            return leaf
        one = functools.partial(_merge, name.rpartition("_")[2], spec, bool(is_rounded))
        if isinstance(leaf, jax.Array):
            return jax.jit(one, out_shardings=leaf.sharding)(leaf, pair)
        return np.asarray(one(jnp.asarray(leaf), pair))

    return tree.map_named(merge, params)


def _merge(dims: str, spec: LoRASpec, is_rounded: bool, w, pair: dict | None):
    total = w.astype(jnp.float32)
    if is_rounded:

        def rounded(w_EDF):
            return dequantize(quantize(w_EDF, spec.bits, group_size=spec.group_size))

        total = (rounded if w.ndim == 3 else jax.vmap(rounded))(w)
    if pair is not None:
        (a_name, a), (b_name, b) = sorted(pair.items())
        a_dims, b_dims = (each.rpartition("_")[2] for each in (a_name, b_name))
        is_shared = dims.startswith("E") and not a_dims.startswith("E")
        product = jnp.einsum(
            f"...{a_dims},...{b_dims}->...{dims.removeprefix('E') if is_shared else dims}",
            jnp.asarray(a, jnp.float32),
            jnp.asarray(b, jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        total = total + spec.scale * (product[..., None, :, :] if is_shared else product)
    return total.astype(w.dtype)


def _pairs(adapters: dict) -> dict[str, dict[str, Any]]:
    """A and B by the path of their weight."""
    found: dict[str, dict[str, Any]] = {}
    for name, leaf in tree.named_leaves(adapters).items():
        path, _, own = name.rpartition("/")
        found.setdefault(path, {})[own] = leaf
    return found


def _is_quantized(leaf) -> bool:
    return isinstance(leaf, QTensor)
