# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch that sends rows and no empty slots: a ragged all-to-all.

The dropless form over devices. CPU emulates the collective (`ragged_all_to_all`), all else is
the code that accelerators run. Dims: G T S E C D R X; P devices of the exchange
"""

import jax
import jax.numpy as jnp

from pallas_kernels.sorted_rows import rows_of_groups
from switchx.moe.dispatch import ExpertBank, gated_sum, gather_rows
from switchx.moe.expert_parallel import run_on_devices
from switchx.moe.expert_rows import sort_into_rows
from switchx.moe.plan import RoutingPlan
from switchx.partitioning.collectives import ragged_all_to_all
from switchx.partitioning.placement import Placement


def ragged_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank):
    """Rows sorted by expert travel to their experts' devices and back."""
    return run_on_devices(_local, x_GTD, plan, experts)


def _local(x_GTD, plan: RoutingPlan, experts: ExpertBank, placement: Placement):
    (G, T, S), E, axes = plan.expert_GTS.shape, plan.num_experts, placement.experts
    num_parts = placement.size(axes)
    expert_X = jnp.where(plan.is_kept_GTS, plan.expert_GTS, E).reshape(-1)
    sent = sort_into_rows(expert_X, E, rows=expert_X.size)
    token_1R, row_1TS = (sent.choice_R // S)[None], sent.row_X.reshape(1, G * T, S)
    x_1RD = gather_rows(x_GTD.reshape(1, G * T, -1), token_1R, row_1TS)

    # Who has how many rows for which expert: everybody knows, so everybody knows where.
    count_PE = jax.lax.all_gather(sent.count_E, axes) if axes else sent.count_E[None]
    size_PP = count_PE.reshape(num_parts, num_parts, -1).sum(axis=2)
    # No device receives more than its experts' slots, nor more than there is.
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
    """Received rows, by source and then by expert, each through its expert."""
    rows, E = x_RD.shape[0], count_PE.shape[1]
    run_R, is_row_R = rows_of_groups(count_PE.reshape(-1), rows)
    expert_R = jnp.where(is_row_R, run_R % E, E).astype(jnp.int32)
    own = sort_into_rows(expert_R, E, rows=rows)
    into_1R, back_1R = own.choice_R[None], own.row_X[None]
    x_1RD = gather_rows(x_RD[None], into_1R, back_1R[..., None])
    y_RD = experts.run_rows(x_1RD[0], own.count_E)
    return gather_rows(y_RD[None], back_1R, into_1R[..., None])[0]
