# SPDX-License-Identifier: Apache-2.0
"""Routing statistics of a Switch layer, its auxiliary losses included: sums alone.

Sums over tokens or groups add up over microbatches, stages, devices and batches, so a mean is
the quotient of two of them and does not depend on how a batch was split. `RoutingStats` holds
numerators and denominators, and its properties the quotients that are reported; `loss_terms` in
`training/losses.py` divides by the whole batch's. A new auxiliary loss is a numerator here, its
quotient in `means`, and its weight there.
Dims: B batch, L length, N Switch layers, G groups, T tokens of a group, E experts, S choices,
M length once more, U tasks that experts are divided among, W experts of a task
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from switchx.moe.balance_loss import balance_sums, sequence_sums, times_experts
from switchx.moe.config import RouterConfig
from switchx.moe.load_evenness import expected_drops
from switchx.moe.routing_plan import RoutingPlan, choice_margin, choose_experts, chosen_gates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices of a Switch layer for every token; `[N, ...]` when stacked over layers.

    Attributes:
        expert_BLS: chosen experts; the number of experts where nothing is chosen.
        gate_BLS: weights of the choices.
        dropped_BLS: int8, 1 where a choice asked for a slot and got none: stages add it up.
        rank_BLR: experts of the highest scores, the highest first, R of `num_ranks`.
        prob_BLR: router probabilities of these; with `gate="score"` their scores.
        margin_BL: score of the last choice minus the next expert's; 0 without a next one.
    """

    expert_BLS: jax.Array
    gate_BLS: jax.Array
    dropped_BLS: jax.Array
    rank_BLR: jax.Array
    prob_BLR: jax.Array
    margin_BL: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingStats:
    """Routing of one Switch layer over one batch; `[N, ...]` when stacked over layers.

    Attributes:
        tokens: real tokens routed.
        groups: number of groups of the balance loss that have a real token; 1 where the whole
            batch is one.
        balance: sum over groups of `E sum_e f_e P_e`, with its gradient. By sequence, a group
            is a sequence; by the load of the previous step, each token is one.
        router_z: sum over tokens of logsumexp(logits)^2, with its gradient.
        load_E: tokens that asked for each expert, before capacity.
        dropped: choices that asked for a slot and got none.
        entropy: sum over tokens of the router's entropy, in nats.
        gate: sum over tokens of the largest gate of each token.
        prob_E: sum over tokens of the router's probability of each expert; with its gradient
            where the balance loss is of the batch.
        mass: sum over tokens of the probabilities of their S best experts, before any
            normalising; None, like `margin`, where experts choose or a hash does.
        margin: sum over tokens of the S-th best score minus the next one, by the scores of the
            choice (with bias and noise).
        bias: number of tokens times the mean of the selection bias; None without one.
        counted_E: choices of each expert that the balance loss counts, where it is of the
            batch; None elsewhere.
        margin_EW, margin_E: `quantile_balance.margin_counts` and `margin_quantiles`, in
            training with such a bias; None elsewhere.
        expected_dropped: choices that a balanced router would drop in these groups
            (`load_evenness.expected_drops`); None where that is not the law of its drops.
        own_E: choices of each expert that the router would make, where choices are given and a
            bias balances its own; None elsewhere.
        asked: choices that asked for a slot where experts choose: those taken, which `load_E`
            counts, and those dropped. None elsewhere: `load_E` counts both.
        choices: the choices of every token, one item for each stack (the encoder's first). A
            program that does not return them does not compute them either; see `summed`.
        num_tasks: tasks that the experts are divided among (`RouterConfig.num_tasks`).
    """

    tokens: jax.Array
    groups: jax.Array
    balance: jax.Array
    router_z: jax.Array
    load_E: jax.Array
    dropped: jax.Array
    entropy: jax.Array
    gate: jax.Array
    prob_E: jax.Array | None = None
    mass: jax.Array | None = None
    margin: jax.Array | None = None
    bias: jax.Array | None = None
    expected_dropped: jax.Array | None = None
    counted_E: jax.Array | None = None
    margin_EW: jax.Array | None = None
    margin_E: jax.Array | None = None
    own_E: jax.Array | None = None
    asked: jax.Array | None = None
    choices: tuple[Choices, ...] = ()
    num_tasks: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def summed(self) -> "RoutingStats":
        """The statistics without `choices`, which may be added up over batches."""
        return dataclasses.replace(self, choices=())

    @property
    def reported(self) -> "RoutingStats":
        """The statistics without what only a step's update of the routers reads."""
        return dataclasses.replace(
            self, counted_E=None, margin_EW=None, margin_E=None, own_E=None
        )

    def with_load(self, share_NE, tokens) -> "RoutingStats":
        """The statistics of a part of a batch whose balance loss is by the whole batch's load.

        `E sum_e f_e P_e` is linear in P, so with f known the parts add up to it exactly.

        Args:
            share_NE: f, shares of the choices of the whole batch, per layer.
            tokens: number of tokens of the whole batch.
        """
        weight_NE = times_experts(share_NE, self.num_tasks)
        balance = jnp.sum(weight_NE * self.prob_E, axis=-1) / tokens
        return dataclasses.replace(self, balance=balance, groups=self.tokens / tokens)

    @property
    def balance_loss(self) -> jax.Array:
        """The mean over groups of `E sum_e f_e P_e`, per layer."""
        return self.balance / jnp.maximum(self.groups, 1)

    @property
    def router_z_loss(self) -> jax.Array:
        """The mean over tokens of logsumexp(logits)^2, per layer."""
        return self.router_z / jnp.maximum(self.tokens, 1)

    def means(self) -> dict[str, jax.Array]:
        """Every sum divided by its number of tokens or groups, per layer; `load` is `[..., E]`.

        `information` is that of a token about its expert, H(mean p) - mean H(p) in nats: 0 for
        a router that is uniform, or certain and the same for all tokens. If experts are divided
        among tasks, what a token's task tells is not the router's doing and is left out.
        """
        tokens = jnp.maximum(self.tokens, 1)
        per_token = {
            "dropped": self.dropped,
            "asked": self.asked,
            "expected_dropped": self.expected_dropped,
            "entropy": self.entropy,
            "gate": self.gate,
            "gate_mass": self.mass,
            "margin": self.margin,
            "bias": self.bias,
        }
        means = {name: sum / tokens for name, sum in per_token.items() if sum is not None}
        if self.prob_E is not None:
            prob_E = self.prob_E / tokens[..., None]
            prob_U = jnp.sum(prob_E.reshape(*tokens.shape, self.num_tasks, -1), axis=-1)
            mean_entropy = _entropy(prob_E) - _entropy(prob_U)
            means["information"] = jnp.maximum(mean_entropy - means["entropy"], 0.0)
        return means | {
            "load": self.load_E / tokens[..., None],
            "balance_loss": self.balance_loss,
            "router_z_loss": self.router_z_loss,
        }


