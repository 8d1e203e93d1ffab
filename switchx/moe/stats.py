# SPDX-License-Identifier: Apache-2.0
"""What a Switch layer measures about its routing, returned with its output.

Dims: B L N G T S E

Auxiliary losses of a router. Their weights and their sum stand in `training/losses.py`.

Dims: G T E
"""

import dataclasses

import jax
import jax.numpy as jnp

from switchx.moe.plan import RoutingPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """Where a Switch layer sends every token; `[N, ...]` when stacked over layers.

    Attributes:
        expert_BLS: chosen experts; the number of experts where nothing is chosen.
        gate_BLS: their weights.
    """

    expert_BLS: jax.Array
    gate_BLS: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingStats:
    """Routing of one Switch layer over one batch; stacked over layers by the model.

    Sums rather than means where tokens are counted, so that stats of microbatches and
    shards add up exactly; `per_token` turns them into means.

    Attributes:
        balance_loss, router_z_loss: the auxiliary losses, with gradients, unweighted.
        tokens: real tokens routed.
        load_E: tokens that asked for each expert, before capacity.
        dropped: choices that got no slot.
        entropy: sum over tokens of the router's entropy, in nats.
        gate: sum over tokens of the largest of their gates.
        choices: of every token, one item a stack (the encoder's first). A program that does
            not return them does not compute them either; see `summed`.
    """

    balance_loss: jax.Array
    router_z_loss: jax.Array
    tokens: jax.Array
    load_E: jax.Array
    dropped: jax.Array
    entropy: jax.Array
    gate: jax.Array
    choices: tuple[Choices, ...] = ()

    @property
    def summed(self) -> "RoutingStats":
        """The same without `choices`, all of which may be added up over batches."""
        return dataclasses.replace(self, choices=())

    def per_token(self) -> "RoutingStats":
        """The same with every count divided by the layer's tokens."""
        tokens = jnp.maximum(self.tokens, 1)
        return dataclasses.replace(
            self,
            load_E=self.load_E / tokens[..., None],
            dropped=self.dropped / tokens,
            entropy=self.entropy / tokens,
            gate=self.gate / tokens,
        )


def measure_routing(
    logits_GTE, prob_GTE, plan: RoutingPlan, is_token_GT, *, balance_scope: str = "group"
) -> RoutingStats:
    """Statistics and auxiliary losses of one layer, in float32.

    Args:
        balance_scope: of the balance loss, `group` or `batch`.
    """
    logits_GTE, prob_GTE = logits_GTE.astype(jnp.float32), prob_GTE.astype(jnp.float32)
    is_token_GT32 = is_token_GT.astype(jnp.float32)
    frozen_GTE = jax.lax.stop_gradient(prob_GTE)
    entropy_GT = -jnp.sum(frozen_GTE * jnp.log(jnp.maximum(frozen_GTE, 1e-30)), axis=-1)
    dropped_GTS = plan.is_routed_GTS & ~plan.is_kept_GTS
    return RoutingStats(
        balance_loss=balance_loss(prob_GTE, plan.counted_GE, is_token_GT, scope=balance_scope),
        router_z_loss=router_z_loss(logits_GTE, is_token_GT),
        tokens=jnp.sum(is_token_GT32),
        load_E=jnp.sum(plan.count_GE, axis=0).astype(jnp.float32),
        dropped=jnp.sum(dropped_GTS).astype(jnp.float32),
        entropy=jnp.sum(entropy_GT * is_token_GT32),
        gate=jnp.sum(jax.lax.stop_gradient(jnp.max(plan.gate_GTS, axis=-1)) * is_token_GT32),
    )


def join_stacks(encoder: RoutingStats | None, decoder: RoutingStats | None):
    """Statistics of an encoder's layers and then a decoder's, which have other tokens.

    None for dense stacks.
    """
    if encoder is None or decoder is None:
        return encoder if decoder is None else decoder
    layers = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), encoder.summed, decoder.summed
    )
    return dataclasses.replace(layers, choices=encoder.choices + decoder.choices)


def balance_loss(prob_GTE, count_GE, is_token_GT, *, scope: str = "group"):
    """E * sum_e f_e P_e of every group, averaged over the groups that have tokens.

    Fedus et al. 2021 (arXiv:2101.03961), eq. 4-6: f_e is the share of choices that are e
    (before capacity), P_e the mean router probability of e. 1 when both are uniform,
    whatever k is; flaxformer's and Hugging Face's is k times that. Only P carries a gradient.

    Args:
        count_GE: choices of each expert; a share of their sum.
        scope: `group`; or `batch`, all groups as one (Qiu et al. 2025, arXiv:2501.11873): an
            expert then may be busy in one group and idle in another.
    """
    if scope == "batch":
        prob_GTE, is_token_GT = (
            x.reshape(1, -1, *x.shape[2:]) for x in (prob_GTE, is_token_GT)
        )
        count_GE = jnp.sum(count_GE, axis=0, keepdims=True)
    num_experts, dtype = prob_GTE.shape[-1], prob_GTE.dtype
    tokens_G = jnp.sum(is_token_GT, axis=-1).astype(dtype)
    count_GE = jax.lax.stop_gradient(count_GE.astype(dtype))
    share_GE = count_GE / jnp.maximum(jnp.sum(count_GE, axis=-1, keepdims=True), 1)
    prob_GE = jnp.einsum("GTE,GT->GE", prob_GTE, is_token_GT.astype(dtype))
    mean_prob_GE = prob_GE / jnp.maximum(tokens_G, 1)[:, None]
    loss_G = num_experts * jnp.sum(share_GE * mean_prob_GE, axis=-1)
    return jnp.sum(loss_G) / jnp.maximum(jnp.sum(tokens_G > 0), 1).astype(dtype)


def router_z_loss(logits_GTE, is_token_GT):
    """Mean over real tokens of logsumexp(logits)^2.

    Zoph et al. 2022 (arXiv:2202.08906), eq. 5.
    """
    is_token_GT = is_token_GT.astype(logits_GTE.dtype)
    log_z_GT = jax.nn.logsumexp(logits_GTE, axis=-1)
    return jnp.sum(log_z_GT**2 * is_token_GT) / jnp.maximum(jnp.sum(is_token_GT), 1)
