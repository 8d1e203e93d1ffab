# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters from fixed NumPy numbers, so that an oracle can use the same."""

import jax
import numpy as np

from switchx.models.params import params_of, with_params

__all__ = ["numbers_for", "numbers_like", "with_params"]


def numbers_like(params: dict, seed: int = 0, scale: float = 1.0) -> dict:
    """Normal numbers in the shapes of parameters, biases and scales included."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (rng.normal(size=leaf.shape) * scale).astype(np.float32), params
    )


def numbers_for(module, seed: int = 0, scale: float = 1.0) -> dict:
    """The same for a module, which may be abstract."""
    return numbers_like(params_of(module), seed, scale)
