# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by group: the one sort of the project, and which group each row belongs to.

`jnp.argsort` and `lax.sort_key_val` inside `jax.shard_map` type the indices they return as
the same on every device (JAX 0.7 to 0.11): the forward pass is right, gradients that flow
through a gather by them are not, and nothing is raised. `lax.sort` of keys and indices
together types both as the keys are.
Dims: R rows, E experts, G all groups where E of them are here
"""

import functools

import jax
import jax.numpy as jnp


def in_32_bits(function):
    """The function without JAX_ENABLE_X64, under which literals and indices have 64 bits; the
    arrays of our operations have 32 or fewer."""

    @functools.wraps(function)
    def traced(*arguments, **options):
        with jax.enable_x64(False):
            return function(*arguments, **options)

    return traced


def stable_argsort(key):
    """int32 indices that sort `key` along its last dimension, ascending and stable."""
    index = jax.lax.broadcasted_iota(jnp.int32, key.shape, key.ndim - 1)
    return jax.lax.sort((key, index), dimension=-1, is_stable=True, num_keys=1)[1]


def group_bounds(group_sizes_E, R: int):
    """First row of each group, and the one past its last, of R rows sorted by group.

    Sizes may sum to more than R if they are traced: the last groups are cut at row R, and no
    row past it is read or written.

    Returns:
        (begin_E, end_E): int32.
    """
    end_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    return jnp.minimum(end_E - group_sizes_E, R), jnp.minimum(end_E, R)


def int32_sizes(group_sizes_E, R: int):
    """Sizes of groups in any integer dtype, as int32; sizes above R stay above R.

    A traced uint32 above 2^31 would be negative as int32.
    """
    if group_sizes_E.dtype == jnp.int32:
        return group_sizes_E
    if group_sizes_E.dtype.itemsize >= 4 and isinstance(group_sizes_E, jax.core.Tracer):
        group_sizes_E = jnp.minimum(group_sizes_E, R + 1)
    return jnp.asarray(group_sizes_E, jnp.int32)


def local_groups(group_sizes_G, group_offset, E: int, R: int):
    """The sizes of E of G groups, from number `group_offset` on, and their first row.

    Groups past the last one are empty. Sizes are cut at row R, so that they fit after the
    first row.

    Returns:
        (group_sizes_E, first_row): int32.
    """
    begin_G, end_G = group_bounds(group_sizes_G, R)
    index_E = group_offset + jnp.arange(E, dtype=jnp.int32)
    is_there_E = index_E < begin_G.shape[0]
    begin_E, end_E = (
        jnp.where(is_there_E, jnp.take(each, index_E, mode="clip"), end_G[-1])
        for each in (begin_G, end_G)
    )
    return end_E - begin_E, begin_E[0]


def rows_of_groups(group_sizes_E, R: int):
    """The group of each of R sorted rows, and whether it belongs to any.

    Returns:
        (expert_R, is_used_R): int32 and bool; rows past the last group have the last group.
    """
    return rows_before(group_bounds(group_sizes_E, R)[1], R)


def rows_before(end_E, R: int):
    """`rows_of_groups` of the groups that end before these rows."""
    row_R = jax.lax.iota(jnp.int32, R)
    if not end_E.shape[0]:
        return jnp.zeros(R, jnp.int32), jnp.zeros(R, bool)
    # Comparing with all is one fused kernel; a binary search is a loop of them.
    expert_R = jnp.sum(row_R[:, None] >= end_E[None], axis=1, dtype=jnp.int32)
    return jnp.minimum(expert_R, end_E.shape[0] - 1), row_R < end_E[-1]
