# SPDX-License-Identifier: Apache-2.0
"""TUPE: correlations of positions, untied from those of words.

Ke et al. 2020 (arXiv:2006.15595), eq. 7: with H heads of size K, a score of self-attention is

    ((x_i W_Q) (x_j W_K)^T + (p_i U_Q) (p_j U_K)^T) / sqrt(2 K)

where p is a table of absolute positions and U_Q, U_K are projections of their own, shared by
the layers of a stack, so that the second term is computed once a stack and added as a bias;
with the relative bias of `RelativeBias` beside it, it is TUPE-R. Positions are counted from 0
in each packed example. The paper's section 3.2, which unties [CLS] from positions, is about a
symbol that sequence-to-sequence models do not have. Dims: B L M D H K
"""

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.partitioning.constrain import constrain


class UntiedPositions(nnx.Module):
    """The position table of a stack and its two projections."""

    def __init__(self, config, *, key):
        self.config = config
        keys = jax.random.split(key, 3)
        D, H, K = config.d_model, config.num_heads, config.d_head
        # Of unit variance, as normed words are; the authors put a LayerNorm behind the table.
        table_LD = jax.random.normal(keys[0], (config.max_length, D), config.precision.params)
        self.positions_LD = nnx.Param(table_LD)
        self.w_query_DHK = initializers.weight(config, keys[1], (D, H, K), fan_in=D)
        self.w_key_DHK = initializers.weight(config, keys[2], (D, H, K), fan_in=D)

    def projected(self, num_positions: int):
        """`query_LHK`, divided by sqrt(2 K), and `key_LHK` of the first positions, or of all
        where there are fewer."""
        dtype = self.config.precision.compute_dtype
        table_LD = self.positions_LD[...][:num_positions].astype(dtype)
        query_LHK, key_LHK = (
            jnp.einsum("LD,DHK->LHK", table_LD, weight[...].astype(dtype))
            for weight in (self.w_query_DHK, self.w_key_DHK)
        )
        return query_LHK * jnp.asarray((2 * self.config.d_head) ** -0.5, dtype), key_LHK

    def __call__(self, position_BL, position_BM):
        """What positions add to the scores: `bias_BHLM`, float32.

        Args:
            position_BL, position_BM: of queries and keys, each below the longer of L and M.
                Padding may have any.
        """
        num_positions = max(position_BL.shape[1], position_BM.shape[1])
        query_LHK, key_MHK = self.projected(num_positions)
        bias_BHLM = jnp.einsum(
            "BLHK,BMHK->BHLM",
            jnp.take(query_LHK, position_BL, axis=0, mode="clip"),
            jnp.take(key_MHK, position_BM, axis=0, mode="clip"),
            preferred_element_type=jnp.float32,
        )
        return constrain(bias_BHLM, "BHLM")
