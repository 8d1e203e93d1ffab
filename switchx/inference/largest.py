# SPDX-License-Identifier: Apache-2.0
"""The largest of many numbers, and where they are, as fast as memory is read.

XLA's CPU reductions and sorts over a row's last dimension take one number after the other;
over columns of blocks they take a vector at a time. Dims: B V; C blocks; X numbers of a block
"""

import jax
import jax.numpy as jnp

BLOCK = 128


def argmax(x_BV):
    """`jnp.argmax` of each row, int32; of a row with NaNs, any place."""
    B, V = x_BV.shape
    if V % BLOCK:
        return jnp.argmax(x_BV, axis=-1).astype(jnp.int32)
    x_BCX = x_BV.reshape(B, V // BLOCK, BLOCK)
    largest_B = jnp.max(jnp.max(x_BCX, axis=1), axis=1)
    place_BCX = jax.lax.broadcasted_iota(jnp.int32, (B, V), 1).reshape(x_BCX.shape)
    is_largest_BCX = x_BCX == largest_B[:, None, None]
    return jnp.min(jnp.min(jnp.where(is_largest_BCX, place_BCX, V - 1), axis=1), axis=1)


def top_k(x_BV, k: int):
    """`jax.lax.top_k`: values and int32 places, equal ones in the order of places.

    The k largest are in the k blocks of the largest maxima, so the others are not sorted.
    """
    B, V = x_BV.shape
    num_blocks = V // BLOCK
    if V % BLOCK or num_blocks <= 2 * k:
        return jax.lax.top_k(x_BV, k)
    x_BCX = x_BV.reshape(B, num_blocks, BLOCK)
    block_BC = jnp.sort(jax.lax.top_k(jnp.max(x_BCX, axis=2), k)[1], axis=1)
    candidate_BCX = jnp.take_along_axis(x_BCX, block_BC[:, :, None], axis=1)
    value_BJ, index_BJ = jax.lax.top_k(candidate_BCX.reshape(B, k * BLOCK), k)
    block_BJ = jnp.take_along_axis(block_BC, index_BJ // BLOCK, axis=1)
    return value_BJ, block_BJ * BLOCK + index_BJ % BLOCK
