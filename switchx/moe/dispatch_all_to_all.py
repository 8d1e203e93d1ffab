# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch: slots travel to their experts' devices and back.

Lepikhin et al. 2020 (GShard, arXiv:2006.16668); Fedus et al. 2021 (arXiv:2101.03961),
section 5.4. Dims: G T E C D R; P devices of the exchange
"""

import functools
from collections.abc import Callable

import jax

from switchx.moe.dispatch import (
    ExpertBank,
    gather_from_slots,
    gather_into_slots,
    token_of_slot,
)
from switchx.moe.dispatch_shared import run_shared
from switchx.moe.expert_parallel import run_on_devices
from switchx.moe.plan import RoutingPlan
from switchx.moe.shared_groups import shared_axes
from switchx.partitioning.collectives import all_to_all
from switchx.partitioning.placement import Placement


def all_to_all_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank):
    """One all-to-all of all slots over the experts' axes there, and one back.

    Where there are fewer groups than devices, those that share one gather its slots first.
    """
    if shared := shared_axes("all_to_all", plan.expert_GTS.shape[0]):
        local = functools.partial(run_shared, shared=shared)
        return run_on_devices(local, x_GTD, plan, experts, shared=shared)

    def local(x_GTD, plan, experts, placement: Placement):
        def exchange(x_PERD):
            return all_to_all(x_PERD, placement.experts) if placement.experts else x_PERD

        num_parts = placement.size(placement.experts)
        return run_slots(x_GTD, plan, experts, exchange, num_parts)

    return run_on_devices(local, x_GTD, plan, experts)


def run_slots(
    x_GTD,
    plan: RoutingPlan,
    experts: ExpertBank,
    exchange: Callable[[jax.Array], jax.Array],
    num_parts: int,
):
    """One device's groups through experts that are on `num_parts` devices.

    Args:
        exchange: `[P, E / P, R, D]` by destination -> the same by source.
    """
    token_GQ = token_of_slot(plan)
    x_ERD = gather_into_slots(x_GTD, plan, token_GQ)
    E, R, D = x_ERD.shape
    x_PERD = exchange(x_ERD.reshape(num_parts, E // num_parts, R, D))
    # Rows of one expert lie together, those of device 0 first.
    y_ERD = experts(x_PERD.swapaxes(0, 1).reshape(E // num_parts, num_parts * R, D))
    y_PERD = y_ERD.reshape(E // num_parts, num_parts, R, D).swapaxes(0, 1)
    return gather_from_slots(exchange(y_PERD).reshape(E, R, D), plan, token_GQ)
