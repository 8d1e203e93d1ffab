# SPDX-License-Identifier: Apache-2.0
"""From logits to a plan, by the policies that a `RouterConfig` names.

Each policy has its file and its paper: `router.py`, `exploration.py`, `expert_choice.py`,
`hash_router.py`, `priority.py`, `capacity.py`, `reroute.py`. Dims: G T S E C
"""

import jax
import jax.numpy as jnp

from switchx.layers.broadcast import along_last
from switchx.moe.capacity import assign_slots
from switchx.moe.expert_choice import route_by_experts
from switchx.moe.exploration import sampling_scores
from switchx.moe.plan import RoutingPlan
from switchx.moe.priority import by_gate
from switchx.moe.reroute import reroute
from switchx.moe.router import choose_experts, chosen_gates


def make_plan(
    router,
    logits_GTE,
    prob_GTE,
    is_token_GT,
    capacity: int,
    *,
    bias_E=None,
    key=None,
    assign=assign_slots,
) -> RoutingPlan:
    """The plan of one layer.

    Args:
        router: a `RouterConfig`.
        prob_GTE: softmax of the logits; gates and balance loss get their gradient from it.
        is_token_GT: false for what is neither routed nor counted.
        bias_E: added to the probabilities for choosing, not for gating
            (arXiv:2408.15664, eq. 3).
        assign: places choices in queues; `assign_slots`, or its like for groups that devices
            share.
        key: of `exploration="sample"`; None (evaluation) takes the most probable experts.
    """
    if router.kind == "expert_choice":
        return route_by_experts(prob_GTE, is_token_GT, capacity)
    score_GTE = prob_GTE
    if router.exploration == "sample" and key is not None:
        score_GTE = sampling_scores(logits_GTE, router.temperature, key=key)
    if bias_E is not None:
        score_GTE = score_GTE + along_last(bias_E, score_GTE)
    rounds = router.max_rounds if router.overflow == "reroute" else router.num_selected
    chosen_GTS = choose_experts(score_GTE, rounds)
    return place_choices(router, prob_GTE, chosen_GTS, is_token_GT, capacity, assign)


def place_choices(
    router, prob_GTE, chosen_GTS, is_token_GT, capacity: int, assign=assign_slots
) -> RoutingPlan:
    """Slots and gates for the experts that the tokens chose.

    Args:
        chosen_GTS: each token's experts, the best first: k of them, or one for each round.
    """
    E = prob_GTE.shape[-1]
    asked_GTS = jnp.where(is_token_GT[..., None], chosen_GTS, E)
    is_rerouted = router.overflow == "reroute"

    def place(asked_GTS):
        if not is_rerouted:
            return asked_GTS, assign(asked_GTS, E)[0]
        expert_GT, slot_GT = reroute(asked_GTS, E, capacity)
        return expert_GT[..., None], slot_GT[..., None]

    if router.priority == "gate":
        place = by_gate(chosen_gates(prob_GTE, chosen_GTS[..., :1])[..., 0], place)
    expert_GTS, slot_GTS = place(asked_GTS)
    counts_rounds = is_rerouted and router.balance_counts == "all_rounds"
    return RoutingPlan(
        expert_GTS=expert_GTS,
        gate_GTS=chosen_gates(prob_GTE, expert_GTS, router.gate),
        slot_GTS=slot_GTS,
        # What was asked for first: rerouted tokens are not what an expert attracts.
        count_GE=count_choices(asked_GTS[..., :1] if is_rerouted else asked_GTS, E),
        num_experts=E,
        capacity=capacity,
        balance_GE=count_choices(asked_GTS, E) if counts_rounds else None,
    )


def count_choices(expert_GTS, num_experts: int):
    """How many choices name each expert, int32 `[G, E]`."""
    return jnp.sum(jax.nn.one_hot(expert_GTS, num_experts, dtype=jnp.int32), axis=(1, 2))
