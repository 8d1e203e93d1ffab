# SPDX-License-Identifier: Apache-2.0
"""Learning rates by parameter: multipliers by pattern; 0 freezes a parameter.

ST-MoE (Zoph et al. 2022, arXiv:2202.08906, section 4) fine-tunes only some parameters, such as
all but the experts: `((r".*/experts/.*", 0.0),)`. Rules are ordered pairs of a regular
expression, which has to match a parameter's whole path, and a number; the first that matches
decides, and a parameter that none matches has 1. Paths name layers as in an unrolled model,
even if layers are stacked, so that a run means the same when `scan_layers` changes. A frozen
parameter keeps its bits: no decay, no rounding. It has no state; its gradient is in no norm.
"""

import re
from collections.abc import Mapping

import jax.numpy as jnp
import optax

from switchx import tree
from switchx.axes import dims_of
from switchx.fields import require

Rules = tuple[tuple[str, float], ...]


def multipliers(rules: Rules, leaves: Mapping, period: int | None) -> dict[str, float]:
    """The multiplier of every parameter.

    Args:
        leaves: parameters, or arrays of their shapes, by path.
        period: blocks of the period that is scanned (`ModelConfig.scanned_period`); None for an
            unrolled model.

    Raises:
        ValueError: a pattern decides for no parameter, nothing is left to train, or layers of
            one stack would have different multipliers.
    """
    found = {}
    unused = [pattern for pattern, _ in rules]
    for name, leaf in leaves.items():
        factors = {}
        for layer in _layer_paths(name, leaf, period):
            matched = next(
                (rule for rule in rules if re.fullmatch(rule[0], layer)), (None, 1.0)
            )
            factors[layer] = matched[1]
            if matched[0] in unused:
                unused.remove(matched[0])
        found[name] = next(iter(factors.values()))
        listed = ", ".join(f"{layer} has {factor:g}" for layer, factor in factors.items())
        require(
            len({*factors.values()}) == 1,
            f"StepConfig.rate_multipliers: {listed}, and these are scanned as one array; give "
            "them one factor, or use ModelConfig.scan_layers=False",
        )
    require(
        not unused,
        f"StepConfig.rate_multipliers: {', '.join(map(repr, unused))} decides for no "
        "parameter: each has to match a whole path, and no earlier one may match all that it "
        f"does; the paths are {', '.join(found)}",
    )
    require(
        any(found.values()),
        "StepConfig.rate_multipliers freezes all parameters; leave some to train",
    )
    return found


def _layer_paths(name: str, leaf, period: int | None) -> list[str]:
    """The paths that the layers of a stack have when unrolled; the name itself if unstacked.

    Layer r * period + i is the r-th slice of the scanned period's `layer_i`.
    """
    place = re.fullmatch(r"(.*/blocks/layer_)(\d+)(/.*)", name)
    if period is None or not place or dims_of(name.rpartition("/")[2], leaf.ndim)[:1] != "N":
        return [name]
    head, i, tail = place.groups()
    return [f"{head}{r * period + int(i)}{tail}" for r in range(leaf.shape[0])]


def without_frozen(rules: Rules, params: dict, period: int | None) -> dict:
    """The part of a tree of parameters, or of their gradients, that is trained."""
    if not rules:
        return params
    leaves = tree.named_leaves(params)
    factors = multipliers(rules, leaves, period)
    return tree.nested({name: leaf for name, leaf in leaves.items() if factors[name]})


def keep_frozen(rules: Rules, params: dict, updated: dict, period: int | None) -> dict:
    """`updated`, with the frozen parameters as they were in `params`, bit for bit."""
    if not rules:
        return updated
    factors = multipliers(rules, tree.named_leaves(params), period)
    return tree.map_named(lambda name, old, new: new if factors[name] else old, params, updated)


def with_multipliers(
    transformation: optax.GradientTransformationExtraArgs, rules: Rules, period: int | None
) -> optax.GradientTransformationExtraArgs:
    """The transformation with every update times its parameter's multiplier.

    The update includes weight decay, whether or not the learning rate is a factor of it. The
    state has nothing for frozen parameters; their updates are zeros, which `keep_frozen` leaves
    out.

    Raises:
        ValueError: at `init`, see `multipliers`.
    """
    if not rules:
        return transformation

    def init(params):
        return transformation.init(without_frozen(rules, params, period))

    def update(gradients, state, params=None, **arguments):
        require(params is not None, "update got params=None; pass the parameters")
        factors = multipliers(rules, tree.named_leaves(params), period)
        trained = (without_frozen(rules, each, period) for each in (gradients, params))
        trained_gradients, trained_params = trained
        updates, state = transformation.update(
            trained_gradients, state, trained_params, **arguments
        )
        leaves = tree.named_leaves(updates)

        def scaled(name, param):
            if name not in leaves:
                return jnp.zeros(param.shape, jnp.float32)
            return leaves[name] if factors[name] == 1 else factors[name] * leaves[name]

        return tree.map_named(scaled, params), state

    return optax.GradientTransformationExtraArgs(init, update)
