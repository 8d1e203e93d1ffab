# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward network and its activations, gated ones by Shazeer 2020
(arXiv:2002.05202).

Dims: B batch, L length, D model, F ffn
"""

import functools

import jax
from flax import nnx

from switchx.layers.dense import plus, times, weight, zeros
from switchx.layers.dropout import cheap_again, dropout


def activate(activation: str, h, gate=None):
    """`act(h)`, times `gate` in the gated forms.

    GELU is the tanh form, as in T5 and GPT; `_exact` means h times the normal distribution
    function of h (Hendrycks and Gimpel 2016, arXiv:1606.08415).
    """
    if activation == "relu":  # keeps only a mask
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
