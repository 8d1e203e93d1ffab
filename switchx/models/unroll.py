# SPDX-License-Identifier: Apache-2.0
"""Scanned layers as unrolled ones, and back: the same numbers, cut or stacked over N."""

import dataclasses

import jax
import numpy as np

from switchx.models.config import ModelConfig


def unrolled(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """The model with `scan_layers=False`; unchanged if it is already unrolled.

    Layer r * period + i of a stack is the r-th slice of the scanned period's `layer_i`.
    """
    if not config.scan_layers:
        return config, params
    return dataclasses.replace(config, scan_layers=False), unrolled_blocks(params)


def unrolled_blocks(tree: dict) -> dict:
    """A tree of a scanned model's layers, or of what an optimizer keeps for them, unrolled.

    Every dictionary at a key `blocks` belongs to one stack; everything outside them stays.
    """
    return _map_blocks(_unrolled, tree)


def scanned_blocks(tree: dict, period: int, stack=np.stack) -> dict:
    """The inverse of `unrolled_blocks`.

    Args:
        period: blocks of the period that is scanned, `ModelConfig.period`.
        stack: function that makes one array of several; `jnp.stack` for JAX arrays.

    Raises:
        ValueError: the period does not divide the layers of a stack, or layers to be stacked
            are not alike.
    """
    return _map_blocks(lambda blocks: _scanned(blocks, period, stack), tree)


def _map_blocks(function, tree: dict) -> dict:
    return {
        key: function(child)
        if key == "blocks"
        else _map_blocks(function, child)
        if isinstance(child, dict)
        else child
        for key, child in tree.items()
    }


def _unrolled(blocks: dict) -> dict:
    period = len(blocks)
    repeats = jax.tree.leaves(blocks)[0].shape[0]
    return {
        f"layer_{r * period + i}": jax.tree.map(lambda leaf, r=r: leaf[r], blocks[f"layer_{i}"])
        for r in range(repeats)
        for i in range(period)
    }


def _scanned(blocks: dict, period: int, stack) -> dict:
    if len(blocks) % period:
        raise ValueError(
            f"{len(blocks)} layers are not repeats of {period}; leave them unrolled, "
            "or use a multiple of that"
        )
    layers = [blocks[f"layer_{i}"] for i in range(len(blocks))]
    for i, layer in enumerate(layers):
        if jax.tree.map(np.shape, layer) != jax.tree.map(np.shape, layers[i % period]):
            raise ValueError(
                f"layer_{i} is not like layer_{i % period}, so they cannot be stacked; leave "
                "the layers unrolled"
            )
    return {
        f"layer_{i}": jax.tree.map(lambda *leaves: stack(leaves), *layers[i::period])
        for i in range(period)
    }
