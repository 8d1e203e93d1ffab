# SPDX-License-Identifier: Apache-2.0
"""Positions in attention: T5's relative bias, TUPE's untied correlations, rotations.

Raffel et al. 2020 (arXiv:1910.10683), section 2.1: log-spaced buckets of key minus query
position, one table per stack, shared by its layers. Ke et al. 2020 (arXiv:2006.15595), eq. 7:
with H heads of size K, a score of self-attention is

    ((x_i W_Q) (x_j W_K)^T + (p_i U_Q) (p_j U_K)^T) / sqrt(2 K)

where p is a table of absolute positions and U_Q, U_K are projections of their own, shared by
the layers of a stack, so that the second term is computed once per stack and added as a bias;
with the relative bias beside it, it is TUPE-R. Positions are counted from 0 in each packed
example. The paper's section 3.2, which unties [CLS] from positions, is about a symbol that
sequence-to-sequence models do not have. Frequencies of rotations are in `rotary.py`.

Dims: B batch, L queries, M keys, D model, H heads, K head size (of a rotation, pairs of
features), U relative buckets
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from switchx.layers.dense import normal, weight
from switchx.layers.rotary import RotaryConfig
from switchx.partitioning.constrain import constrain


def relative_buckets(
    num_queries: int,
    num_keys: int,
    *,
    is_bidirectional: bool,
    num_buckets: int,
    max_distance: int,
    first_query: int = 0,
) -> np.ndarray:
    """Bucket of every (query, key) pair, as integers [L, M] in [0, num_buckets).

    Distances below half the (one-sided) buckets get one each; larger ones share buckets
    whose width grows logarithmically up to `max_distance`, where the last begins. A
    bidirectional stack spends half of all buckets on keys that come after the query; a
    causal one maps those to bucket 0.

    Args:
        first_query: position of the first query, for decoding step by step.
    """
    distance_LM = first_query + np.arange(num_queries)[:, None] - np.arange(num_keys)[None, :]
    offset_LM = np.zeros_like(distance_LM)
    if is_bidirectional:
        num_buckets //= 2
        offset_LM = np.where(distance_LM < 0, num_buckets, 0)
        distance_LM = np.abs(distance_LM)
    else:
        distance_LM = np.maximum(distance_LM, 0)
    num_exact = num_buckets // 2
    # float32 as in T5: at exact powers the logarithm's rounding decides the bucket.
    ratio_LM = np.maximum(distance_LM, 1).astype(np.float32) / np.float32(num_exact)
    growth = np.log(ratio_LM) / np.float32(math.log(max_distance / num_exact))
    far_LM = num_exact + (growth * np.float32(num_buckets - num_exact)).astype(np.int64)
    far_LM = np.minimum(far_LM, num_buckets - 1)
    return (offset_LM + np.where(distance_LM < num_exact, distance_LM, far_LM)).astype(np.int32)


class RelativeBias(nnx.Module):
    """One bias per bucket and head, shared by the layers of a stack or separate for each.

    With one for each layer (`relative_bias_per_layer`) the parameter is `[N, U, H]`, and the
    result has the heads of all layers, one layer after the other.
    """

    def __init__(self, config, *, num_layers: int, is_bidirectional: bool, key):
        self.is_bidirectional = is_bidirectional
        self.max_distance = config.relative_max_distance
        buckets, heads = config.relative_buckets, config.num_heads
        # Fan average, as T5's variance scaling of this table.
        shape = (num_layers,) * config.relative_bias_per_layer + (buckets, heads)
        self.bias_UH = weight(config, key, shape, fan_in=(buckets + heads) / 2)

    def __call__(self, num_queries: int, num_keys: int, *, first_query: int = 0):
        """The bias of every head, query and key: `bias_HLM`, float32."""
        bias_UH = self.bias_UH[...].astype(jnp.float32)
        bucket_LM = relative_buckets(
            num_queries,
            num_keys,
            is_bidirectional=self.is_bidirectional,
            num_buckets=bias_UH.shape[-2],
            max_distance=self.max_distance,
            first_query=first_query,
        )
        # A matmul with constant one-hots: its gradient is a matmul too, not a scatter.
        is_bucket_LMU = np.eye(bias_UH.shape[-2], dtype=np.float32)[bucket_LM]
        if bias_UH.ndim == 3:
            bias_NHLM = jnp.einsum("LMU,NUH->NHLM", is_bucket_LMU, bias_UH)
            return bias_NHLM.reshape(-1, *bias_NHLM.shape[2:])
        return jnp.einsum("LMU,UH->HLM", is_bucket_LMU, bias_UH)


# As in fairseq, whose positions begin after the id of padding, which is 1.
_FIRST_SINUSOID = 2


def sinusoids(position_BL, num_features: int):
    """Sines and cosines of positions, `[B, L, D]` in float32, as in fairseq.

    With h = D // 2 frequencies f_i = 10000^(-i / (h - 1)), position p has the features
    sin((p + 2) f_i), then cos((p + 2) f_i), and a 0 where D is odd (Vaswani et al. 2017,
    arXiv:1706.03762, section 3.5, where sines and cosines alternate).
    """
    half = num_features // 2
    rate = np.float32(math.log(10000) / (half - 1))
    frequency = np.exp(np.arange(half, dtype=np.float32) * -rate)
    angle_BLF = (position_BL + _FIRST_SINUSOID).astype(jnp.float32)[..., None]
    angle_BLF = angle_BLF * frequency[None, None]
    parts = [jnp.sin(angle_BLF), jnp.cos(angle_BLF)]
    if num_features % 2:
        parts.append(jnp.zeros((*position_BL.shape, 1), jnp.float32))
    return jnp.concatenate(parts, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles by which tokens' features are rotated, in float32."""

    cos_BLK: jax.Array
    sin_BLK: jax.Array

    @classmethod
    def of(cls, rotary: RotaryConfig, d_head: int, position_BL) -> "Rotation":
        """The rotation of tokens at these positions."""
        angle_BLK = position_BL.astype(jnp.float32)[..., None]
        angle_BLK = angle_BLK * rotary.frequencies(d_head)[None, None]
        return cls(
            jnp.cos(angle_BLK) * np.float32(rotary.magnitude),
            jnp.sin(angle_BLK) * np.float32(rotary.magnitude),
        )

    def __call__(self, x_BLHK):
        """Queries or keys, rotated in float32 and rounded once; the rest of a head as it is."""
        half = self.cos_BLK.shape[-1]
        cos_BLHK, sin_BLHK = self.cos_BLK[:, :, None], self.sin_BLK[:, :, None]
        first, second, rest = jnp.split(x_BLHK.astype(cos_BLHK.dtype), (half, 2 * half), axis=3)
        turned = first * cos_BLHK - second * sin_BLHK, second * cos_BLHK + first * sin_BLHK
        return jnp.concatenate([*turned, rest], axis=3).astype(x_BLHK.dtype)


