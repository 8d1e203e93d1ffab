# SPDX-License-Identifier: Apache-2.0
"""No-Token-Left-Behind: a token whose expert is full goes to its next one.

Fedus et al. 2021 (arXiv:2101.03961), appendix B, Figure 11. The rule is Mesh-TensorFlow's:
round by round, the tokens without a slot ask for their next best expert and get what the
earlier rounds left, in token order. Dims: G T S E C
"""

import jax
import jax.numpy as jnp


def reroute(ranked_GTS, num_experts: int, capacity: int):
    """Places every token once, in the first of its ranked experts that has a slot left.

    Args:
        ranked_GTS: each token's experts, best first, one for each round; `num_experts`
            for a token that takes part in nothing.

    Returns:
        expert_GT, slot_GT: the expert reached and the place in it; a token that found no
        slot in any round has its first expert and slot `capacity`, which is dropped.
    """
    first_GT = ranked_GTS[..., 0]

    def round_of(carry, ranked_GT):
        expert_GT, slot_GT, used_GE = carry
        asks_GT = (slot_GT == capacity) & (ranked_GT < num_experts)
        asked_GTE = jax.nn.one_hot(
            jnp.where(asks_GT, ranked_GT, num_experts), num_experts, dtype=jnp.int32
        )
        # Those who come after the last slot are refused, so they take none from a later one.
        place_GTE = jnp.cumsum(asked_GTE, axis=1) - 1 + used_GE[:, None]
        place_GT = jnp.sum(asked_GTE * place_GTE, axis=-1)
        is_placed_GT = asks_GT & (place_GT < capacity)
        used_GE = jnp.minimum(used_GE + jnp.sum(asked_GTE, axis=1), capacity)
        expert_GT = jnp.where(is_placed_GT, ranked_GT, expert_GT)
        return (expert_GT, jnp.where(is_placed_GT, place_GT, slot_GT), used_GE), None

    start = (
        first_GT,
        # Nobody has a slot yet; those who take part in nothing never will.
        jnp.full_like(first_GT, capacity),
        # Of the choices' own making, so that inside shard_map it varies as they do.
        jnp.zeros_like(first_GT, shape=(first_GT.shape[0], num_experts)) + 0 * first_GT[:, :1],
    )
    (expert_GT, slot_GT, _), _ = jax.lax.scan(round_of, start, jnp.moveaxis(ranked_GTS, -1, 0))
    return expert_GT, jnp.where(first_GT < num_experts, slot_GT, 0)
