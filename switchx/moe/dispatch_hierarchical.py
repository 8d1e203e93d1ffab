# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel dispatch whose all-to-all is one inside of nodes and one between them.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.2, Figure 8: bit for bit what
`dispatch_all_to_all` gives. Dims: G T D; P devices of the exchange
"""

from switchx.moe.dispatch import ExpertBank
from switchx.moe.dispatch_all_to_all import run_slots
from switchx.moe.expert_parallel import run_on_devices
from switchx.moe.plan import RoutingPlan
from switchx.partitioning.collectives import hierarchical_all_to_all
from switchx.partitioning.placement import Placement


def hierarchical_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank):
    """Slots travel inside of their node first, then between devices of equal rank."""

    def local(x_GTD, plan, experts, placement: Placement):
        def exchange(x_PERD):
            axes = placement.experts
            return hierarchical_all_to_all(x_PERD, axes) if axes else x_PERD

        num_parts = placement.size(placement.experts)
        return run_slots(x_GTD, plan, experts, exchange, num_parts)

    return run_on_devices(local, x_GTD, plan, experts)
