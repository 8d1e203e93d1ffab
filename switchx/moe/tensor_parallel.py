# SPDX-License-Identifier: Apache-2.0
"""Tensor-sliced dispatch: experts inside of the tensor-parallel group, no all-to-all.

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3, Algorithm 1. Every device of
the group has the same tokens; it selects those of its experts by index, and one all-reduce
adds up what the devices found, as after a tensor-parallel dense FFN. Algorithm 1 as printed
never applies the gate, and its router would learn nothing: ours does.
Dims: G groups, T tokens of a group, S choices of a token, E experts, D model, R rows, X choices
in any order, P devices of the group
"""

import functools
import math

import jax
import jax.numpy as jnp

from switchx.moe.dispatch import ExpertBank
from switchx.moe.dropless import run_choices, sort_into_rows
from switchx.moe.plan import RoutingPlan
from switchx.moe.sharded_dispatch import run_on_devices
from switchx.partitioning.placement import Placement


def sliced_dispatch(
    x_GTD, plan: RoutingPlan, experts: ExpertBank, *, buffer_factor: float | None = None
):
    """Each device's experts on their tokens; one all-reduce forward and one backward.

    Args:
        buffer_factor: see `buffered_choices`; None has room for all choices on each device.
    """
    local = functools.partial(_local, buffer_factor=buffer_factor)
    return run_on_devices(local, x_GTD, plan, experts)


def sliced_scatter_dispatch(
    x_GTD, plan: RoutingPlan, experts: ExpertBank, *, buffer_factor: float | None = None
):
    """The same for activations whose T is split over the group outside of this layer.

    An all-gather and a reduce-scatter forward, and the same backward: the bytes of the two
    all-reduces, but the rest of the model holds a part of the tokens.
    """
    local = functools.partial(_local, buffer_factor=buffer_factor)
    return run_on_devices(local, x_GTD, plan, experts, split_tokens=True)


def buffered_choices(num_choices: int, num_parts: int, buffer_factor: float | None) -> int:
    """Choices that a device has room for: `buffer_factor` times its even share, or all."""
    if buffer_factor is None:
        return num_choices
    return min(num_choices, math.ceil(num_choices / num_parts * buffer_factor))


def overflows(plan: RoutingPlan, num_parts: int, buffer_factor: float | None):
    """Whether each of `num_parts` devices has more choices than it has room for, `[P]`.

    Nothing is lost where it has: that device computes the layer again with room for all.

    Args:
        plan: of the groups that one such set of devices shares.
    """
    room = buffered_choices(plan.expert_GTS.size, num_parts, buffer_factor)
    size = plan.num_experts // num_parts
    part_GTS = jnp.where(plan.is_kept_GTS, plan.expert_GTS // size, num_parts)
    part_P = jnp.arange(num_parts)
    load_P = jnp.sum(part_GTS.reshape(-1, 1) == part_P[None], axis=0)
    return load_P > room


def _local(
    x_GTD,
    plan: RoutingPlan,
    experts: ExpertBank,
    placement: Placement,
    *,
    buffer_factor: float | None,
):
    num_parts = placement.size(placement.experts)
    here = jax.lax.axis_index(placement.experts) if placement.experts else 0
    E = plan.num_experts // num_parts
    expert_GTS = plan.expert_GTS - here * E
    is_here_GTS = plan.is_kept_GTS & (expert_GTS >= 0) & (expert_GTS < E)
    expert_X = jnp.where(is_here_GTS, expert_GTS, E).reshape(-1)
    num_choices = expert_X.size
    room = buffered_choices(num_choices, num_parts, buffer_factor)

    def run(room, x_GTD, gate_GTS, experts):
        rows = sort_into_rows(expert_X, E, rows=room)
        return run_choices(x_GTD, gate_GTS, rows, experts)

    if room == num_choices:
        return run(num_choices, x_GTD, plan.gate_GTS, experts)
    return _run_with_room(
        run, (room, num_choices), overflows(plan, num_parts, buffer_factor)[here],
        x_GTD, plan.gate_GTS, experts,
    )  # fmt: skip


def _run_with_room(run, rooms, is_overflow, *operands):
    """`run(rooms[0], ...)`, or `run(rooms[1], ...)` where that is too little.

    Only the operands are kept for the backward pass, which runs the layer again: else the
    buffer of the larger room would be kept, and saving it is what the smaller one is for.
    """
    small, large = (jax.checkpoint(functools.partial(run, room)) for room in rooms)
    return jax.lax.cond(is_overflow, large, small, *operands)
