# SPDX-License-Identifier: Apache-2.0
"""Upcycling: a dense model as a sparse one, whose experts are copies of its FFNs.

Komatsuzaki et al. 2022 (arXiv:2212.05055), section 2: the FFNs of some blocks become Switch
layers; every expert is a copy of the block's FFN, the router is new, all else stays. Copies
compute the same, so a layer's output is the FFN's times the sum of a token's gates:

    k >= 2, gates divided by their sum   the dense FFN's output: the same model
    k = 1, gate = softmax probability    the dense FFN's output times that probability, near
                                         1 / E of a new router: a model to be trained on

Both hold of tokens that are not dropped; padding and dropped ones pass by on the residual
connection alone.
Dims: E experts, D model, F ffn
"""

import dataclasses

import jax
import numpy as np

from switchx import tree
from switchx.fields import require
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig, require_our_blocks
from switchx.models.params import init_params
from switchx.models.unroll import unrolled

# Seed of the routers that are drawn.
SEED = 0


def upcycled_config(
    config: ModelConfig, num_experts: int, *, num_selected: int = 2, every: int = 2
) -> ModelConfig:
    """The configuration of a dense model with experts, layers unrolled.

    Args:
        num_selected: experts that a token chooses; above 1 gates are divided by their sum.
        every: the last block of each run of so many gets experts.

    Raises:
        ValueError: the model is sparse, blocks do not divide by `every`, or there are too few
            experts.
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
    router = RouterConfig(
        num_selected=num_selected, gate="softmax" if num_selected == 1 else "normalized"
    )
    switch = SwitchConfig(num_experts, every=every, expert_bias=config.use_bias, router=router)
    return dataclasses.replace(config, switch=switch, scan_layers=False)


def upcycle(sparse: ModelConfig, config: ModelConfig, params: dict) -> dict:
    """The parameters of `sparse`, experts copied from a dense model, routers drawn.

    Args:
        sparse: configuration that `upcycled_config` returned.
        config, params: the dense model.
    """
    leaves = tree.named_leaves(unrolled(config, params)[1])
    for name in sparse.sparse_layer_names:
        stack, number = name.split()
        path = f"{stack}/blocks/layer_{number}/ffn/"
        for leaf in [leaf for leaf in leaves if leaf.startswith(path)]:
            kind, _, dims = leaf.removeprefix(path).rpartition("_")
            one = np.asarray(leaves.pop(leaf))
            copies = np.repeat(one[None], sparse.switch.num_experts, axis=0)
            leaves[f"{path}experts/{kind}_E{dims}"] = copies
    return tree.nested(leaves | _routers(sparse))


def _routers(sparse: ModelConfig) -> dict[str, jax.Array]:
    """Freshly drawn routers; what else the model has is not computed."""

    @jax.jit
    def draw(key):
        leaves = tree.named_leaves(init_params(sparse, key))
        return {name: leaf for name, leaf in leaves.items() if name.endswith("/w_router_DE")}

    return draw(jax.random.key(SEED))
