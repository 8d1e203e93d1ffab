# SPDX-License-Identifier: Apache-2.0
"""Dispatch by rows sorted by expert: each device runs the experts that it has on their rows.

`dropless`: Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 4. No slot is empty, and 4
tokens do not take E slots. Nothing is dropped if the plan drops nothing (a capacity of all
tokens); what the plan drops is dropped here too.
`sliced`: Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3, Algorithm 1: experts
inside of the tensor-parallel group. Every device of the group has the same tokens; it selects
those of its experts by index, and one all-reduce sums the devices' results, as after a
tensor-parallel dense FFN. Algorithm 1 as printed never applies the gate, so its router would
learn nothing; ours applies it.
Dims: G groups, T tokens of a group, S choices of a token, E experts, D model, R rows, X
choices in any order, P devices of the group
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.sorted_rows import stable_argsort
from switchx.moe.dispatch import ExpertBank, gated_sum, gather_rows
from switchx.moe.routing_plan import RoutingPlan
from switchx.moe.sharded_dispatch import run_on_devices
from switchx.partitioning.placement import Placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """The assignment of choices to rows.

    Attributes:
        choice_R: the choice in each row; the number of choices in a row that has none.
        row_X: the row of each choice; R for a choice that takes part in nothing. X are
            choices in any order, such as T * S of them.
        count_E: rows of each expert.
    """

    choice_R: jax.Array
    row_X: jax.Array
    count_E: jax.Array


def sliced_dispatch(
    x_GTD,
    plan: RoutingPlan,
    experts: ExpertBank,
    *,
    buffer_factor: float | None = None,
    split_tokens: bool = False,
):
    """Runs each device's experts on their tokens; one all-reduce forward and one backward.

    If all experts are on every device, nothing is sent: this is the dropless dispatcher.

    Args:
        buffer_factor: see `buffered_choices`; None has room for all choices on each device.
        split_tokens: whether T is split over the group outside of this layer. It takes an
            all-gather and a reduce-scatter forward, and the same backward: the bytes of the
            two all-reduces, but the rest of the model holds only a part of the tokens.
    """
    local = functools.partial(_local, buffer_factor=buffer_factor)
    return run_on_devices(local, x_GTD, plan, experts, split_tokens=split_tokens)


def gathered_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank):
    """Runs `sliced` for experts on devices that have different tokens, which are all-gathered.

    It communicates by an all-gather and a reduce-scatter of P times a device's tokens; the
    experts compute the rows that are routed to them and no empty slot.
    """
    return run_on_devices(_gathered, x_GTD, plan, experts)


def _gathered(x_GTD, plan: RoutingPlan, experts: ExpertBank, placement: Placement):
    axes = placement.experts
    x_GTD, plan = jax.tree.map(
        lambda leaf: jax.lax.all_gather(leaf, axes, tiled=True), (x_GTD, plan)
    )
    y_GTD = _local(x_GTD, plan, experts, placement, buffer_factor=None)
    return jax.lax.psum_scatter(y_GTD, axes, tiled=True)


def buffered_choices(num_choices: int, num_parts: int, buffer_factor: float | None) -> int:
    """Choices that a device has room for: `buffer_factor` times its even share, or all."""
    if buffer_factor is None:
        return num_choices
    return min(num_choices, math.ceil(num_choices / num_parts * buffer_factor))


def overflows(plan: RoutingPlan, num_parts: int, buffer_factor: float | None):
    """Whether each of `num_parts` devices has more choices than it has room for, `[P]`.

    Nothing is lost then: that device computes the layer again with room for all.

    Args:
        plan: plan of the groups that one set of `num_parts` devices shares.
    """
    room = buffered_choices(plan.expert_GTS.size, num_parts, buffer_factor)
    size = plan.num_experts // num_parts
    part_GTS = jnp.where(plan.is_kept_GTS, plan.expert_GTS // size, num_parts)
    part_P = jnp.arange(num_parts)
    load_P = jnp.sum(part_GTS.reshape(-1, 1) == part_P[None], axis=0)
    return load_P > room


def _local(x_GTD, plan: RoutingPlan, experts: ExpertBank, placement: Placement, buffer_factor):
    num_parts = placement.size(placement.experts)
    E = plan.num_experts
    expert_GTS = plan.expert_GTS
    is_here_GTS = plan.is_kept_GTS
    here = 0
    if placement.experts:
        E //= num_parts
        here = jax.lax.axis_index(placement.experts)
        expert_GTS = expert_GTS - here * E
        is_here_GTS = is_here_GTS & (expert_GTS >= 0) & (expert_GTS < E)
    expert_X = jnp.where(is_here_GTS, expert_GTS, E).reshape(-1)
    num_choices = expert_X.size
    room = buffered_choices(num_choices, num_parts, buffer_factor)

    def run(room, x_GTD, gate_GTS, experts):
        rows = sort_into_rows(expert_X, E, rows=room)
        return run_choices(x_GTD, gate_GTS, rows, experts)

    if room == num_choices:
        return run(num_choices, x_GTD, plan.gate_GTS, experts)
    # Only the operands are kept for the backward pass, which runs the layer again: otherwise
    # the larger buffer would be kept, which the smaller one is there to avoid.
    small, large = (
        jax.checkpoint(functools.partial(run, rows)) for rows in (room, num_choices)
    )
    is_over = overflows(plan, num_parts, buffer_factor)[here]
    return jax.lax.cond(is_over, large, small, x_GTD, plan.gate_GTS, experts)


def run_choices(x_GTD, gate_GTS, rows: ExpertRows, experts: ExpertBank):
    """Gated sum of the experts' results for the choices that are in `rows`."""
    G, T, S = gate_GTS.shape
    # The plan has seen the groups: from here on, all their tokens are one list.
    token_1R = (rows.choice_R // S)[None]
    row_1TS = rows.row_X.reshape(1, G * T, S)
    x_1TD = x_GTD.reshape(1, G * T, -1)
    x_RD = gather_rows(x_1TD, token_1R, row_1TS)[0]
    # Rows leave their experts gated: the combine weight is part of the last product.
    gate_1X1 = gate_GTS.reshape(1, G * T * S, 1)
    gate_R = gather_rows(gate_1X1, rows.choice_R[None], rows.row_X[None, :, None])[0, :, 0]
    y_RD = experts.run_rows(x_RD, rows.count_E, gate_R)
    y_1TD = gated_sum(y_RD[None], token_1R, row_1TS)
    return y_1TD.reshape(x_GTD.shape)


def sort_into_rows(expert_X, num_experts: int, *, rows: int) -> ExpertRows:
    """Sorts choices by expert, keeping their order within each.

    Args:
        expert_X: int32; `num_experts` for a choice that takes part in nothing.
        rows: R, at most as many as there are choices; choices that do not fit are left out.
    """
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    used_E = jnp.sum(expert_X[:, None] == expert_E[None], axis=0, dtype=jnp.int32)
    end_E = jnp.minimum(jnp.cumsum(used_E, dtype=jnp.int32), rows)
    row_R = jnp.arange(rows, dtype=jnp.int32)
    choice_R = jnp.where(row_R < end_E[-1], stable_argsort(expert_X)[:rows], len(expert_X))
    row_X = (
        jnp.full_like(expert_X, rows).at[choice_R].set(row_R, mode="drop", unique_indices=True)
    )
    return ExpertRows(choice_R, row_X, jnp.diff(end_E, prepend=jnp.zeros_like(end_E[:1])))
