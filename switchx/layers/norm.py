# SPDX-License-Identifier: Apache-2.0
"""Normalization: T5's RMSNorm and GPT's LayerNorm, statistics in float32.

Dims: D model
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers.initializers import along_last

EPSILON = 1e-6


def rms_norm(x, scale_D):
    """x / rms(x) * scale over the last dimension (Zhang & Sennrich 2019; T5: no bias)."""
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)
    return (x32 * inverse_rms).astype(x.dtype) * along_last(scale_D, x)


def layer_norm(x, scale_D, bias_D):
    """(x - mean) / std * scale + bias over the last dimension (Ba et al. 2016)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse_std = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + EPSILON)
    normed = (centred * inverse_std).astype(x.dtype)
    return normed * along_last(scale_D, x) + along_last(bias_D, x)


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm where there is a bias."""

    def __init__(self, d_model: int, kind: str, dtype):
        self.scale_D = nnx.Param(jnp.ones((d_model,), dtype))
        if kind == "layer":
            self.bias_D = nnx.Param(jnp.zeros((d_model,), dtype))

    def __call__(self, x):
        if hasattr(self, "bias_D"):
            return layer_norm(x, self.scale_D[...], self.bias_D[...])
        return rms_norm(x, self.scale_D[...])
