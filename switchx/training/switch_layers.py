# SPDX-License-Identifier: Apache-2.0
"""The Switch layer that each parameter belongs to, and balancing by a bias of the router.

Dims: N Switch layers, E experts
"""

import re

import jax.numpy as jnp

from switchx import tree
from switchx.models.config import ModelConfig

# Loss-free balancing (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3,
# arXiv:2412.19437, section 2.1.2). The bias enters the choice of experts and no gate, so it
# adds nothing to the gradient. It is a parameter, so that it is kept, sharded and restored as
# all parameters are, but the optimizer's update of it is thrown away.


def balanced_bias(bias_E, load_E, rate: float):
    """`bias + rate * sign(mean(load) - load)`, the load being that of one batch, per layer."""
    gap_E = jnp.mean(load_E, axis=-1, keepdims=True) - load_E
    return bias_E + rate * jnp.sign(gap_E).astype(bias_E.dtype)


def with_balanced_biases(config: ModelConfig, params, updated, load_NE):
    """`updated`, with every router's bias moved from where it was in `params`.

    Args:
        params, updated: parameters before and after the optimizer's update.
        load_NE: choices of each expert in the whole batch, for all Switch layers in the order
            of the routing statistics: the encoder's first.
    """
    rate = config.switch.router.bias_update_rate
    rows = layers_of(params, "router_bias_E")

    def balance(name, old, new):
        if name not in rows:
            return new
        load_E = load_NE[jnp.asarray(rows[name])].reshape(old.shape)
        return balanced_bias(old, load_E, rate)

    return tree.map_named(balance, params, updated)


def layers_of(params, parameter: str) -> dict[str, list[int]]:
    """Which Switch layers, in the order of the routing statistics, a parameter belongs to.

    A stack is unrolled or a scan over repeats of a run of blocks: then the parameter is
    stacked, and the run's other layers stand between its rows.

    Args:
        parameter: the end of its path; one that every Switch layer has once.

    Returns:
        The numbers of the layers by the parameter's path.
    """

    def place(name: str) -> tuple[int, bool]:  # of the block; its FFN follows the attention
        return int(re.search(r"/layer_(\d+)/", name)[1]), "/ffn/" in name

    leaves = tree.named_leaves(params)
    found = {name: leaf for name, leaf in leaves.items() if name.endswith(f"/{parameter}")}
    letters = len(parameter.rpartition("_")[2])
    rows, start = {}, 0
    for stack in ("encoder", "decoder"):
        names = sorted((name for name in found if name.startswith(f"{stack}/")), key=place)
        repeats = {found[name].shape[0] if found[name].ndim > letters else 1 for name in names}
        for i, name in enumerate(names):
            rows[name] = [start + n * len(names) + i for n in range(*repeats)]
        start += len(names) * max(repeats, default=0)
    return rows
