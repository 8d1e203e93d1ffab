# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters from fixed NumPy numbers, so that an oracle can use the same."""

import jax
import numpy as np
from flax import nnx


def numbers_like(params: dict, seed: int = 0, scale: float = 1.0) -> dict:
    """Normal numbers in the shapes of parameters, biases and scales included."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (rng.normal(size=leaf.shape) * scale).astype(np.float32), params
    )


def numbers_for(module: nnx.Module, seed: int = 0, scale: float = 1.0) -> dict:
    """The same for a module, which may be abstract."""
    return numbers_like(nnx.to_pure_dict(nnx.state(module)), seed, scale)


def with_params(module: nnx.Module, params: dict) -> nnx.Module:
    """A copy of the module that computes with `params`, also while they are traced."""
    graphdef, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)