def measure_routing(
    logits_GTE,
    prob_GTE,
    plan: RoutingPlan,
    is_token_GT,
    router: RouterConfig = RouterConfig(),
    *,
    score_GTE=None,
    bias_E=None,
    load_E=None,
    segment_BL=None,
) -> RoutingStats:
    """The statistics of one layer, in float32.

    Args:
        prob_GTE: scores over their sum (`normalized_scores`).
        score_GTE: scores by which the tokens chose (`choice_scores`); None is `prob_GTE`.
        bias_E: the bias in them; None without one.
        load_E: shares of the choices in the step before, which the balance loss compares with;
            None compares with the current ones.
        segment_BL: sequence of each token, for a balance loss by sequence; None is by group.
    """
    logits_GTE = logits_GTE.astype(jnp.float32)
    prob_GTE = prob_GTE.astype(jnp.float32)
    token_GT = is_token_GT.astype(jnp.float32)
    tokens, frozen_GTE = jnp.sum(token_GT), jax.lax.stop_gradient(prob_GTE)
    entropy_GT = _entropy(frozen_GTE)
    if segment_BL is not None:
        balance, groups = sequence_sums(prob_GTE, plan, segment_BL, router.num_tasks)
    else:
        balance, groups = balance_sums(
            prob_GTE,
            plan.counted_GE,
            is_token_GT,
            scope=router.balance_scope,
            num_tasks=router.num_tasks,
        )
    mass = margin = None
    if router.has_margin:
        score_GTE = frozen_GTE if score_GTE is None else score_GTE.astype(jnp.float32)
        chosen_GTS = choose_experts(score_GTE, router.num_selected)
        mass = jnp.sum(jnp.sum(chosen_gates(frozen_GTE, chosen_GTS), axis=-1) * token_GT)
        margin = jnp.sum(choice_margin(score_GTE, chosen_GTS) * token_GT)
    floor = _expected_dropped(plan, is_token_GT) if router.has_drop_floor else None
    is_of_batch, counted_E = router.balance_scope == "batch", None
    summed_GTE = jnp.where(is_token_GT[..., None], prob_GTE if is_of_batch else frozen_GTE, 0)
    prob_E = jnp.sum(jnp.sum(summed_GTE, axis=1), axis=0)
    if is_of_batch:
        counted_E = jnp.sum(plan.counted_GE, axis=0).astype(jnp.float32)
    count_E = jnp.sum(plan.count_GE, axis=0).astype(jnp.float32)
    own_E = plan.own_GE
    if own_E is not None:
        own_E = jnp.sum(own_E, axis=0).astype(jnp.float32)
    dropped = jnp.sum(plan.is_dropped_GTS).astype(jnp.float32)
    if load_E is not None:
        share_E, groups = jax.lax.stop_gradient(load_E), tokens
        balance = jnp.sum(times_experts(share_E, router.num_tasks) * prob_E)
    return RoutingStats(
        tokens=tokens,
        groups=groups,
        balance=balance,
        router_z=jnp.sum(jax.nn.logsumexp(logits_GTE, axis=-1) ** 2 * token_GT),
        load_E=count_E,
        dropped=dropped,
        entropy=jnp.sum(entropy_GT * token_GT),
        gate=jnp.sum(jax.lax.stop_gradient(jnp.max(plan.gate_GTS, axis=-1)) * token_GT),
        prob_E=prob_E,
        mass=mass,
        margin=margin,
        bias=None if bias_E is None else tokens * jnp.mean(jax.lax.stop_gradient(bias_E)),
        expected_dropped=floor,
        counted_E=counted_E,
        own_E=own_E,
        asked=jnp.sum(count_E) + dropped if router.has_choosing_experts else None,
        num_tasks=router.num_tasks,
    )


def _entropy(prob_E):
    return -jnp.sum(prob_E * jnp.log(jnp.maximum(prob_E, 1e-30)), axis=-1)


def _expected_dropped(plan: RoutingPlan, is_token_GT):
    """The sum over groups of `load_evenness.expected_drops`, looked up by their numbers of
    tokens."""
    T, S = plan.expert_GTS.shape[1:]
    if plan.capacity >= T:
        return jnp.zeros((), jnp.float32)
    drops_T = expected_drops(np.arange(T + 1), S, plan.num_experts, plan.capacity)
    tokens_G = jnp.sum(is_token_GT, axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.asarray(drops_T, jnp.float32)[tokens_G])


def join_stacks(encoder: RoutingStats | None, decoder: RoutingStats | None):
    """Statistics of an encoder's layers and then a decoder's, which have different tokens.

    None for dense stacks.
    """
    if encoder is None or decoder is None:
        return encoder if decoder is None else decoder
    layers = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), encoder.summed, decoder.summed
    )
    return dataclasses.replace(layers, choices=encoder.choices + decoder.choices)
