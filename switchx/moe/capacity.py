# SPDX-License-Identifier: Apache-2.0
"""Groups of tokens, an expert's slots, each token's slot, and rerouting where none is left.

Fedus et al. 2021 (arXiv:2101.03961), section 2.2, eq. 3: capacity and slots are those of one
group; appendix B, Figure 11: No-Token-Left-Behind.
Dims: B batch, L length, G groups, T tokens of a group, S choices of a token, E experts, C
slots of an expert (capacity), R choices of a group
"""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from switchx.moe.dispatcher_traits import DISPATCHERS


def slot_notes(switch) -> tuple[str, ...]:
    """Notes if dispatcher and overflow do not suit each other; else ().

    The dispatcher says how slots are computed, the router whether a token may have none: with
    `dispatcher="dropless"` full experts may drop tokens, and with `overflow="dropless"` a
    dispatcher with equal blocks computes empty slots.

    Args:
        switch: a `SwitchConfig`; None in a dense model.
    """
    if switch is None or switch.router.has_choosing_experts or switch.has_attention:
        return ()
    router = switch.router
    dispatcher = f"SwitchConfig.dispatcher={switch.dispatcher!r}"
    E, S = switch.num_experts, router.num_selected
    if router.overflow == "dropless":
        if E == S or not DISPATCHERS[switch.dispatcher].has_equal_blocks:
            return ()
        return (
            f"{dispatcher} with RouterConfig.overflow='dropless': each of {E} experts has a "
            f"slot for every token, which chooses {S}, so experts compute {E / S:g} times the "
            "rows that are chosen; dispatcher='dropless' computes those alone, and on a mesh "
            "that splits experts 'ragged_all_to_all' or 'sliced'",
        )
    name = "capacity_factor" if switch.expert_capacity is None else "expert_capacity"
    # If it is large enough, an expert has a slot for each token of the group.
    is_enough = switch.capacity_factor * S >= switch.num_candidates
    if switch.dispatcher != "dropless" or (name == "capacity_factor" and is_enough):
        return ()
    return (
        f"{dispatcher} with SwitchConfig.{name}={getattr(switch, name)} "
        f"and RouterConfig.overflow={router.overflow!r}: an expert that is full takes no more "
        "tokens in training; for a model that drops none use RouterConfig.overflow='dropless'",
    )


def group_shape(num_tokens: int, group_size: int) -> tuple[int, int]:
    """(G, T): as few groups as `group_size` allows, as even as they can be.

    G * T may exceed `num_tokens`; the rest is padding at the end of the last group. The
    shape depends on the batch and the group size alone, so routing is the same on every
    mesh (flaxformer's groups follow the device count, and so do its drops).
    """
    num_groups = math.ceil(num_tokens / group_size)
    return num_groups, math.ceil(num_tokens / num_groups)


def layer_groups(switch, batch: int, length: int) -> tuple[int, int]:
    """(G, T) of `batch` rows of `length` tokens: each row a group where capacity is a row's."""
    if switch.expert_capacity is not None:
        return batch, length
    return group_shape(batch * length, switch.group_size)


