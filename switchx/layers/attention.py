# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention: a pure function of arrays, and the module that owns its weights.

Vaswani et al. 2017 (arXiv:1706.03762); T5's form has no 1/sqrt(K) (it is in the query's
initializer) and adds a relative position bias. Dims: B L M D H K
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from switchx.layers import initializers
from switchx.layers.dropout import dropout
from switchx.layers.initializers import along_last

MASKED = -1e9


def attend(
    query_BLHK,
    key_BMHK,
    value_BMHK,
    *,
    bias_HLM=None,
    row_bias_BHLM=None,
    mask_BLM=None,
    drop=None,
):
    """softmax(q k^T + biases) v, the softmax in float32.

    Args:
        bias_HLM: added to the scores of every row of the batch.
        row_bias_BHLM: added to the scores, each row's own.
        mask_BLM: true where a query may look at a key. A query that may look at nothing
            (padding) gets an average that no loss and no other token reads.
        drop: applied to the attention weights, as dropout is; None for nothing.

    Returns:
        `out_BLHK` in the queries' dtype.
    """
    if drop is None:
        return _attend(query_BLHK, key_BMHK, value_BMHK, bias_HLM, row_bias_BHLM, mask_BLM)
    weights_BHLM = drop(
        _attention_weights(query_BLHK, key_BMHK, bias_HLM, row_bias_BHLM, mask_BLM)
    )
    return jnp.einsum("BHLM,BMHK->BLHK", weights_BHLM, value_BMHK)


def _attention_weights(query_BLHK, key_BMHK, bias_HLM, row_bias_BHLM, mask_BLM):
    scores_BHLM = jnp.einsum(
        "BLHK,BMHK->BHLM", query_BLHK, key_BMHK, preferred_element_type=jnp.float32
    )
    if bias_HLM is not None:
        scores_BHLM = scores_BHLM + bias_HLM[None].astype(scores_BHLM.dtype)
    if row_bias_BHLM is not None:
        scores_BHLM = scores_BHLM + row_bias_BHLM.astype(scores_BHLM.dtype)
    if mask_BLM is not None:
        scores_BHLM = jnp.where(mask_BLM[:, None], scores_BHLM, MASKED)
    return jax.nn.softmax(scores_BHLM, axis=-1).astype(query_BLHK.dtype)


@jax.custom_vjp
def _attend(query_BLHK, key_BMHK, value_BMHK, bias_HLM, row_bias_BHLM, mask_BLM):
    operands = query_BLHK, key_BMHK, value_BMHK, bias_HLM, row_bias_BHLM, mask_BLM
    return _attend_forward(*operands)[0]


def _attend_forward(query_BLHK, key_BMHK, value_BMHK, bias_HLM, row_bias_BHLM, mask_BLM):
    weights_BHLM = _attention_weights(query_BLHK, key_BMHK, bias_HLM, row_bias_BHLM, mask_BLM)
    out_BLHK = jnp.einsum("BHLM,BMHK->BLHK", weights_BHLM, value_BMHK)
    # Of a bias for each row only the dtype is needed, and arrays alone may be kept.
    row_bias_0 = None if row_bias_BHLM is None else jnp.zeros((0,), row_bias_BHLM.dtype)
    return out_BLHK, (query_BLHK, key_BMHK, value_BMHK, bias_HLM, row_bias_0, weights_BHLM)


def _attend_backward(residuals, dout_BLHK):
    query_BLHK, key_BMHK, value_BMHK, bias_HLM, row_bias_0, weights_BHLM = residuals
    dtype = weights_BHLM.dtype
    dvalue_BMHK = jnp.einsum("BHLM,BLHK->BMHK", weights_BHLM, dout_BLHK)
    weights_BHLM = weights_BHLM.astype(jnp.promote_types(dtype, jnp.float32))
    dweights_BHLM = jnp.einsum(
        "BLHK,BMHK->BHLM", dout_BLHK, value_BMHK, preferred_element_type=weights_BHLM.dtype
    )
    mean_BHL1 = jnp.sum(dweights_BHLM * weights_BHLM, axis=-1, keepdims=True)
    dscores_BHLM = weights_BHLM * (dweights_BHLM - mean_BHL1)
    dbias_HLM = None
    if bias_HLM is not None:
        # The sum over the batch as a product: XLA's reduction over a leading dimension takes
        # 8 ms a layer on two cores at B = 16, L = 128.
        ones_B = jnp.ones(dscores_BHLM.shape[0], dscores_BHLM.dtype)
        dbias_HLM = jnp.einsum("B,BHLM->HLM", ones_B, dscores_BHLM).astype(bias_HLM.dtype)
    drow_bias_BHLM = None if row_bias_0 is None else dscores_BHLM.astype(row_bias_0.dtype)
    dscores_BHLM = dscores_BHLM.astype(dtype)
    dquery_BLHK = jnp.einsum("BHLM,BMHK->BLHK", dscores_BHLM, key_BMHK)
    dkey_BMHK = jnp.einsum("BHLM,BLHK->BMHK", dscores_BHLM, query_BLHK)
    return dquery_BLHK, dkey_BMHK, dvalue_BMHK, dbias_HLM, drow_bias_BHLM, None


