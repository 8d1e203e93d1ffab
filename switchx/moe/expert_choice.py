# SPDX-License-Identifier: Apache-2.0
"""Expert choice: each expert takes the tokens that it is most probable for.

Zhou et al. 2022 (arXiv:2202.09368), section 3.2. Every expert is full, so the load is even by
construction; a token may have any number of experts, and whether it has one depends on all
tokens of its group, later ones among them: no router for a decoder. Dims: G T S E C
"""

import jax
import jax.numpy as jnp

from switchx.moe.plan import RoutingPlan


def route_by_experts(prob_GTE, is_token_GT, capacity: int) -> RoutingPlan:
    """Each expert's `capacity` tokens of the highest probability, gated by it.

    The plan has a choice for every expert: choice s of a token is expert s where that took
    the token. A token that none took asks for its most probable expert and is dropped, so
    that the plan and the metrics know of it.

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
    slot_GTE = jnp.swapaxes(slot_GET, 1, 2)
    is_taken_GTE = slot_GTE < capacity

    is_best_GTE = jax.nn.one_hot(jnp.argmax(score_GTE, axis=-1), E, dtype=jnp.bool_)
    is_left_GT = is_token_GT & ~jnp.any(is_taken_GTE, axis=-1)
    asks_in_vain_GTE = is_left_GT[..., None] & is_best_GTE
    index_GTE = jax.lax.broadcasted_iota(jnp.int32, (G, T, E), 2)
    expert_GTE = jnp.where(is_taken_GTE | asks_in_vain_GTE, index_GTE, E)
    return RoutingPlan(
        expert_GTS=expert_GTE,
        gate_GTS=jnp.where(is_taken_GTE, prob_GTE, 0.0),
        slot_GTS=jnp.where(expert_GTE < E, slot_GTE, 0),
        count_GE=jnp.sum(is_taken_GTE, axis=1, dtype=jnp.int32),
        num_experts=E,
        capacity=capacity,
    )
