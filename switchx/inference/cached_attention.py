# SPDX-License-Identifier: Apache-2.0
"""Attention of a few new tokens over what is remembered: heads first, so nothing is moved.

Dims: B L M H K
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.layers.attention import MASKED

# Up to so many queries, XLA's CPU product of queries and keys takes 1.4 to 2.3 times as long
# as the one of keys and queries.
FEW_QUERIES = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeysValues:
    """Of one attention: `key_BHMK`, `value_BHMK`."""

    key_BHMK: jax.Array
    value_BHMK: jax.Array

    @classmethod
    def empty(cls, shape_BHMK, dtype) -> "KeysValues":
        return cls(jnp.zeros(shape_BHMK, dtype), jnp.zeros(shape_BHMK, dtype))

    @classmethod
    def of(cls, key_BMHK, value_BMHK) -> "KeysValues":
        """From what `Attention.project_memory` gives."""
        return cls(jnp.swapaxes(key_BMHK, 1, 2), jnp.swapaxes(value_BMHK, 1, 2))

    def written(self, place, key_BLHK, value_BLHK) -> "KeysValues":
        """With L new entries from `place` on."""
        new = KeysValues.of(key_BLHK, value_BLHK)
        return jax.tree.map(
            lambda kept, new: jax.lax.dynamic_update_slice_in_dim(kept, new, place, axis=2),
            self,
            new,
        )

    def first(self, places: int) -> "KeysValues":
        return jax.tree.map(lambda leaf: leaf[:, :, :places], self)


def read(query_BLHK, kept: KeysValues, *, mask_BLM, bias_HLM=None, row_bias_BHLM=None):
    """softmax(q k^T + biases) v, the softmax in float32; `out_BLHK` in the queries' dtype.

    Args:
        bias_HLM, row_bias_BHLM: for all rows, and each row's own; L may be 1.
        mask_BLM: true where a query may look; L or M may be 1 where all are alike.
    """
    operands = query_BLHK, kept, mask_BLM, bias_HLM, row_bias_BHLM
    if query_BLHK.shape[1] > FEW_QUERIES:
        return _read(*operands, _scores)
    return jax.lax.platform_dependent(
        *operands,
        cpu=lambda *operands: _read(*operands, _scores_keys_first),
        default=lambda *operands: _read(*operands, _scores),
    )


def _read(query_BLHK, kept, mask_BLM, bias_HLM, row_bias_BHLM, scores):
    scores_BHLM = scores(query_BLHK, kept.key_BHMK)
    if bias_HLM is not None:
        scores_BHLM = scores_BHLM + bias_HLM[None].astype(scores_BHLM.dtype)
    if row_bias_BHLM is not None:
        scores_BHLM = scores_BHLM + row_bias_BHLM.astype(scores_BHLM.dtype)
    scores_BHLM = jnp.where(mask_BLM[:, None], scores_BHLM, MASKED)
    weights_BHLM = jax.nn.softmax(scores_BHLM, axis=-1).astype(query_BLHK.dtype)
    out_BHLK = jnp.einsum("BHLM,BHMK->BHLK", weights_BHLM, kept.value_BHMK)
    return jnp.swapaxes(jax.lax.optimization_barrier(out_BHLK), 1, 2)


def _scores(query_BLHK, key_BHMK):
    return jnp.einsum(
        "BLHK,BHMK->BHLM", query_BLHK, key_BHMK, preferred_element_type=jnp.float32
    )


def _scores_keys_first(query_BLHK, key_BHMK):
    query_BHLK = jax.lax.optimization_barrier(jnp.swapaxes(query_BLHK, 1, 2))
    scores_BHML = jnp.einsum(
        "BHMK,BHLK->BHML", key_BHMK, query_BHLK, preferred_element_type=jnp.float32
    )
    # The barrier keeps XLA from turning the product around again.
    return jnp.swapaxes(jax.lax.optimization_barrier(scores_BHML), 2, 3)
