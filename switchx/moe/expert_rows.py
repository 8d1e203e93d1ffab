# SPDX-License-Identifier: Apache-2.0
"""Choices as rows sorted by expert: nothing is padded to a capacity, only to small blocks.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 4. Dims: T S R E
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.moe.stable_sort import stable_argsort

# Up to so many choices hardly two meet at one expert.
FEW_CHOICES = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """Which choice is in which row.

    Attributes:
        choice_R: the choice in each row; the number of choices in a row that has none.
        row_X: the row of each choice; R for a choice that takes part in nothing. X are
            choices in any order, such as T * S of them.
        count_E: rows of each expert, the empty ones of its last block included.
        block: every expert's rows start at a multiple of it.
    """

    choice_R: jax.Array
    row_X: jax.Array
    count_E: jax.Array
    block: int = dataclasses.field(metadata={"static": True})


def block_size(num_choices: int, num_experts: int) -> int:
    """Rows multiplied at once: 1 for a few choices, else 2 to 64.

    About half of an expert's even share: smaller blocks read its matrices more often, larger
    ones compute more empty rows. Measured on two cores at D=256, F=1024; within a tenth of
    the best of 16 to 128 at 8 and 32 experts and 2048 tokens.
    """
    if num_choices <= FEW_CHOICES:
        return 1
    block = 2
    while block < 64 and block * 4 <= num_choices / num_experts:
        block *= 2
    return block


def num_rows(num_choices: int, num_experts: int, block: int) -> int:
    """Rows that are enough for any load: each expert leaves less than a block empty."""
    most_partial = min(num_choices, num_experts)
    full = (num_choices - most_partial) // block
    return (full + most_partial) * block


def sort_into_rows(expert_X, num_experts: int, *, block: int, rows: int) -> ExpertRows:
    """Sorts choices by expert, in their order within one.

    Args:
        expert_X: int32; `num_experts` for a choice that takes part in nothing.
        rows: R, a multiple of `block`. Choices past the last row are left out: see
            `num_rows` for how many are enough.
    """
    X = expert_X.shape[0]
    order_X = stable_argsort(expert_X)
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    used_E = jnp.sum(expert_X[:, None] == expert_E[None], axis=0, dtype=jnp.int32)
    count_E = -(-used_E // block) * block
    first_E, start_E = _before(used_E), _before(count_E)
    # Past the last row of the last expert, `expert_R` is E.
    row_R = jnp.arange(rows, dtype=jnp.int32)
    expert_R = jnp.sum(row_R[:, None] >= (start_E + count_E)[None], axis=1)
    safe_R = jnp.minimum(expert_R, num_experts - 1)
    rank_R = row_R - start_E[safe_R]
    is_used_R = (expert_R < num_experts) & (rank_R < used_E[safe_R])
    sorted_R = jnp.where(is_used_R, first_E[safe_R] + rank_R, X)
    choice_R = order_X.at[sorted_R].get(mode="fill", fill_value=X)
    row_X = (
        jnp.full_like(expert_X, rows).at[choice_R].set(row_R, mode="drop", unique_indices=True)
    )
    return ExpertRows(choice_R, row_X, count_E, block)


def _before(count_E):
    """Sum of the counts before each one."""
    return jnp.cumsum(count_E) - count_E
