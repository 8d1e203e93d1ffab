# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch: tokens travel to their experts' devices and back, in three ways.

`all_to_all_dispatch` sends all slots in one all-to-all (Lepikhin et al. 2020, GShard,
arXiv:2006.16668; Fedus et al. 2021, arXiv:2101.03961, section 5.4). `hierarchical_dispatch`
sends them in one all-to-all within nodes and one between them (Shen et al. 2022, SE-MoE,
arXiv:2205.10034, section 4.2, Figure 8): the same numbers bit for bit. `ragged_dispatch` sends
rows and no empty slots; CPU emulates its collective, the rest is the accelerators' code.
Dims: G groups, T tokens of a group, S choices of a token, E experts, C slots of an expert, D
model, R rows, X choices in any order, P devices of the exchange,
Q slots of all experts of a group
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.sorted_rows import rows_of_groups
from switchx.moe.dispatch import (
    ExpertBank,
    gated_sum,
    gather_from_slots,
    gather_into_slots,
    gather_rows,
    token_of_slot,
)
from switchx.moe.dropless import sort_into_rows
from switchx.moe.routing_plan import RoutingPlan
from switchx.moe.sharded_dispatch import run_exchanged, run_on_devices
from switchx.moe.shared_groups import run_shared, shared_axes
from switchx.partitioning.collectives import (
    all_to_all,
    hierarchical_all_to_all,
    ragged_all_to_all,
)
from switchx.partitioning.placement import Placement


def all_to_all_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank, exchange_parts: int = 1):
    """Sends all slots over the experts' axes in one all-to-all, and back in another.

    If there are fewer groups than devices, those that share one gather its slots first.

    Args:
        exchange_parts: see `SwitchConfig`; each part has all-to-alls of its own.
    """
    if shared := shared_axes("all_to_all", plan.expert_GTS.shape[0]):
        local = functools.partial(run_shared, shared=shared, exchange_parts=exchange_parts)
    else:
        local = functools.partial(
            _run_exchanged, collective=all_to_all, exchange_parts=exchange_parts
        )
    return run_on_devices(local, x_GTD, plan, experts, shared=shared)


def hierarchical_dispatch(
    x_GTD, plan: RoutingPlan, experts: ExpertBank, exchange_parts: int = 1
):
    """Sends slots within their node first, then between devices of equal rank."""
    local = functools.partial(
        _run_exchanged, collective=hierarchical_all_to_all, exchange_parts=exchange_parts
    )
    return run_on_devices(local, x_GTD, plan, experts)


def _run_exchanged(x_GTD, plan, experts, placement: Placement, *, collective, exchange_parts):
    axes = placement.experts
    if not axes:
        return run_slots(x_GTD, plan, experts, lambda x_PERD: x_PERD, 1)
    exchange = functools.partial(collective, axes=axes)
    return run_slots(x_GTD, plan, experts, exchange, placement.size(axes), exchange_parts)


def run_slots(
    x_GTD,
    plan: RoutingPlan,
    experts: ExpertBank,
    exchange: Callable[[jax.Array], jax.Array],
    num_devices: int,
    exchange_parts: int = 1,
):
    """Runs one device's groups through experts that are on `num_devices` devices."""
    token_GQ = token_of_slot(plan)
    x_ERD = gather_into_slots(x_GTD, plan, token_GQ)
    x_PERD = x_ERD.reshape(num_devices, -1, *x_ERD.shape[1:])
    y_PERD = run_exchanged(x_PERD, experts, exchange, exchange_parts)
    return gather_from_slots(y_PERD.reshape(x_ERD.shape), plan, token_GQ)


def ragged_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank):
    """Sends rows sorted by expert to their experts' devices and back."""
    return run_on_devices(_local, x_GTD, plan, experts)


def _local(x_GTD, plan: RoutingPlan, experts: ExpertBank, placement: Placement):
    G, T, S = plan.expert_GTS.shape
    E = plan.num_experts
    axes = placement.experts
    num_parts = placement.size(axes)
    expert_X = jnp.where(plan.is_kept_GTS, plan.expert_GTS, E).reshape(-1)
    sent = sort_into_rows(expert_X, E, rows=expert_X.size)
    token_1R = (sent.choice_R // S)[None]
    row_1TS = sent.row_X.reshape(1, G * T, S)
    x_1RD = gather_rows(x_GTD.reshape(1, G * T, -1), token_1R, row_1TS)

    # Numbers of rows of every device for every expert, known to all devices.
    count_PE = jax.lax.all_gather(sent.count_E, axes) if axes else sent.count_E[None]
    size_PP = count_PE.reshape(num_parts, num_parts, -1).sum(axis=2)
    # A device receives no more than its experts have slots, nor more rows than there are.
    rows = min(num_parts * expert_X.size, E * G * plan.capacity)

    def exchange(x_RD, size_PP, rows):
        return ragged_all_to_all(x_RD, size_PP, axes, rows) if axes else x_RD[:rows]

    here = jax.lax.axis_index(axes) if axes else 0
    count_PE = count_PE.reshape(num_parts, num_parts, -1)[:, here]
    y_RD = _run_received(exchange(x_1RD[0], size_PP, rows), count_PE, experts)
    y_RD = exchange(y_RD, size_PP.T, expert_X.size)
    gate_1TS = plan.gate_GTS.reshape(1, G * T, S)
    return gated_sum(y_RD[None], token_1R, row_1TS, gate_1TS).reshape(x_GTD.shape)


def _run_received(x_RD, count_PE, experts: ExpertBank):
    """Runs received rows, in order of source and then expert, each through its expert."""
    rows, E = x_RD.shape[0], count_PE.shape[1]
    run_R, is_row_R = rows_of_groups(count_PE.reshape(-1), rows)
    expert_R = jnp.where(is_row_R, run_R % E, E).astype(jnp.int32)
    own = sort_into_rows(expert_R, E, rows=rows)
    into_1R, back_1R = own.choice_R[None], own.row_X[None]
    x_1RD = gather_rows(x_RD[None], into_1R, back_1R[..., None])
    y_RD = experts.run_rows(x_1RD[0], own.count_E)
    return gather_rows(y_RD[None], back_1R, into_1R[..., None])[0]
