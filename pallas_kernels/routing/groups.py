# SPDX-License-Identifier: Apache-2.0
"""Which group each of the rows belongs to that lie sorted by group. Dims: R E"""

import jax
import jax.numpy as jnp


def group_bounds(group_sizes_E, R: int):
    """First row of each group, and the one past its last, of R rows sorted by group.

    Sizes may sum to more than R where they are traced: the last groups are cut at row R, and
    no row past it is read or written.

    Returns:
        (begin_E, end_E): int32.
    """
    end_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    return jnp.minimum(end_E - group_sizes_E, R), jnp.minimum(end_E, R)


def rows_of_groups(group_sizes_E, R: int):
    """The group of each of R sorted rows, and whether it belongs to any.

    Returns:
        (expert_R, is_used_R): int32 and bool; rows past the last group have the last group.
    """
    _, end_E = group_bounds(group_sizes_E, R)
    row_R = jax.lax.iota(jnp.int32, R)
    expert_R = jnp.searchsorted(end_E, row_R, side="right").astype(jnp.int32)
    return jnp.minimum(expert_R, end_E.shape[0] - 1), row_R < end_E[-1]
