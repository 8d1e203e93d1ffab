# SPDX-License-Identifier: Apache-2.0
"""Arrays as they lie in a TPU's memory, where each row and column of tiles is whole.

Blocks that stand over an array's edge reach into that padding, and read whatever is there.
Interpret mode gives an array no padding and stops at its edge (its `buffer_bounds="padded"`
fails under `jax.jit` on JAX 0.10 and 0.11), so there the kernels pad, with NaN.
"""

import jax.numpy as jnp

TILE = (16, 128)


def padded_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Of an array cut into blocks: the sizes of the last two axes that its tiles make.

    An axis that is one block is never reached over.
    """
    sizes = (
        size if part == size else -(-size // tile) * tile
        for size, part, tile in zip(shape[-2:], block, TILE, strict=True)
    )
    return (*shape[:-2], *sizes)


def padded_to_tiles(array, block: tuple[int, ...]):
    """The array in memory; `block` of its last two axes. Integers get their least value."""
    shape = padded_shape(array.shape, block)
    padding = [(0, padded - size) for padded, size in zip(shape, array.shape, strict=True)]
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    value = jnp.nan if is_float else jnp.iinfo(array.dtype).min
    return jnp.pad(array, padding, constant_values=value)