_attend.defvjp(_attend_forward, _attend_backward)


class Attention(nnx.Module):
    """Self-attention, or cross-attention where a memory is given.

    Attributes:
        score_scale: of the queries, where the model scales them.
    """

    def __init__(self, config, *, num_correlations: int = 1, key):
        """Draws the weights.

        Args:
            num_correlations: that are added up in a score, each of unit variance.
        """
        self.config = config
        self.score_scale = (num_correlations * config.d_head) ** -0.5
        keys = jax.random.split(key, 4)
        D, H, K = config.d_model, config.num_heads, config.d_head
        # Without 1/sqrt(K) in the scores, the queries start that much smaller.
        query_scale = config.init_scale / (1 if config.scale_attention else K)

        self.w_query_DHK = initializers.weight(
            config, keys[0], (D, H, K), fan_in=D, scale=query_scale
        )
        self.w_key_DHK = initializers.weight(config, keys[1], (D, H, K), fan_in=D)
        self.w_value_DHK = initializers.weight(config, keys[2], (D, H, K), fan_in=D)
        self.w_out_HKD = initializers.weight(config, keys[3], (H, K, D), fan_in=H * K)
        if config.use_bias:
            for name in ("query", "key", "value"):
                bias_HK = jnp.zeros((H, K), config.precision.params)
                setattr(self, f"b_{name}_HK", nnx.Param(bias_HK))
            self.b_out_D = nnx.Param(jnp.zeros((D,), config.precision.params))

    def _project(self, name: str, x):
        y = jnp.einsum("BLD,DHK->BLHK", x, getattr(self, f"w_{name}_DHK")[...].astype(x.dtype))
        if self.config.use_bias:
            y = y + along_last(getattr(self, f"b_{name}_HK")[...], y)
        return y

    def project_query(self, x_BLD):
        """Queries `[B, L, H, K]`, scaled where the model does that."""
        query_BLHK = self._project("query", x_BLD)
        if self.config.scale_attention:
            query_BLHK = query_BLHK * jnp.asarray(self.score_scale, query_BLHK.dtype)
        return query_BLHK

    def project_memory(self, x_BMD):
        """Keys and values `[B, M, H, K]`."""
        return self._project("key", x_BMD), self._project("value", x_BMD)

    def project_out(self, out_BLHK):
        """Heads joined and mapped back to `[B, L, D]`."""
        y_BLD = jnp.einsum(
            "BLHK,HKD->BLD", out_BLHK, self.w_out_HKD[...].astype(out_BLHK.dtype)
        )
        return y_BLD + along_last(self.b_out_D[...], y_BLD) if self.config.use_bias else y_BLD

    def __call__(
        self,
        x_BLD,
        memory_BMD=None,
        *,
        bias_HLM=None,
        row_bias_BHLM=None,
        mask_BLM=None,
        key=None,
    ):
        """Output `[B, L, D]`; the arguments are those of `attend`."""
        drop, rate = None, self.config.dropout_rate
        if key is not None and rate > 0:
            drop = functools.partial(dropout, rate=rate, key=key)
        key_BMHK, value_BMHK = self.project_memory(x_BLD if memory_BMD is None else memory_BMD)
        out_BLHK = attend(
            self.project_query(x_BLD),
            key_BMHK,
            value_BMHK,
            bias_HLM=bias_HLM,
            row_bias_BHLM=row_bias_BHLM,
            mask_BLM=mask_BLM,
            drop=drop,
        )
        return self.project_out(out_BLHK)
