# SPDX-License-Identifier: Apache-2.0
"""Dropout with explicit keys; a key of None means that nothing is random."""

import jax
import jax.numpy as jnp


def split_key(key: jax.Array | None, num: int) -> list:
    """`num` independent keys, or as many None where there is none to split."""
    return [None] * num if key is None else list(jax.random.split(key, num))


def dropout(x, rate: float, *, key: jax.Array | None, shared_dims: tuple[int, ...] = ()):
    """Zeroes entries with probability `rate` and scales the others by 1/(1-rate).

    Args:
        x: any array.
        key: None leaves x as it is (evaluation).
        shared_dims: dimensions along which one mask is shared; T5 shares it over length.
    """
    if key is None or rate == 0.0:
        return x
    mask_shape = list(x.shape)
    for dim in shared_dims:
        mask_shape[dim] = 1
    is_kept = jax.random.bernoulli(key, 1.0 - rate, mask_shape)
    return jnp.where(is_kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
