# SPDX-License-Identifier: Apache-2.0
"""The routing plan, and how it assigns tokens by the policies of a `RouterConfig`.

Fedus et al. 2021 (arXiv:2101.03961), section 2.1 eq. 2; Lepikhin et al. 2020
(arXiv:2006.16668), algorithm 1, for k = 2; Zhou et al. 2022 (arXiv:2202.09368), section 3.2,
for experts that choose; Riquelme et al. 2021 (arXiv:2106.05974), section 4.2, for priority by
gate.
Dims: G groups, T tokens of a group, S choices of a token, E experts, C slots of an expert
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.sorted_rows import stable_argsort
from switchx.layers.dense import along_last
from switchx.moe.capacity import assign_slots, out_of_groups, reroute
from switchx.moe.router import NEVER, normalized_scores, sampling_scores

# The name of arrays that every remat policy keeps (`models/stack.py`): if they were recomputed
# in the backward pass, a near tie might be decided differently there.
DECISION = "routing_decision"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingPlan:
    """The decisions of a router, in the one form that every dispatcher reads.

    Attributes:
        expert_GTS: int32 chosen experts; `num_experts` where nothing is routed (padding).
        gate_GTS: float32 weight of each expert's output, with the router's gradient.
        slot_GTS: int32 place in the expert's queue; a place of `capacity` or more is dropped.
        count_GE: int32 tokens that asked for each expert, before capacity.
        num_experts, capacity: E and C.
        counted_GTS: int32 choices that the balance loss counts, where they differ from those
            that `count_GE` counts; None where they are the same.
        own_GE: int32 tokens that the router would send to each expert, where choices are given
            and a bias balances the router's own; None elsewhere.
    """

    expert_GTS: jax.Array
    gate_GTS: jax.Array
    slot_GTS: jax.Array
    count_GE: jax.Array
    num_experts: int = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    counted_GTS: jax.Array | None = None
    own_GE: jax.Array | None = None

    @property
    def counted_GE(self):
        """The number of choices that the balance loss counts, of each expert."""
        if self.counted_GTS is None:
            return self.count_GE
        return count_choices(self.counted_GTS, self.num_experts)

    @property
    def is_routed_GTS(self):
        """Whether a choice asks for an expert at all."""
        return self.expert_GTS < self.num_experts

    @property
    def is_kept_GTS(self):
        """Whether a choice got a slot."""
        return self.is_routed_GTS & (self.slot_GTS < self.capacity)

    @property
    def is_dropped_GTS(self):
        """Whether a choice asked for a slot and got none."""
        return self.is_routed_GTS & (self.slot_GTS >= self.capacity)

    @property
    def position_GTS(self):
        """Place in the G buffers of E * C slots; E * C where a choice has none."""
        position_GTS = self.expert_GTS * self.capacity + self.slot_GTS
        return jnp.where(self.is_kept_GTS, position_GTS, self.num_experts * self.capacity)

    def of_rows(self, batch: int, length: int) -> "RoutingPlan":
        """The plan in which each of `batch` rows is a group; slots stay those of this one.

        Nothing is dropped, so a row needs as much capacity as it has tokens.
        """
        arrays = (self.expert_GTS, self.gate_GTS, self.slot_GTS)
        expert_GTS, gate_GTS, slot_GTS = (out_of_groups(x, batch, length) for x in arrays)
        count_GE = count_choices(expert_GTS, self.num_experts)
        capacity = max(self.capacity, length)
        return RoutingPlan(expert_GTS, gate_GTS, slot_GTS, count_GE, self.num_experts, capacity)


def make_plan(
    router,
    logits_GTE,
    score_GTE,
    is_token_GT,
    capacity: int,
    *,
    bias_E=None,
    given_GTS=None,
    key=None,
    assign=assign_slots,
) -> RoutingPlan:
    """The plan of one layer.

    Args:
        router: a `RouterConfig`.
        score_GTE: `router_scores` of the logits; gates get their gradient from it.
        is_token_GT: false for tokens that are neither routed nor counted.
        bias_E: bias added to the scores for choosing experts, not for gating
            (arXiv:2408.15664, eq. 3).
        given_GTS: experts to go to, in place of the chosen ones; -1 leaves the choice to the
            router (`moe/replay.py`). Gates are the scores of the experts given. The
            balance loss counts the router's own choices.
        assign: function that places choices in the experts' queues: `assign_slots`, or its
            equivalent for groups that several devices share.
        key: random key of `exploration="sample"`; None (evaluation) takes the most probable
            experts.
    """
    if router.has_choosing_experts:
        return route_by_experts(score_GTE, is_token_GT, capacity)
    biased_GTE = choice_scores(router, logits_GTE, score_GTE, bias_E=bias_E, key=key)
    rounds = router.max_rounds if router.overflow == "reroute" else router.num_selected
    E = score_GTE.shape[-1]

    def of_tokens(expert_GTS):
        return jnp.where(is_token_GT[..., None], expert_GTS, E)

    chosen_GTS = choose_experts(biased_GTE, rounds)  # the best first
    counted_GTS = own_GE = None
    if given_GTS is not None:
        counted_GTS = decided(of_tokens(chosen_GTS))
        own_GE = count_choices(counted_GTS, E) if router.bias_update_rate else None
        chosen_GTS = jnp.where(given_GTS >= 0, given_GTS.astype(jnp.int32), chosen_GTS)
    asked_GTS = decided(of_tokens(chosen_GTS))
    is_rerouted = router.overflow == "reroute"

    def place(asked_GTS):
        if not is_rerouted:
            return asked_GTS, assign(asked_GTS, E)
        expert_GT, slot_GT = reroute(asked_GTS, E, capacity)
        return expert_GT[..., None], slot_GT[..., None]

    if router.priority == "gate":
        place = by_gate(chosen_gates(score_GTE, chosen_GTS[..., :1])[..., 0], place)
    expert_GTS, slot_GTS = place(asked_GTS)
    if expert_GTS is not asked_GTS:  # in the order of gates, or rerouted
        expert_GTS = decided(expert_GTS)
    if is_rerouted and router.balance_counts == "all_rounds":
        counted_GTS = asked_GTS
    if router.balance_counts == "unbiased":
        best_GTS = choose_experts(
            best_copies(score_GTE, router.num_copies), router.num_selected
        )
        counted_GTS = decided(of_tokens(best_GTS))
    gate_GTS = chosen_gates(score_GTE, expert_GTS, router.gate)
    return RoutingPlan(
        expert_GTS=expert_GTS,
        gate_GTS=gate_GTS if router.gate_scale == 1 else router.gate_scale * gate_GTS,
        slot_GTS=decided(slot_GTS),
        # First choices only: rerouted tokens are no demand for an expert.
        count_GE=count_choices(asked_GTS[..., :1] if is_rerouted else asked_GTS, E),
        num_experts=E,
        capacity=capacity,
        counted_GTS=counted_GTS,
        own_GE=own_GE,
    )


def decided(index):
    """Marks an array that the backward pass does not recompute."""
    return checkpoint_name(index, DECISION)


def choice_scores(router, logits_GTE, score_GTE, *, bias_E=None, key=None):
    """The scores by which tokens choose experts; arguments are those of `make_plan`.

    A bias is added in float32, whatever the router's dtype: in bfloat16, biases that differ
    would become equal. Experts that a token may not have get -inf.
    """
    if router.exploration == "sample" and key is not None:
        score_GTE = sampling_scores(logits_GTE, router.temperature, key=key)
    if bias_E is not None:
        base_GTE = logits_GTE if router.bias_rule == "quantile_logits" else score_GTE
        base_GTE = base_GTE.astype(jnp.promote_types(base_GTE.dtype, jnp.float32))
        score_GTE = base_GTE + along_last(bias_E, base_GTE)
    score_GTE = best_copies(score_GTE, router.num_copies)
    return best_expert_groups(
        score_GTE, router.num_expert_groups, router.expert_groups_per_token
    )


def best_expert_groups(score_GTE, num_expert_groups: int, per_token: int):
    """The scores, -inf outside of each token's best groups of experts, the first of equal ones.

    DeepSeek-V3 (arXiv:2412.19437), section 2.1.2: a group counts as the sum of its two best
    scores. The mask is -inf and not 0, since a biased score may be negative.
    """
    if per_token == num_expert_groups:
        return score_GTE
    groups = score_GTE.reshape(*score_GTE.shape[:-1], num_expert_groups, -1)
    two_best, _ = jax.lax.top_k(groups, 2)
    # A masked expert adds nothing to its group, whose other experts stay.
    two_best = jnp.where(two_best <= NEVER / 2, 0.0, two_best)
    _, best = jax.lax.top_k(jnp.sum(two_best, axis=-1), per_token)
    is_best = jnp.any(jax.nn.one_hot(best, num_expert_groups, dtype=jnp.bool_), axis=-2)
    return jnp.where(is_best[..., None], groups, -jnp.inf).reshape(score_GTE.shape)


def best_copies(score_GTE, num_copies: int):
    """The scores, -inf for all copies of an expert but the best one, the first of equal ones.

    Expert e and its copies are E / num_copies apart.
    """
    if num_copies == 1:
        return score_GTE
    copies = score_GTE.reshape(*score_GTE.shape[:-1], num_copies, -1)
    best = jnp.argmax(copies, axis=-2, keepdims=True)
    index = jax.lax.broadcasted_iota(best.dtype, copies.shape, copies.ndim - 2)
    return jnp.where(index == best, copies, -jnp.inf).reshape(score_GTE.shape)


def choose_experts(score_GTE, num_selected: int):
    """int32 indices of the highest scores, the highest first, ties to the lower index."""
    score_GTE = jax.lax.stop_gradient(score_GTE)
    if num_selected == 1:
        return jnp.argmax(score_GTE, axis=-1, keepdims=True).astype(jnp.int32)
    return jax.lax.top_k(score_GTE, num_selected)[1].astype(jnp.int32)


def rank_experts(logits_GTE, score_GTE, bias_E, switch):
    """The order in which tokens would choose experts, without noise.

    Args:
        bias_E: bias added to the scores for choosing; None without one.
        switch: a `SwitchConfig`.

    Returns:
        rank_GTR: int32 experts, the best first, as many as `num_ranks` says.
        prob_GTR: their probabilities (`normalized_scores`); with `gate="score"` their scores.
        margin_GT: score of the last choice minus that of the next expert; 0 without a next one.
    """
    biased_GTE = choice_scores(switch.router, logits_GTE, score_GTE, bias_E=bias_E)
    rank_GTR = choose_experts(biased_GTE, switch.num_ranks)
    margin_GT = choice_margin(biased_GTE, rank_GTR[..., : switch.router.num_selected])
    router = switch.router
    if router.gate != "score":
        score_GTE = normalized_scores(router.score, score_GTE)
    return rank_GTR, chosen_gates(score_GTE, rank_GTR), margin_GT


def choice_margin(score_GTE, chosen_GTS):
    """Each token's score of its last choice minus the next best one; 0 if it chooses all.

    A change of the scores by less than half of it changes no choice.
    """
    score_GTE, E = jax.lax.stop_gradient(score_GTE), score_GTE.shape[-1]
    if chosen_GTS.shape[-1] == E:
        return jnp.zeros_like(score_GTE[..., 0])
    is_chosen_GTE = jnp.any(jax.nn.one_hot(chosen_GTS, E, dtype=jnp.bool_), axis=-2)
    last_GT = jnp.min(jnp.where(is_chosen_GTE, score_GTE, jnp.inf), axis=-1)
    next_GT = jnp.max(jnp.where(is_chosen_GTE, -jnp.inf, score_GTE), axis=-1)
    # Copies of what is chosen cannot be next: their scores are -inf.
    return jnp.where(next_GT > -jnp.inf, last_GT - next_GT, 0.0)


def chosen_gates(score_GTE, expert_GTS, convention: str = "softmax"):
    """Weight of each chosen expert's output, with the router's gradient.

    Args:
        expert_GTS: int32; a choice of none (`num_experts`) has a gate of 0.
        convention: `softmax` (Switch) and `score`, the expert's score without bias;
            `normalized`, divided by the sum over the chosen ones (GShard). Normalized over one
            chosen expert it would be 1, without a gradient.
    """

    def gate_of(expert_GT):  # a sum over a mask, not a gather: its gradient is no scatter
        is_expert_GTE = jax.nn.one_hot(expert_GT, score_GTE.shape[-1], dtype=jnp.bool_)
        return jnp.sum(jnp.where(is_expert_GTE, score_GTE, 0.0), axis=-1)

    gates = [gate_of(expert_GTS[..., s]) for s in range(expert_GTS.shape[-1])]
    gate_GTS = jnp.stack(gates, axis=-1)
    if convention != "normalized":
        return gate_GTS
    # The floor keeps a token that chooses nothing at 0.
    floor = jnp.finfo(gate_GTS.dtype).tiny
    return gate_GTS / jnp.maximum(jnp.sum(gate_GTS, axis=-1, keepdims=True), floor)


def count_choices(expert_GTS, num_experts: int):
    """The number of choices of each expert, int32 `[G, E]`."""
    return jnp.sum(jax.nn.one_hot(expert_GTS, num_experts, dtype=jnp.int32), axis=(1, 2))


def by_gate(gate_GT, place):
    """Runs `place` on tokens in the order of their gates, the largest first.

    A token's slot then depends on all tokens of its group, including later ones.

    Args:
        gate_GT: gate of each token's first choice; ties keep the order of the tokens.
        place: `expert_GTS` -> arrays `[G, T, ...]` in the same order of tokens.

    Returns:
        `expert_GTS` -> what `place` returns, in the old order of tokens.
    """
    order_GT = stable_argsort(-jax.lax.stop_gradient(gate_GT))
    # Where each token went: the inverse of a permutation is its argsort.
    inverse_GT = stable_argsort(order_GT)

    def reordered(expert_GTS):
        placed = place(_take(expert_GTS, order_GT))
        return jax.tree.map(lambda array: _take(array, inverse_GT), placed)

    return reordered


def _take(array, index_GT):
    index = index_GT.reshape(index_GT.shape + (1,) * (array.ndim - 2))
    return jnp.take_along_axis(array, index, axis=1)


def route_by_experts(prob_GTE, is_token_GT, capacity: int) -> RoutingPlan:
    """Each expert's `capacity` tokens of the highest probability, gated by it.

    The plan has a choice for every expert: choice s of a token is expert s if that took the
    token. A token that none took asks for its most probable expert and is dropped, so that
    the plan and the metrics know of it.

    Args:
        prob_GTE: the softmax over experts, as in the paper.
        is_token_GT: false for padding, which no expert takes.
    """
    G, T, E = prob_GTE.shape
    score_GTE = jnp.where(is_token_GT[..., None], jax.lax.stop_gradient(prob_GTE), -1.0)
    score_GEC, token_GEC = jax.lax.top_k(jnp.swapaxes(score_GTE, 1, 2), capacity)
    # An expert may have more slots than there are tokens: T is past the end.
    token_GEC = jnp.where(score_GEC >= 0, token_GEC, T)
    slots_C = jnp.arange(capacity, dtype=jnp.int32)
    nowhere_T = jnp.full((T,), capacity, jnp.int32)
    slot_GET = jax.vmap(
        jax.vmap(lambda token_C: nowhere_T.at[token_C].set(slots_C, mode="drop"))
    )(token_GEC)
    slot_GTE = decided(jnp.swapaxes(slot_GET, 1, 2))
    is_taken_GTE = slot_GTE < capacity

    is_best_GTE = jax.nn.one_hot(jnp.argmax(score_GTE, axis=-1), E, dtype=jnp.bool_)
    is_left_GT = is_token_GT & ~jnp.any(is_taken_GTE, axis=-1)
    is_refused_GTE = is_left_GT[..., None] & is_best_GTE
    index_GTE = jax.lax.broadcasted_iota(jnp.int32, (G, T, E), 2)
    expert_GTE = decided(jnp.where(is_taken_GTE | is_refused_GTE, index_GTE, E))
    return RoutingPlan(
        expert_GTS=expert_GTE,
        gate_GTS=jnp.where(is_taken_GTE, prob_GTE, 0.0),
        slot_GTS=jnp.where(expert_GTE < E, slot_GTE, 0),
        count_GE=jnp.sum(is_taken_GTE, axis=1, dtype=jnp.int32),
        num_experts=E,
        capacity=capacity,
    )
