# SPDX-License-Identifier: Apache-2.0
"""Parameters of a scanned model as those of the same model with unrolled layers."""

import dataclasses

import jax

from switchx.models.config import ModelConfig


def unrolled(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """The same model with `scan_layers=False`; as it is, where it is unrolled already.

    Layer r * period + i of a stack is the r-th slice of the scanned run's `layer_i`.
    """
    if not config.scan_layers:
        return config, params
    params = dict(params)
    for stack in ("encoder", "decoder"):
        if stack in params:
            params[stack] = params[stack] | {"blocks": _unrolled(params[stack]["blocks"])}
    return dataclasses.replace(config, scan_layers=False), params


def _unrolled(blocks: dict) -> dict:
    period = len(blocks)
    repeats = jax.tree.leaves(blocks)[0].shape[0]
    return {
        f"layer_{r * period + i}": jax.tree.map(lambda leaf, r=r: leaf[r], blocks[f"layer_{i}"])
        for r in range(repeats)
        for i in range(period)
    }
