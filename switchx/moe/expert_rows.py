# SPDX-License-Identifier: Apache-2.0
"""Choices as rows sorted by expert: nothing is padded, and no slot is empty.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 4. Dims: T S R E
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.sorted_rows import stable_argsort

# Up to so many choices, comparing all with all takes less time than a sort and a scatter,
# which are loops on a CPU.
FEW_CHOICES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Which choice is in which row.

    Attributes:
        choice_R: the choice in each row; the number of choices in a row that has none.
        row_X: the row of each choice; R for a choice that takes part in nothing. X are
            choices in any order, such as T * S of them.
        count_E: rows of each expert.
    """

    choice_R: jax.Array
    row_X: jax.Array
    count_E: jax.Array


def sort_into_rows(expert_X, num_experts: int, *, rows: int) -> ExpertRows:
    """Sorts choices by expert, in their order within one.

    Args:
        expert_X: int32; `num_experts` for a choice that takes part in nothing.
        rows: R, at most as many as there are choices; those that it has no room for are
            left out.
    """
    X = expert_X.shape[0]
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    used_E = jnp.sum(expert_X[:, None] == expert_E[None], axis=0, dtype=jnp.int32)
    end_E = jnp.minimum(jnp.cumsum(used_E, dtype=jnp.int32), rows)
    order = _compared if X <= FEW_CHOICES else _sorted
    choice_R, row_X = order(expert_X, end_E[-1], rows)
    return ExpertRows(choice_R, row_X, jnp.diff(end_E, prepend=jnp.zeros_like(end_E[:1])))


def _sorted(expert_X, num_used, rows: int):
    row_R = jnp.arange(rows, dtype=jnp.int32)
    choice_R = jnp.where(row_R < num_used, stable_argsort(expert_X)[:rows], len(expert_X))
    row_X = (
        jnp.full_like(expert_X, rows).at[choice_R].set(row_R, mode="drop", unique_indices=True)
    )
    return choice_R, row_X


def _compared(expert_X, num_used, rows: int):
    X = len(expert_X)
    choice_X, row_R = (jnp.arange(size, dtype=jnp.int32) for size in (X, rows))
    # A key for each choice, so that no two are equal.
    key_X = expert_X * X + choice_X
    row_X = jnp.sum(key_X[None] < key_X[:, None], axis=1, dtype=jnp.int32)
    row_X = jnp.where(row_X < num_used, row_X, rows)
    is_there_RX = row_X[None] == row_R[:, None]
    return jnp.min(jnp.where(is_there_RX, choice_X[None], X), axis=1), row_X
