# SPDX-License-Identifier: Apache-2.0
"""Which dispatcher runs a layer: the configured one, on the meshes that it can run on.

Dims: G T S E
"""

from switchx.moe.dispatch import Dispatcher, sort_dispatch
from switchx.moe.dispatch_dropless import dropless_dispatch
from switchx.moe.dispatch_einsum import einsum_dispatch
from switchx.moe.plan import RoutingPlan
from switchx.partitioning.constrain import num_devices

DISPATCHERS = {
    "sort": sort_dispatch,
    "einsum": einsum_dispatch,
    "dropless": dropless_dispatch,
}


def choose_dispatcher(switch, plan: RoutingPlan, *, is_training: bool) -> Dispatcher:
    """The function that runs a `SwitchConfig`'s layer on one plan.

    `sort` computes every slot of every expert, and each expert has some. With fewer choices
    than experts (a step of decoding) most slots are empty, so those go through `dropless`,
    which gives the same numbers: the matrices of other experts are not even read.
    """
    is_few = plan.expert_GTS.size <= plan.num_experts
    if switch.dispatcher == "sort" and is_few and not is_training and num_devices() == 1:
        return dropless_dispatch
    return DISPATCHERS[switch.dispatcher]
