# SPDX-License-Identifier: Apache-2.0
"""Sums of the balance loss, by group, batch or sequence (`RouterConfig.balance_scope`).

Fedus et al. 2021 (arXiv:2101.03961), section 2.2; DeepSeek-V3 (arXiv:2412.19437), eq. 17-20.
Dims: G groups, T tokens of a group, E experts, S choices of a token, B rows, L length, U tasks,
W experts of a task, X any
"""

import jax
import jax.numpy as jnp

from switchx.moe.capacity import out_of_groups
from switchx.moe.routing_plan import RoutingPlan


def balance_sums(prob_GTE, count_GE, is_token_GT, *, scope: str = "group", num_tasks: int = 1):
    """Sum over groups of `E sum_e f_e P_e`, and the number of groups that have tokens.

    Fedus et al. 2021 (arXiv:2101.03961), eq. 4-6: f_e is the share of choices that are e
    (before capacity), P_e the mean router probability of e. A group's term is 1 when both are
    uniform, whatever k is; flaxformer's and Hugging Face's is k times that. Only P has a
    gradient.

    Where the experts are divided among tasks, a group's term is the mean over its tokens of
    their tasks' own terms: `W sum_e f_e P_e`, where f_e is the share of the choices of e's
    task that are e.

    Args:
        count_GE: choices of each expert; only shares of their sum matter.
        scope: `group`; or `batch`, all groups as one (Qiu et al. 2025, arXiv:2501.11873): an
            expert may then be busy in one group and idle in another.
        num_tasks: number of tasks U, each with equally many experts, in order.
    """
    if scope == "batch":
        prob_GTE, is_token_GT = (
            x.reshape(1, -1, *x.shape[2:]) for x in (prob_GTE, is_token_GT)
        )
        count_GE = jnp.sum(count_GE, axis=0, keepdims=True)
    dtype = prob_GTE.dtype
    tokens_G = jnp.sum(is_token_GT, axis=-1).astype(dtype)
    count_GE = jax.lax.stop_gradient(count_GE.astype(dtype))
    prob_GE = jnp.sum(jnp.where(is_token_GT[..., None], prob_GTE, 0), axis=1)
    mean_prob_GE = prob_GE / jnp.maximum(tokens_G, 1)[:, None]
    share_GE = count_GE / jnp.maximum(jnp.sum(count_GE, axis=-1, keepdims=True), 1)
    balance_G = jnp.sum(times_experts(share_GE, num_tasks) * mean_prob_GE, axis=-1)
    return jnp.sum(balance_G), jnp.sum(tokens_G > 0).astype(dtype)


def times_experts(share_XE, num_tasks: int):
    """`E f_e`; with tasks `W f_e`, f among the choices of e's task, which has W experts."""
    E = share_XE.shape[-1]
    if num_tasks == 1:
        return E * share_XE
    share_XUW = share_XE.reshape(*share_XE.shape[:-1], num_tasks, E // num_tasks)
    sum_XU1 = jnp.sum(share_XUW, axis=-1, keepdims=True)
    share_XUW = share_XUW / jnp.where(sum_XU1 > 0, sum_XU1, 1)
    return E // num_tasks * share_XUW.reshape(share_XE.shape)


def sequence_sums(prob_GTE, plan: RoutingPlan, segment_BL, num_tasks: int = 1):
    """Sum over sequences of `E sum_e f_e P_e`, and the number of sequences.

    DeepSeek-V3 (arXiv:2412.19437), eq. 17-20. A packed row has several sequences; f and P are
    taken over the tokens of one.

    Args:
        segment_BL: number of each token's sequence in its row; 0 where there is no token.
        num_tasks: see `balance_sums`.
    """
    B, L = segment_BL.shape
    counted_GTS = plan.expert_GTS if plan.counted_GTS is None else plan.counted_GTS
    is_chosen_GTSE = jax.nn.one_hot(counted_GTS, plan.num_experts, dtype=jnp.float32)
    chosen_BLE = out_of_groups(jnp.sum(is_chosen_GTSE, axis=-2), B, L)
    prob_BLE, is_token_BL = out_of_groups(prob_GTE, B, L), segment_BL > 0
    count_BLE = _sums_of_own_sequence(chosen_BLE, segment_BL)
    share_BLE = count_BLE / jnp.maximum(jnp.sum(count_BLE, axis=-1, keepdims=True), 1)
    length_BL = _sums_of_own_sequence(jnp.ones((B, L), jnp.float32), segment_BL)
    weight_BLE = times_experts(share_BLE, num_tasks)
    term_BL = jnp.sum(weight_BLE * prob_BLE, axis=-1) / length_BL
    return jnp.sum(jnp.where(is_token_BL, term_BL, 0)), count_sequences(segment_BL)


def count_sequences(segment_BL):
    """The number of sequences in rows, float32."""
    tokens_BL = _sums_by_sequence(jnp.ones(segment_BL.shape, jnp.float32), segment_BL)
    return jnp.sum(tokens_BL[:, 1:] > 0, dtype=jnp.float32)


def _sums_of_own_sequence(x_BL, segment_BL):
    """Sums over each token's own sequence, `[B, L, ...]`, without an `[L, L]` mask."""
    sums_BS = _sums_by_sequence(x_BL, segment_BL)
    return jax.vmap(lambda sums_S, segment_L: sums_S[segment_L])(sums_BS, segment_BL)


def _sums_by_sequence(x_BL, segment_BL):
    """Sums by sequence number; a row has at most as many sequences as tokens."""
    num_segments = segment_BL.shape[1] + 1
    return jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, num_segments))(x_BL, segment_BL)
