# SPDX-License-Identifier: Apache-2.0
"""T5's relative position bias: log-spaced buckets of key minus query position.

Raffel et al. 2020 (arXiv:1910.10683), section 2.1: one table a stack, shared by its
layers, added to the attention scores. Dims: L M H U
"""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx

from switchx.layers import initializers


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
    """One bias a bucket and head, shared by the layers of a stack."""

    def __init__(self, config, *, is_bidirectional: bool, key):
        self.is_bidirectional = is_bidirectional
        self.max_distance = config.relative_max_distance
        buckets, heads = config.relative_buckets, config.num_heads
        # Fan average, as T5's variance scaling of this table.
        self.bias_UH = initializers.weight(
            config, key, (buckets, heads), fan_in=(buckets + heads) / 2
        )

    def __call__(self, num_queries: int, num_keys: int, *, first_query: int = 0):
        """The bias of every head, query and key: `bias_HLM`, float32."""
        bias_UH = self.bias_UH[...].astype(jnp.float32)
        bucket_LM = relative_buckets(
            num_queries,
            num_keys,
            is_bidirectional=self.is_bidirectional,
            num_buckets=bias_UH.shape[0],
            max_distance=self.max_distance,
            first_query=first_query,
        )
        # A matmul with constant one-hots: its gradient is a matmul too, not a scatter.
        is_bucket_LMU = np.eye(bias_UH.shape[0], dtype=np.float32)[bucket_LM]
        return jnp.einsum("LMU,UH->HLM", is_bucket_LMU, bias_UH)