def rows_of_groups(switch, batch: int, lengths: Iterable[int], parts: int) -> int | None:
    """Rows that stay together when a batch is cut into parts, so that its groups stay whole.

    Args:
        batch: rows of the whole batch.
        lengths: tokens of a row, in each stack that has Switch layers.
        parts: microbatches of the batch.

    Returns:
        The number of rows; None if a part has other groups than the whole batch, and thus
        another capacity and balance loss: a group is not a whole number of rows, or does not
        fit a part.
    """
    rows = 1
    for L in lengths:
        G, T = layer_groups(switch, batch, L)
        part_G, part_T = layer_groups(switch, batch // parts, L)
        is_kept = (part_G * parts, part_T) == (G, T) and 0 < G * T == batch * L
        if not is_kept or max(T, L) % min(T, L):
            return None
        rows = math.lcm(rows, max(1, T // L))
    return None if batch % (parts * rows) else rows


def into_groups(x, num_groups: int, group_size: int):
    """`[B, L, ...]` -> `[G, T, ...]`, in order, zero-padded at the end of the last group."""
    x = x.reshape(-1, *x.shape[2:])
    padding = num_groups * group_size - x.shape[0]
    x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(num_groups, group_size, *x.shape[1:])


def out_of_groups(x, batch: int, length: int):
    """`[G, T, ...]` -> `[B, L, ...]`, without the padding."""
    return x.reshape(-1, *x.shape[2:])[: batch * length].reshape(batch, length, *x.shape[2:])


def layer_capacity(switch, tokens_per_group: int, *, is_training: bool) -> int:
    """Slots of one expert for one group: choices / experts * factor, rounded; eq. 3.

    The experts are those that a token can choose from: a whole group may be of one task.

    GShard's capacity counts all choices of a token, flaxformer's does not; ours does. It is at
    least `min_capacity`, and at most the group's tokens: no token chooses an expert twice. It
    is all of them if the router is dropless, and `expert_capacity` if that is given.

    Args:
        switch: a `SwitchConfig`, with one factor for training and one for everything else.
    """
    if switch.router.overflow == "dropless":
        return tokens_per_group
    if switch.expert_capacity is not None:
        return min(tokens_per_group, switch.expert_capacity)
    factor = switch.capacity_factor if is_training else switch.eval_capacity_factor
    choices = tokens_per_group * switch.router.num_selected
    # There are never more slots than tokens, so a larger factor would not matter.
    factor = min(factor, switch.num_candidates)
    # The product is rounded first: 100 * 1.1 is 110.00000000000001 in binary.
    even_share = round(choices * factor / switch.num_candidates, 9)
    round_to = {"up": math.ceil, "down": math.floor, "nearest": round}[switch.capacity_rounding]
    return min(tokens_per_group, max(switch.min_capacity, round_to(even_share)))


def layer_shape(
    switch, batch: int, length: int, *, is_training: bool = True
) -> tuple[int, int, int]:
    """(G, T, C) of `batch` rows of `length` tokens."""
    num_groups, tokens_per_group = layer_groups(switch, batch, length)
    capacity = layer_capacity(switch, tokens_per_group, is_training=is_training)
    return num_groups, tokens_per_group, capacity


def assign_slots(expert_GTS, num_experts: int):
    """Places every choice in its expert's queue: first choices first, then token order.

    Args:
        expert_GTS: chosen experts; `num_experts` for a choice that takes part in nothing.

    Returns:
        slot_GTS: places in the queues, from 0 (0 where a choice takes part in nothing).
    """
    G, T, S = expert_GTS.shape
    # R: all choices of a group, every token's first choice before any second one.
    expert_GR = expert_GTS.transpose(0, 2, 1).reshape(G, S * T)
    is_expert_GRE = jax.nn.one_hot(expert_GR, num_experts, dtype=jnp.int32)
    queue_GRE = jnp.cumsum(is_expert_GRE, axis=1)
    slot_GR = jnp.sum(is_expert_GRE * (queue_GRE - 1), axis=-1)
    return slot_GR.reshape(G, S, T).transpose(0, 2, 1)


def reroute(ranked_GTS, num_experts: int, capacity: int):
    """Places every token once, in the first of its ranked experts that has a slot left.

    The rule is Mesh-TensorFlow's: round by round, the tokens without a slot ask for their next
    best expert and get what the earlier rounds left, in token order.

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
        # Tokens after the last slot are refused, and take none from a later round.
        place_GTE = jnp.cumsum(asked_GTE, axis=1) - 1 + used_GE[:, None]
        place_GT = jnp.sum(asked_GTE * place_GTE, axis=-1)
        is_placed_GT = asks_GT & (place_GT < capacity)
        used_GE = jnp.minimum(used_GE + jnp.sum(asked_GTE, axis=1), capacity)
        expert_GT = jnp.where(is_placed_GT, ranked_GT, expert_GT)
        return (expert_GT, jnp.where(is_placed_GT, place_GT, slot_GT), used_GE), None

    start = (
        first_GT,
        # `capacity` is no slot; a token that takes part in nothing keeps it.
        jnp.full_like(first_GT, capacity),
        # Computed from the choices, so that inside of shard_map it varies as they do.
        jnp.zeros_like(first_GT, shape=(first_GT.shape[0], num_experts)) + 0 * first_GT[:, :1],
    )
    (expert_GT, slot_GT, _), _ = jax.lax.scan(round_of, start, jnp.moveaxis(ranked_GTS, -1, 0))
    return expert_GT, jnp.where(first_GT < num_experts, slot_GT, 0)
