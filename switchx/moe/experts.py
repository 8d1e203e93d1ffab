# SPDX-License-Identifier: Apache-2.0
"""The experts: E feed-forward networks, each on its own R rows.

Dims: E R D F
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.moe.expert_ffn import ExpertFFN


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

    def weights(self, *, key=None) -> ExpertFFN:
        """The experts as a pytree that dispatchers run and `jax.shard_map` splits."""
        has_bias = self.config.switch.expert_bias
        return ExpertFFN(
            self.w_in_EDF.get_value(),
            self.w_out_EFD.get_value(),
            self.w_gate_EDF.get_value() if self.config.is_gated else None,
            self.b_in_EF.get_value() if has_bias else None,
            self.b_out_ED.get_value() if has_bias else None,
            key=key if self.dropout_rate else None,
            activation=self.config.activation,
            dropout_rate=self.dropout_rate,
        )

    def __call__(self, x_ERD, *, key=None):
        return self.weights(key=key)(x_ERD)
