# SPDX-License-Identifier: Apache-2.0
"""The biases that balance routers, after a step, and the Switch layers of parameters.

Dims: N Switch layers, E experts
"""

import functools
import re

import jax
import jax.numpy as jnp

from switchx import tree
from switchx.moe.config import RouterConfig
from switchx.moe.quantile_balance import bias_of_counts, bias_of_quantiles
from switchx.moe.stats import RoutingStats

# Loss-free balancing (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3,
# arXiv:2412.19437, section 2.1.2). The bias enters the choice of experts and no gate, so it
# adds nothing to the gradient. It is a parameter, so that it is kept, sharded and restored like
# all parameters, but the optimizer's update of it is thrown away. The same holds for the load
# of the previous step, which a balance loss may compare with.


def balanced_bias(router: RouterConfig, bias_NE, stats: RoutingStats):
    """The bias after a step, by `RouterConfig.bias_rule`, from the load of its whole batch."""
    rate = router.bias_update_rate
    if router.has_quantiles:
        if router.bias_rule == "quantile":
            new_NE = bias_of_counts(stats.margin_EW, bias_NE, router.num_selected)
        else:
            new_NE = bias_of_quantiles(stats.margin_E, stats.tokens, bias_NE)
        return bias_NE + rate * (new_NE - bias_NE) if rate < 1 else new_NE
    # Choices that are given do not follow the bias, which would grow without end.
    load_NE = stats.load_E if stats.own_E is None else stats.own_E
    gap_NE = jnp.mean(load_NE, axis=-1, keepdims=True) - load_NE
    if router.bias_rule == "proportional":
        step_NE = gap_NE / jnp.maximum(stats.tokens, 1)[..., None]
    else:
        step_NE = jnp.sign(gap_NE)
    if router.bias_rule == "sign_centered":
        # With a skewed load more experts are below the mean than above: the bias would grow.
        step_NE -= jnp.mean(step_NE, axis=-1, keepdims=True)
    return bias_NE + rate * step_NE.astype(bias_NE.dtype)


def with_balanced_routers(router: RouterConfig, params, updated, stats: RoutingStats):
    """`updated`, with the selection biases moved from where they were in `params`, and loads of
    this step where routers keep them.

    Args:
        params, updated: parameters before and after the optimizer's update.
        stats: routing of the whole batch in all Switch layers, the encoder's first.
    """
    if router.keeps_load:
        updated = _replaced("router_load_E", params, updated, stats, _shares)
    if router.has_bias:
        move = functools.partial(balanced_bias, router)
        updated = _replaced("router_bias_E", params, updated, stats, move)
    return updated


def _shares(load_NE, stats: RoutingStats):
    """The shares of the step's choices; the old ones for a layer that had none."""
    total_N1 = jnp.sum(stats.counted_E, axis=-1, keepdims=True)
    return jnp.where(total_N1 > 0, stats.counted_E / jnp.maximum(total_N1, 1), load_NE)


def _replaced(parameter: str, params, updated, stats: RoutingStats, move):
    """`updated` with `move(old, statistics of its layers)` in place of a parameter."""
    rows = layers_of(params, parameter)

    def one(name, old, new):
        if name not in rows:
            return new
        index = jnp.asarray(rows[name])
        own = jax.tree.map(lambda sums: sums[index], stats.summed)
        return move(old.reshape(len(index), -1), own).reshape(old.shape)

    return tree.map_named(one, params, updated)


def layers_of(params, parameter: str) -> dict[str, list[int]]:
    """Which Switch layers, in the order of the routing statistics, a parameter belongs to.

    A stack is unrolled, or a scan over its periods: then the parameter is stacked, and the
    period's other layers come between its rows.

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
