# SPDX-License-Identifier: Apache-2.0
"""Loss-free balancing: biases of busy experts go down, those of idle ones up.

Wang et al. 2024 (arXiv:2408.15664), algorithm 1; DeepSeek-V3 (arXiv:2412.19437), section
2.1.2. The bias enters the choice of experts and no gate, so it adds nothing to the gradient;
it is a parameter, so that it is kept, sharded and restored as all parameters are, but the
optimizer's update of it is thrown away.

Dims: N Switch layers, E experts
"""

import re

import jax.numpy as jnp

from switchx import tree
from switchx.models.config import ModelConfig

NAME = "router_bias_E"


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
    if config.switch is None or not config.switch.router.has_bias:
        return updated
    rate, rows = config.switch.router.bias_update_rate, rows_of_biases(params)

    def balance(name, old, new):
        if name not in rows:
            return new
        load_E = load_NE[jnp.asarray(rows[name])].reshape(old.shape)
        return balanced_bias(old, load_E, rate)

    return tree.map_named(balance, params, updated)


def rows_of_biases(params) -> dict[str, list[int]]:
    """Which rows of the routing statistics belong to each bias, by its path.

    A stack is unrolled or a scan over repeats of a run of blocks: then the bias is stacked,
    and the run's other layers stand between its rows.
    """
    biases = {name: leaf for name, leaf in tree.named_leaves(params).items() if NAME in name}
    rows, start = {}, 0
    for stack in ("encoder", "decoder"):
        names = sorted(
            (name for name in biases if name.startswith(f"{stack}/")), key=_place_in_block
        )
        repeats = {1 if biases[name].ndim == 1 else biases[name].shape[0] for name in names}
        for i, name in enumerate(names):
            rows[name] = [start + n * len(names) + i for n in range(*repeats)]
        start += len(names) * max(repeats, default=0)
    return rows


def _place_in_block(name: str) -> tuple[int, bool]:
    """The block's number, and whether this is the FFN, which follows the attention."""
    return int(re.search(r"/layer_(\d+)/", name)[1]), "/ffn/" in name
