# SPDX-License-Identifier: Apache-2.0
"""Weights of dense layers: their initial values, products with them, and their biases.

Fedus et al. 2021 (arXiv:2101.03961), section 2.4: a truncated normal of standard deviation
sqrt(scale / fan_in), where a scale of 0.1 instead of T5's 1.0 keeps sparse models stable.
Fan-in is given, not guessed from the shape: an expert's is D, whatever E is.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import QTensor, dequantize
from switchx.layers.adapted_weight import AdaptedWeight
from switchx.layers.dropout import cheap_again, dropout

# Standard deviation of a standard normal truncated to [-2, 2].
_TRUNCATED_STDDEV = 0.87962566103423978


def weight(config, key, shape, *, fan_in: float, scale: float | None = None) -> nnx.Param:
    """A weight of a model, at its `init_scale` unless `scale` is given."""
    scale = config.init_scale if scale is None else scale
    stddev = math.sqrt(scale / fan_in) / _TRUNCATED_STDDEV
    dtype = config.precision.params
    drawn = jax.random.truncated_normal(key, -2.0, 2.0, shape, _at_least_float32(dtype))
    return nnx.Param((drawn * stddev).astype(dtype))


def normal(config, key, shape, stddev: float = 1.0) -> nnx.Param:
    """A table of a model."""
    dtype = config.precision.params
    drawn = jax.random.normal(key, shape, _at_least_float32(dtype))
    return nnx.Param((drawn * stddev).astype(dtype))


def _at_least_float32(dtype):
    """In bfloat16 JAX draws from 128 numbers, whose mean is not 0."""
    return jnp.promote_types(dtype, jnp.float32)


def zeros(config, *shape: int) -> nnx.Param:
    """A bias of a model."""
    return nnx.Param(jnp.zeros(shape, config.precision.params))


def along_last(param, x):
    """`param` in x's dtype with leading 1s, so that it lines up with x's last dimensions."""
    return param.astype(x.dtype).reshape((1,) * (x.ndim - param.ndim) + param.shape)


def plus(x, bias):
    """x + bias along x's last dimensions, added in float32 and rounded once to x's dtype.

    The bias's gradient is thus summed in float32: JAX sums the gradient of a broadcast array in
    its dtype, and a GPU adds thousands of bfloat16 numbers as such.
    """
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (x32 + along_last(bias, x32)).astype(x.dtype)


def split_key(key: jax.Array | None, num: int) -> list:
    """`num` independent keys, or as many None if there is none to split."""
    return [None] * num if key is None else list(jax.random.split(key, num))


@functools.partial(cheap_again, static_argnums=0)
def times(dimensions: str, x, w):
    """The einsum of x and a weight that is rounded to x's dtype, here and for the gradient."""
    if isinstance(w, AdaptedWeight):
        to_rank, to_outputs = w.einsums(dimensions)
        seen = dropout(x, w.dropout_rate, key=w.key, rows=int(dimensions[0] == "E"))
        x_J = jnp.einsum(to_rank, seen, w.a.astype(x.dtype))
        y = jnp.einsum(to_outputs, x_J, w.b.astype(x.dtype))
        # Dequantized whole: compilers split an einsum over a mesh, but no product by rows.
        base = dequantize(w.base) if isinstance(w.base, QTensor) else w.base
        return jnp.einsum(dimensions, x, base.astype(x.dtype)) + w.scale * y
    return jnp.einsum(dimensions, x, w.astype(x.dtype))
