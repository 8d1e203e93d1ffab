# SPDX-License-Identifier: Apache-2.0
"""Dropout in which a row's mask is the same on every mesh."""

import functools

import jax
import jax.numpy as jnp

from switchx.partitioning.replicas import random_rows

# Recomputed in the backward pass of a loop over layers, which otherwise keeps each intermediate
# array of each layer, including masks in the shape of what they mask. The barrier against that
# (`prevent_cse`) is not needed in a loop; elsewhere the compiler chooses.
cheap_again = functools.partial(jax.checkpoint, prevent_cse=False)


def dropout(
    x,
    rate: float,
    *,
    key: jax.Array | None,
    shared_dims: tuple[int, ...] = (),
    rows: int = 0,
):
    """Zeroes entries with probability `rate` and scales the others by 1/(1-rate).

    Args:
        x: rows of a batch, or its routing groups; a row's mask depends on its place in the
            batch (`partitioning/replicas.py`).
        key: random key; None leaves x as it is (evaluation).
        shared_dims: dimensions along which one mask is shared; T5 shares it over length.
        rows: the dimension of the rows.
    """
    if key is None or rate == 0.0:
        return x
    mask_shape = [1 if dim in shared_dims else size for dim, size in enumerate(x.shape)]
    mask_shape.insert(0, mask_shape.pop(rows))
    is_kept = random_rows(bernoulli(1.0 - rate), key, mask_shape)
    return kept(x, jnp.moveaxis(is_kept, 0, rows), rate)


def bernoulli(share: float):
    """A function `draw(key, shape)` of booleans, of which `share` are true."""
    return lambda key, shape: jax.random.bernoulli(key, share, shape)


@functools.partial(cheap_again, static_argnums=2)
def kept(x, is_kept, rate: float):
    """The kept elements, scaled by 1 / (1 - rate), and zeros for the dropped ones."""
    return jnp.where(is_kept, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
