# SPDX-License-Identifier: Apache-2.0
"""Tokens of a batch in groups that are routed apart, and back.

Fedus et al. 2021 (arXiv:2101.03961), section 2.2: capacity and slots are those of one group.
Dims: B L D G T
"""

import jax.numpy as jnp


def into_groups(x, num_groups: int, group_size: int):
    """`[B, L, ...]` -> `[G, T, ...]`, in order, zero-padded at the end of the last group."""
    x = x.reshape(-1, *x.shape[2:])
    padding = num_groups * group_size - x.shape[0]
    x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(num_groups, group_size, *x.shape[1:])


def out_of_groups(x, batch: int, length: int):
    """`[G, T, ...]` -> `[B, L, ...]`, without the padding."""
    return x.reshape(-1, *x.shape[2:])[: batch * length].reshape(batch, length, *x.shape[2:])
