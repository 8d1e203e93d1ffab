# SPDX-License-Identifier: Apache-2.0
"""Normalization: T5's RMSNorm and GPT's LayerNorm, statistics in float32.

Dims: D
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers.broadcast import along_last

EPSILON = 1e-6


@jax.custom_vjp
def rms_norm(x, scale_D):
    """x / rms(x) * scale over the last dimension (Zhang & Sennrich 2019; T5: no bias)."""
    return _rms_norm_forward(x, scale_D)[0]


def _rms_norm_forward(x, scale_D):
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)
    y = (x32 * inverse_rms).astype(x.dtype) * along_last(scale_D, x)
    return y, (x, inverse_rms, scale_D)


def _rms_norm_backward(residuals, dy):
    x, inverse_rms, scale_D = residuals
    normed = x.astype(inverse_rms.dtype) * inverse_rms
    dy = dy.astype(inverse_rms.dtype)
    dnormed = dy * along_last(scale_D, dy)
    mean = jnp.mean(dnormed * normed, axis=-1, keepdims=True)
    dx = inverse_rms * (dnormed - normed * mean)
    # The sum over all positions as a product, which XLA's CPU back end runs faster.
    ones = jnp.ones(x.shape[:-1], dy.dtype)
    dscale_D = jnp.tensordot(ones, dy * normed, axes=x.ndim - 1)
    return dx.astype(x.dtype), dscale_D.astype(scale_D.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


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