class UntiedPositions(nnx.Module):
    """The position table of a stack and its two projections."""

    def __init__(self, config, *, key):
        self.config = config
        keys = jax.random.split(key, 3)
        D, H, K = config.d_model, config.num_heads, config.d_head
        # Unit variance, as normed words have; the authors put a LayerNorm after the table.
        self.positions_LD = normal(config, keys[0], (config.max_length, D))
        self.w_query_DHK = weight(config, keys[1], (D, H, K), fan_in=D)
        self.w_key_DHK = weight(config, keys[2], (D, H, K), fan_in=D)

    def projected(self, num_positions: int):
        """`query_LHK`, divided by sqrt(2 K), and `key_LHK` of the first positions, or of all
        if there are fewer."""
        dtype = self.config.precision.compute_dtype
        table_LD = self.positions_LD[...][:num_positions].astype(dtype)
        query_LHK, key_LHK = (
            jnp.einsum("LD,DHK->LHK", table_LD, weight[...].astype(dtype))
            for weight in (self.w_query_DHK, self.w_key_DHK)
        )
        return query_LHK * jnp.asarray((2 * self.config.d_head) ** -0.5, dtype), key_LHK

    def __call__(self, position_BL, position_BM):
        """The bias of positions in the scores: `bias_BHLM`, float32.

        Args:
            position_BL, position_BM: positions of queries and keys, each below the longer of L
                and M. Padding may have any position.
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
