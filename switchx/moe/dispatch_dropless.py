# SPDX-License-Identifier: Apache-2.0
"""Dropless dispatch: a grouped matrix product over the rows there are, whatever the load.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841). Nothing is dropped where the plan drops
nothing (a capacity of all tokens); what the plan drops is dropped here too. The work
follows the tokens: no slot is empty, and 4 tokens do not cost E of them. Dims: G T S E R D
"""

import jax.numpy as jnp

from switchx.moe.dispatch import ExpertBank, gated_sum, gather_rows
from switchx.moe.expert_parallel import run_on_devices
from switchx.moe.expert_rows import ExpertRows, sort_into_rows
from switchx.moe.plan import RoutingPlan
from switchx.partitioning.placement import Placement


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
