# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward sub-layer: ReLU, GELU, GEGLU or SwiGLU.

Shazeer 2020 (arXiv:2002.05202) for the gated forms.

Dims: B batch, L length, D model, F ffn
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.layers.dropout import dropout
from switchx.layers.initializers import along_last


def activate(activation: str, h, gate=None):
    """`act(h)`, times `gate` in the gated forms. GELU is the tanh form, as T5's and GPT's."""
    match activation:
        case "relu":
            return jax.nn.relu(h)
        case "gelu":
            return jax.nn.gelu(h, approximate=True)
        case "geglu":
            return jax.nn.gelu(h, approximate=True) * gate
        case "swiglu":
            return jax.nn.silu(h) * gate
    raise ValueError(f"activation={activation!r}; use relu, gelu, geglu or swiglu")


class DenseFFN(nnx.Module):
    """`act(x W_in) W_out`, or `(act(x W_in) * x W_gate) W_out` for a gated activation."""

    def __init__(self, config, *, key):
        self.config = config
        key_in, key_gate, key_out = jax.random.split(key, 3)
        D, F = config.d_model, config.d_ff

        def matrix(key, shape):
            return initializers.weight(config, key, shape, fan_in=shape[0])

        self.w_in_DF = matrix(key_in, (D, F))
        if config.is_gated:
            self.w_gate_DF = matrix(key_gate, (D, F))
        self.w_out_FD = matrix(key_out, (F, D))
        if config.use_bias:
            self.b_in_F = nnx.Param(jnp.zeros((F,), config.precision.params))
            self.b_out_D = nnx.Param(jnp.zeros((D,), config.precision.params))

    def __call__(self, x_BLD, *, key=None):
        dtype = x_BLD.dtype
        h_BLF = jnp.einsum("BLD,DF->BLF", x_BLD, self.w_in_DF[...].astype(dtype))
        if self.config.use_bias:
            h_BLF = h_BLF + along_last(self.b_in_F[...], h_BLF)
        gate_BLF = None
        if self.config.is_gated:
            gate_BLF = jnp.einsum("BLD,DF->BLF", x_BLD, self.w_gate_DF[...].astype(dtype))
        h_BLF = activate(self.config.activation, h_BLF, gate_BLF)
        h_BLF = dropout(h_BLF, self.config.dropout_rate, key=key, shared_dims=(1,))
        y_BLD = jnp.einsum("BLF,FD->BLD", h_BLF, self.w_out_FD[...].astype(dtype))
        return y_BLD + along_last(self.b_out_D[...], y_BLD) if self.config.use_bias else y_BLD
