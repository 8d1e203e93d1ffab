# SPDX-License-Identifier: Apache-2.0
"""Which group each of the rows belongs to that lie sorted by group. Dims: R E"""

import jax
import jax.numpy as jnp


def rows_of_groups(group_sizes_E, R: int):
    """The group of each of R sorted rows, and whether it belongs to any.

    Returns:
        (expert_R, is_used_R): int32 and bool; rows past the last group have the last group.
    """
    end_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32)
    row_R = jax.lax.iota(jnp.int32, R)
    expert_R = jnp.searchsorted(end_E, row_R, side="right").astype(jnp.int32)
    return jnp.minimum(expert_R, end_E.shape[0] - 1), row_R < end_E[-1]
