# SPDX-License-Identifier: Apache-2.0
"""Attention masks from segment ids: packed examples never see each other or padding.

Dims: B L M
"""

import jax.numpy as jnp


def segment_mask(query_segment_BL, key_segment_BM):
    """True where query and key belong to one packed example; segment 0 is padding."""
    is_same_BLM = query_segment_BL[:, :, None] == key_segment_BM[:, None, :]
    return is_same_BLM & (key_segment_BM[:, None, :] > 0)


def causal_mask(segment_BL, prefix_mask_BL=None):
    """The segment mask, where a position sees itself and what comes before it.

    Args:
        prefix_mask_BL: non-zero in each example's prefix, all of which every position of
            the example sees (prefix LM); None for a purely causal model.
    """
    length = segment_BL.shape[1]
    is_visible_BLM = jnp.tril(jnp.ones((1, length, length), bool))
    if prefix_mask_BL is not None:
        is_visible_BLM = is_visible_BLM | (prefix_mask_BL[:, None, :] > 0)
    return segment_mask(segment_BL, segment_BL) & is_visible_BLM
