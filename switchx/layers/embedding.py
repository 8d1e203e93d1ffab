# SPDX-License-Identifier: Apache-2.0
"""Token and position embeddings, and the logits, tied to the table or not.

Dims: B L D V
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.layers.split_table import project, take_rows


class Embedding(nnx.Module):
    """The token table, learned positions where the model has them, and the logits."""

    def __init__(self, config, *, key):
        self.config = config
        key_tokens, key_positions, key_logits = jax.random.split(key, 3)
        V, D, dtype = config.vocab_size, config.d_model, config.precision.params
        # T5 draws the table from normal(1.0) and divides tied logits by sqrt(D); GPT draws
        # it small and does not divide.
        stddev = 1.0 if config.scale_tied_logits or not config.tie_embeddings else 0.02
        self.embedding_VD = nnx.Param(jax.random.normal(key_tokens, (V, D), dtype) * stddev)
        if config.positions == "learned":
            shape = (config.max_length, D)
            self.positions_LD = nnx.Param(jax.random.normal(key_positions, shape, dtype) * 0.02)
        if not config.tie_embeddings:
            self.w_logits_DV = initializers.weight(config, key_logits, (D, V), fan_in=D)

    def embed(self, tokens_BL, positions_BL):
        """Rows of the table `[B, L, D]` in the compute dtype, plus learned positions."""
        x_BLD = take_rows(self.embedding_VD[...], tokens_BL)
        if self.config.positions == "learned":
            # Padding may lie beyond the table; by default it would become NaN there.
            x_BLD = x_BLD + jnp.take(self.positions_LD[...], positions_BL, axis=0, mode="clip")
        return x_BLD.astype(self.config.precision.compute_dtype)

    def logits(self, x_BLD):
        """Logits `[B, L, V]` in the precision's logits dtype."""
        dtype = jnp.dtype(self.config.precision.logits)
        x_BLD = x_BLD.astype(dtype)
        if not self.config.tie_embeddings:
            return project(x_BLD, self.w_logits_DV[...].astype(dtype), "DV")
        if self.config.scale_tied_logits:
            x_BLD = x_BLD * jnp.asarray(1 / math.sqrt(self.config.d_model), dtype)
        return project(x_BLD, self.embedding_VD[...].astype(dtype), "VD")
