# SPDX-License-Identifier: Apache-2.0
"""Parts of dense layers: initial weights, dropout, norms, and the feed-forward network.

Weights: Fedus et al. 2021 (arXiv:2101.03961), section 2.4: a truncated normal of standard
deviation sqrt(scale / fan_in), where a scale of 0.1 instead of T5's 1.0 keeps sparse models
stable. Fan-in is given, not guessed from the shape: an expert's is D, whatever E is.
Norms: T5's RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and GPT's LayerNorm (Ba et al.
2016, arXiv:1607.06450), with statistics in float32. Gated FFNs: Shazeer 2020
(arXiv:2002.05202).
Dims: B batch, L length, D model, F ffn
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import QTensor, dequantize
from switchx.layers.adapted_weight import AdaptedWeight
from switchx.partitioning.replicas import random_rows

# Standard deviation of a standard normal truncated to [-2, 2].
_TRUNCATED_STDDEV = 0.87962566103423978

EPSILON = 1e-6  # of the norms, where a model names no other


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

    So the bias's gradient is summed in float32: JAX sums the gradient of what is broadcast in
    its dtype, and a GPU adds thousands of bfloat16 numbers as such.
    """
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (x32 + along_last(bias, x32)).astype(x.dtype)


def split_key(key: jax.Array | None, num: int) -> list:
    """`num` independent keys, or as many None where there is none to split."""
    return [None] * num if key is None else list(jax.random.split(key, num))


# Computed again in the backward pass of a loop over layers, which otherwise keeps each
# intermediate array of each layer, masks in the shape of what they mask among them. The barrier
# against that (`prevent_cse`) is not needed in a loop; elsewhere the compiler chooses.
cheap_again = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(cheap_again, static_argnums=0)
def times(dimensions: str, x, w):
    """The einsum of x and a weight that is rounded to x's dtype, here and for the gradient."""
    if isinstance(w, AdaptedWeight):
        to_rank, to_outputs = w.einsums(dimensions)
        seen = dropout(x, w.dropout_rate, key=w.key, rows=int(dimensions[0] == "E"))
        x_J = jnp.einsum(to_rank, seen, w.a.astype(x.dtype))
        y = jnp.einsum(to_outputs, x_J, w.b.astype(x.dtype))
        # Dequantized whole: compilers split an einsum over a mesh, and no product by rows.
        base = dequantize(w.base) if isinstance(w.base, QTensor) else w.base
        return jnp.einsum(dimensions, x, base.astype(x.dtype)) + w.scale * y
    return jnp.einsum(dimensions, x, w.astype(x.dtype))


def dropout(
    x,
    rate: float,
    *,
    key: jax.Array | None,
    shared_dims: tuple[int, ...] = (),
    rows: int = 0,
):
    """Zeroes entries with probability `rate` and scales the others by 1/(1-rate).

    Args:
        x: rows of a batch, or its routing groups; a row's mask depends on its place in the
            batch (`partitioning/replicas.py`).
        key: random key; None leaves x as it is (evaluation).
        shared_dims: dimensions along which one mask is shared; T5 shares it over length.
        rows: the dimension of the rows.
    """
    if key is None or rate == 0.0:
        return x
    mask_shape = [1 if dim in shared_dims else size for dim, size in enumerate(x.shape)]
    mask_shape.insert(0, mask_shape.pop(rows))
    is_kept = random_rows(bernoulli(1.0 - rate), key, mask_shape)
    return kept(x, jnp.moveaxis(is_kept, 0, rows), rate)


def bernoulli(share: float):
    """`draw(key, shape)` of booleans, of which `share` is true."""
    return lambda key, shape: jax.random.bernoulli(key, share, shape)


@functools.partial(cheap_again, static_argnums=2)
def kept(x, is_kept, rate: float):
    """The kept elements, scaled by 1 / (1 - rate), and zeros for the dropped ones."""
    return jnp.where(is_kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))


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


def activate(activation: str, h, gate=None):
    """`act(h)`, times `gate` in the gated forms.

    GELU is the tanh form, as T5's and GPT's; `_exact` names h times the normal distribution's
    function of h (Hendrycks and Gimpel 2016, arXiv:1606.08415).
    """
    if activation == "relu":  # keeps a mask alone
        return jax.nn.relu(h)
    return _smooth(activation, h, gate)


@functools.partial(cheap_again, static_argnums=0)
def _smooth(activation: str, h, gate):
    match activation:
        case "gelu":
            return jax.nn.gelu(h, approximate=True)
        case "geglu":
            return jax.nn.gelu(h, approximate=True) * gate
        case "gelu_exact":
            return jax.nn.gelu(h, approximate=False)
        case "geglu_exact":
            return jax.nn.gelu(h, approximate=False) * gate
        case "swiglu":
            return jax.nn.silu(h) * gate
    raise ValueError(
        f"activation={activation!r}; use relu, gelu, gelu_exact, geglu, geglu_exact or swiglu"
    )


class DenseFFN(nnx.Module):
    """`act(x W_in) W_out`, or `(act(x W_in) * x W_gate) W_out` for a gated activation."""

    def __init__(self, config, *, key):
        self.config = config
        key_in, key_gate, key_out = jax.random.split(key, 3)
        D, F = config.d_model, config.d_ff
        self.w_in_DF = weight(config, key_in, (D, F), fan_in=D)
        if config.is_gated:
            self.w_gate_DF = weight(config, key_gate, (D, F), fan_in=D)
        self.w_out_FD = weight(config, key_out, (F, D), fan_in=F)
        if config.use_bias:
            self.b_in_F = zeros(config, F)
            self.b_out_D = zeros(config, D)

    def __call__(self, x_BLD, *, key=None):
        h_BLF = times("BLD,DF->BLF", x_BLD, self.w_in_DF[...])
        if self.config.use_bias:
            h_BLF = plus(h_BLF, self.b_in_F[...])
        gate_BLF = None
        if self.config.is_gated:
            gate_BLF = times("BLD,DF->BLF", x_BLD, self.w_gate_DF[...])
        h_BLF = activate(self.config.activation, h_BLF, gate_BLF)
        h_BLF = dropout(h_BLF, self.config.dropout_rate, key=key, shared_dims=(1,))
        y_BLD = times("BLF,FD->BLD", h_BLF, self.w_out_FD[...])
        return plus(y_BLD, self.b_out_D[...]) if self.config.use_bias else y_BLD
