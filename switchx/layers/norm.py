# SPDX-License-Identifier: Apache-2.0
"""Norms over D, with statistics in float32.

T5's RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and GPT's LayerNorm (Ba et al. 2016,
arXiv:1607.06450).
Dims: D model
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers.dense import along_last, zeros
from switchx.layers.dropout import cheap_again

EPSILON = 1e-6  # unless a model names another


def rms_norm(x, scale_D, epsilon: float = EPSILON):
    """x / rms(x) * scale over the last dimensions, those of the scale, rounded once (see
    `plus`)."""
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims = tuple(range(-scale_D.ndim, 0))
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=dims, keepdims=True) + epsilon)
    return (x32 * inverse_rms * along_last(scale_D, x32)).astype(x.dtype)


def layer_norm(x, scale_D, bias_D, epsilon: float = EPSILON):
    """(x - mean) / std * scale + bias over the last dimension, rounded once (see `plus`)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    inverse_std = jax.lax.rsqrt(variance + epsilon)
    normed = centred * inverse_std * along_last(scale_D, x32)
    return (normed + along_last(bias_D, x32)).astype(x.dtype)


class Norm(nnx.Module):
    """The norm that a `ModelConfig` names: RMSNorm, or LayerNorm, which has a bias."""

    def __init__(self, config):
        D, dtype = config.d_model, config.precision.params
        self.epsilon = config.norm_epsilon
        self.scale_D = nnx.Param(jnp.ones((D,), dtype))
        if config.norm == "layer":
            self.bias_D = zeros(config, D)

    def __call__(self, x):
        norm, params = rms_norm, [self.scale_D[...]]
        if hasattr(self, "bias_D"):
            norm, params = layer_norm, [self.scale_D[...], self.bias_D[...]]
        return cheap_again(lambda x, *params: norm(x, *params, self.epsilon))(x, *params)
