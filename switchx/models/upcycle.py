# SPDX-License-Identifier: Apache-2.0
"""Upcycling: a dense model as a sparse one, or a sparse one with m times its experts.

Komatsuzaki et al. 2022 (arXiv:2212.05055), section 2: the FFNs of some blocks become Switch
layers, the router is new, the rest stays. Experts of a dense model are, by `DENSE_WAYS`,

    copies          copies of the FFN: the same model where gates add up to 1, with k >= 2. With
                    k = 1 the gate is a probability, near 1 / E of a new router.
    virtual_groups  k shards of F / k hidden units, E / k copies of each, which have the same
                    router columns, so that a token gets each shard once: the same model (He et
                    al. 2024, arXiv:2410.07524, section 2.3, with T = G = k).
    drop            copies in which a random share of hidden units is drawn anew, with the mean
                    and deviation of the old weights (Nakamura et al. 2025, arXiv:2502.19261).

A sparse model gets m copies of each expert and of its router column, by `SPARSE_WAYS`:

    counts_merged   k = 1: each counts as 1 / m in the softmax: the same model.
    exclusive       k >= 2: likewise, and a token chooses one copy at most: the same model.
    more_choices    a token chooses m k experts, all copies of k: the same model.
    copies          k stays (arXiv:2604.19835): a token may choose two copies of one expert, or
                    gets its expert with a gate m times smaller.

All this holds for tokens that are not dropped; padding and dropped ones take only the residual
connection.
Dims: E experts, D model, F ffn
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from switchx import tree
from switchx.fields import require, require_choice
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig, require_our_blocks
from switchx.models.params import init_params
from switchx.models.reshape import Layer, Reshaped, check_num_experts, reshaped, taken

# Seed of everything that is drawn: routers, hidden units, differences of copies.
SEED = 0
DENSE_WAYS = ("copies", "virtual_groups", "drop")
SPARSE_WAYS = ("counts_merged", "exclusive", "more_choices", "copies")
# Relative noise of router columns: among equal copies, all tokens would choose the first. It
# is above the rounding of float32.
TIES = 1e-6


def upcycled_config(
    config: ModelConfig,
    num_experts: int,
    *,
    num_selected: int = 2,
    every: int = 2,
    way: str = "copies",
) -> ModelConfig:
    """The configuration of a dense model with experts, layers unrolled.

    Args:
        num_selected: experts that a token chooses; above 1 gates are divided by their sum.
        every: period of sparse blocks: the last block of each run of `every` gets experts.
        way: one of `DENSE_WAYS`.

    Raises:
        ValueError: the model is sparse, blocks do not divide by `every`, experts or hidden
            units do not divide by the number of shards, or there are too few experts.
    """
    require_our_blocks(config, "upcycling")
    require(
        config.switch is None,
        f"experts={num_experts}: only a dense model is upcycled, and this one has experts",
    )
    require(
        num_experts >= 2,
        f"experts={num_experts} of a dense model: it is made sparse; use at least 2",
    )
    require_choice("upcycle", way, DENSE_WAYS)
    d_ff = None
    if way == "virtual_groups":
        require(
            num_selected > 1 and num_experts % num_selected == config.d_ff % num_selected == 0,
            f"upcycle='virtual_groups' with experts={num_experts}, num_selected={num_selected} "
            f"and d_ff={config.d_ff}: the FFN is cut into num_selected shards, each with as "
            "many copies; use a num_selected of 2 or more that divides both",
        )
        d_ff = config.d_ff // num_selected
    gate = "softmax" if num_selected == 1 else "normalized"
    router = RouterConfig(num_selected=num_selected, gate=gate)
    if config.positions == "rotary":  # as sparse models of this block are: equal from the start
        router = dataclasses.replace(router, overflow="dropless", exploration="none")
    switch = SwitchConfig(
        num_experts, every=every, expert_bias=config.use_bias, d_ff=d_ff, router=router
    )
    if router.overflow == "dropless":
        switch = switch.with_dispatcher("dropless")
    return dataclasses.replace(config, switch=switch, scan_layers=False)


def upcycle(
    sparse: ModelConfig, config: ModelConfig, params: dict, way="copies", share: float = 0.5
) -> Reshaped:
    """The model `sparse`, with experts made of a dense model's FFNs and routers drawn.

    Args:
        sparse: configuration that `upcycled_config` returned.
        config, params: the dense model.
        way: one of `DENSE_WAYS`, as given to `upcycled_config`.
        share: part of each expert's hidden units that `drop` draws anew.
    """
    E, rng = sparse.switch.num_experts, np.random.default_rng(SEED)
    shards = sparse.switch.router.num_selected if way == "virtual_groups" else 1

    def copy(ffn: Layer) -> tuple[Layer, np.ndarray]:
        experts = {}
        for name, whole in ffn.items():
            kind, _, dims = name.rpartition("_")
            whole = (whole * _scale_of_shards(config, kind, shards)).astype(whole.dtype)
            axis = dims.find("F")
            parts = np.split(whole, shards, axis) if axis >= 0 else [whole] * shards
            # Expert g E / k + i is copy i of shard g.
            experts[f"experts/{kind}_E{dims}"] = np.repeat(np.stack(parts), E // shards, axis=0)
        if way == "drop":
            _draw_anew(experts, share, rng)
        return experts, np.zeros(E, int)

    found = reshaped(sparse, config, params, copy)
    routers = _routers(sparse)
    if shards > 1:
        routers = {n: np.tile(w[:, : E // shards], shards) for n, w in routers.items()}
    return found._replace(params=tree.nested(tree.named_leaves(found.params) | routers))


def _scale_of_shards(config: ModelConfig, kind: str, shards: int) -> float:
    """The factor of a matrix or bias of the FFN where gates are 1 / shards.

    `w_out` and the weights that hidden units are linear in have its root each; plain GELU has
    no such weights, so `w_out` has all of it.
    """
    linear = (
        ("w_gate",) if config.is_gated else ("w_in", "b_in") * (config.activation == "relu")
    )
    if kind == "w_out" and not linear:
        return shards
    return math.sqrt(shards) if kind in ("w_out", *linear) else 1.0


def _draw_anew(experts: Layer, share: float, rng: np.random.Generator) -> None:
    """Draws a share of each expert's hidden units anew, all weights of a unit together."""
    E, _, F = experts["experts/w_in_EDF"].shape
    for e in range(E):
        units = rng.choice(F, round(share * F), replace=False)
        for name, array in experts.items():
            axis = name.rpartition("_")[2][1:].find("F")
            if "/w_" in name and units.size:
                replaced = np.moveaxis(array[e], axis, 0)  # a view
                old = replaced[units]
                replaced[units] = rng.normal(old.mean(), old.std(), old.shape)


