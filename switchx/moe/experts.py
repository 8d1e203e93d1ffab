# SPDX-License-Identifier: Apache-2.0
"""The experts: E feed-forward networks, each on its own R rows.

Dims: E R D F
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.layers.dropout import dropout
from switchx.layers.ffn import activate
from switchx.moe.expert_matmul import expert_matmul


class Experts(nnx.Module):
    """E dense FFNs applied to E blocks of rows: `y_ERD = experts(x_ERD)`."""

    def __init__(self, config, *, key):
        self.config = config
        key_in, key_gate, key_out = jax.random.split(key, 3)
        E, D, F = config.switch.num_experts, config.d_model, config.switch.d_ff or config.d_ff

        def matrices(key, shape):
            return initializers.weight(config, key, shape, fan_in=shape[1])

        self.w_in_EDF = matrices(key_in, (E, D, F))
        if config.is_gated:
            self.w_gate_EDF = matrices(key_gate, (E, D, F))
        self.w_out_EFD = matrices(key_out, (E, F, D))
        if config.switch.expert_bias:
            self.b_in_EF = nnx.Param(jnp.zeros((E, F), config.precision.params))
            self.b_out_ED = nnx.Param(jnp.zeros((E, D), config.precision.params))

    @property
    def dropout_rate(self) -> float:
        rate = self.config.switch.expert_dropout_rate
        return self.config.dropout_rate if rate is None else rate

    def __call__(self, x_ERD, *, key=None):
        dtype = x_ERD.dtype
        h_ERF = expert_matmul(x_ERD, self.w_in_EDF.get_value())
        if self.config.switch.expert_bias:
            h_ERF = h_ERF + self.b_in_EF[...].astype(dtype)[:, None]
        gate_ERF = None
        if self.config.is_gated:
            gate_ERF = expert_matmul(x_ERD, self.w_gate_EDF.get_value())
        h_ERF = activate(self.config.activation, h_ERF, gate_ERF)
        h_ERF = dropout(h_ERF, self.dropout_rate, key=key)
        y_ERD = expert_matmul(h_ERF, self.w_out_EFD.get_value())
        if self.config.switch.expert_bias:
            y_ERD = y_ERD + self.b_out_ED[...].astype(dtype)[:, None]
        return y_ERD
