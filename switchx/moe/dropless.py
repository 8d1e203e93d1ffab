# SPDX-License-Identifier: Apache-2.0
"""Dropless dispatch: choices as rows sorted by expert, and a grouped matrix product over them.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 4. No slot is empty, and 4 tokens do
not cost E of them. Nothing is dropped where the plan drops nothing (a capacity of all tokens);
what the plan drops is dropped here too.
Dims: G groups, T tokens of a group, S choices of a token, E experts, D model, R rows, X
choices in any order
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.sorted_rows import stable_argsort
from switchx.moe.dispatch import ExpertBank, gated_sum, gather_rows
from switchx.moe.plan import RoutingPlan
from switchx.moe.sharded_dispatch import run_on_devices
from switchx.partitioning.placement import Placement

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


def dropless_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank):
    """Sorts choices by expert, runs the experts on the rows, gathers back and gates."""
    return run_on_devices(_local, x_GTD, plan, experts)


def _local(x_GTD, plan: RoutingPlan, experts: ExpertBank, placement: Placement):
    del placement  # every device has all experts
    E = plan.num_experts
    expert_X = jnp.where(plan.is_kept_GTS, plan.expert_GTS, E).reshape(-1)
    rows = sort_into_rows(expert_X, E, rows=expert_X.size)
    return run_choices(x_GTD, plan.gate_GTS, rows, experts)


def run_choices(x_GTD, gate_GTS, rows: ExpertRows, experts: ExpertBank):
    """Gated sum of the experts' results for the choices that are in `rows`."""
    G, T, S = gate_GTS.shape
    # Groups have had their say in the plan: their tokens are one list here.
    token_1R = (rows.choice_R // S)[None]
    row_1TS = rows.row_X.reshape(1, G * T, S)
    x_1TD = x_GTD.reshape(1, G * T, -1)
    x_RD = gather_rows(x_1TD, token_1R, row_1TS)[0]
    y_RD = experts.run_rows(x_RD, rows.count_E)
    y_1TD = gated_sum(y_RD[None], token_1R, row_1TS, gate_GTS.reshape(1, G * T, S))
    return y_1TD.reshape(x_GTD.shape)


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
