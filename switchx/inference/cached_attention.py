# SPDX-License-Identifier: Apache-2.0
"""Attention of a few new tokens over what is remembered: heads first, so nothing is moved.

Dims: B L M H K
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.layers.attention import MASKED

# Up to so many queries are products of one query each on CPU: XLA's batched product of a few
# rows takes 2.5 to 5 times as long there, and 7 with heads inside of places.
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
    if query_BLHK.shape[1] > FEW_QUERIES:
        return _read(query_BLHK, kept, mask_BLM, bias_HLM, row_bias_BHLM, _scores, _weighted)
    return jax.lax.platform_dependent(
        query_BLHK,
        kept,
        mask_BLM,
        bias_HLM,
        row_bias_BHLM,
        cpu=lambda *operands: _read(*operands, _scores_one_by_one, _weighted_one_by_one),
        default=lambda *operands: _read(*operands, _scores, _weighted),
    )


def _read(query_BLHK, kept, mask_BLM, bias_HLM, row_bias_BHLM, scores, weighted):
    scores_BHLM = scores(query_BLHK, kept.key_BHMK)
    if bias_HLM is not None:
        scores_BHLM = scores_BHLM + bias_HLM[None].astype(scores_BHLM.dtype)
    if row_bias_BHLM is not None:
        scores_BHLM = scores_BHLM + row_bias_BHLM.astype(scores_BHLM.dtype)
    scores_BHLM = jnp.where(mask_BLM[:, None], scores_BHLM, MASKED)
    weights_BHLM = jax.nn.softmax(scores_BHLM, axis=-1).astype(query_BLHK.dtype)
    return weighted(weights_BHLM, kept.value_BHMK)


def _scores(query_BLHK, key_BHMK):
    return jnp.einsum(
        "BLHK,BHMK->BHLM", query_BLHK, key_BHMK, preferred_element_type=jnp.float32
    )


def _weighted(weights_BHLM, value_BHMK):
    return jnp.einsum("BHLM,BHMK->BLHK", weights_BHLM, value_BHMK)


def _scores_one_by_one(query_BLHK, key_BHMK):
    scores = [
        jnp.einsum(
            "BHK,BHMK->BHM", query_BLHK[:, i], key_BHMK, preferred_element_type=jnp.float32
        )
        for i in range(query_BLHK.shape[1])
    ]
    return jnp.stack(scores, axis=2)


def _weighted_one_by_one(weights_BHLM, value_BHMK):
    outs = [
        jnp.einsum("BHM,BHMK->BHK", weights_BHLM[:, :, i], value_BHMK)
        for i in range(weights_BHLM.shape[2])
    ]
    return jnp.stack(outs, axis=1)