def _routers(sparse: ModelConfig) -> dict[str, jax.Array]:
    """Freshly drawn routers; the rest of the model is not computed."""

    @jax.jit
    def draw(key):
        leaves = tree.named_leaves(init_params(sparse, key))
        return {name: leaf for name, leaf in leaves.items() if name.endswith("/w_router_DE")}

    return draw(jax.random.key(SEED))


def exact_way(config: ModelConfig) -> str:
    """The way in which a sparse model gets copies and stays the same, at the same FLOPs."""
    return "counts_merged" if config.switch.router.num_selected == 1 else "exclusive"


def multiplied_config(config: ModelConfig, num_experts: int, way: str) -> ModelConfig:
    """The configuration of a sparse model with copies of its experts, layers unrolled.

    Args:
        way: one of `SPARSE_WAYS`.

    Raises:
        ValueError: see `check_num_experts`; `num_experts` is no multiple of the model's, or the
            way does not suit so many choices.
    """
    require_choice("upcycle", way, SPARSE_WAYS)
    router, E = config.switch.router, config.switch.num_experts
    check_num_experts(config, E)
    m, rest = divmod(num_experts, E)
    require(
        m > 1 and not rest,
        f"experts={num_experts} of a model with {E}: each expert gets as many copies; use a "
        f"multiple of {E}, such as {2 * E}",
    )
    require(
        way not in ("counts_merged", "exclusive") or way == exact_way(config),
        f"upcycle={way!r} with RouterConfig.num_selected={router.num_selected}: use "
        f"{exact_way(config)!r}",
    )
    require(
        way == "exclusive" or router.num_copies == 1,
        f"upcycle={way!r} with RouterConfig.num_copies={router.num_copies}: experts of this "
        "model exclude each other, and so must their copies; use 'exclusive'",
    )
    changes: dict[str, dict[str, Any]] = {
        "counts_merged": {"counts_merged": True},
        "exclusive": {"counts_merged": True, "num_copies": m * router.num_copies},
        "more_choices": {
            "num_selected": m * router.num_selected,
            # Probabilities and normalized gates are divided by m, other scores are not.
            "gate_scale": router.gate_scale / (m if router.gate == "score" else 1),
        },
        "copies": {},
    }
    router = dataclasses.replace(router, **changes[way])
    switch = dataclasses.replace(config.switch, num_experts=num_experts, router=router)
    return dataclasses.replace(config, switch=switch, scan_layers=False)


def multiply_experts(config: ModelConfig, params: dict, num_experts: int, way: str) -> Reshaped:
    """The model with `num_experts / E` copies of each of its E experts; see the module.

    Args, Raises: as in `multiplied_config`.
    """
    grown = multiplied_config(config, num_experts, way)
    E = config.switch.num_experts
    router = grown.switch.router
    origin_E, m = np.tile(np.arange(E), num_experts // E), num_experts // E
    rng = np.random.default_rng(SEED)

    def copy(layer: Layer) -> tuple[Layer, np.ndarray]:
        copies = taken(layer, origin_E)
        is_divided = way == "more_choices" and router.score == "softmax"
        if is_divided and "router_bias_E" in copies and router.bias_rule != "quantile_logits":
            # It is added to probabilities, which are divided by m.
            copies["router_bias_E"] = copies["router_bias_E"] / m
        if way in ("counts_merged", "exclusive"):
            column_DE = copies["w_router_DE"]
            noise_DE = 1 + TIES * rng.normal(size=column_DE.shape)
            noise_DE[:, :E] = 1
            copies["w_router_DE"] = (column_DE * noise_DE).astype(column_DE.dtype)
            log_count_E = copies.get("router_log_count_E", np.zeros(num_experts))
            copies["router_log_count_E"] = (log_count_E - math.log(m)).astype(column_DE.dtype)
        return copies, origin_E

    return reshaped(grown, config, params, copy)
