# SPDX-License-Identifier: Apache-2.0
"""Groups, expert capacity, and each token's slot in its expert's queue.

Fedus et al. 2021 (arXiv:2101.03961), section 2.2, eq. 3. Dims: G T S E C
"""

import math

import jax
import jax.numpy as jnp


def expert_capacity(
    tokens_per_group: int,
    num_experts: int,
    *,
    capacity_factor: float,
    min_capacity: int,
    num_selected: int = 1,
    rounding: str = "up",
) -> int:
    """Slots of one expert for one group: choices / experts * factor, rounded; eq. 3.

    At least `min_capacity`, and never more than the group has tokens: nobody chooses an
    expert twice.

    Args:
        num_selected: choices a token has; GShard's capacity counts them, flaxformer's not.
        rounding: `up`, so that a factor of 1.0 gives perfectly balanced choices a slot
            each; `down` (Mesh-TensorFlow); `nearest`, halves to the even (flaxformer).
    """
    # The product is rounded first: 100 * 1.1 is 110.00000000000001 in binary.
    even_share = round(tokens_per_group * num_selected * capacity_factor / num_experts, 9)
    rounded = {"up": math.ceil, "down": math.floor, "nearest": round}[rounding](even_share)
    return min(tokens_per_group, max(min_capacity, rounded))


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


def layer_shape(
    switch, batch: int, length: int, *, is_training: bool = True
) -> tuple[int, int, int]:
    """(G, T, C) of `batch` rows of `length` tokens."""
    num_groups, tokens_per_group = layer_groups(switch, batch, length)
    capacity = layer_capacity(switch, tokens_per_group, is_training=is_training)
    return num_groups, tokens_per_group, capacity


def rows_per_expert(switch, batch: int, length: int, *, is_training: bool) -> int:
    """Slots of one expert for all groups of `batch` rows together: G * C."""
    num_groups, _, capacity = layer_shape(switch, batch, length, is_training=is_training)
    return num_groups * capacity


def layer_capacity(switch, tokens_per_group: int, *, is_training: bool) -> int:
    """`expert_capacity` with the factor that a `SwitchConfig` has for training or not.

    All tokens of the group where the router is dropless; `SwitchConfig.expert_capacity`
    where that is given.
    """
    if switch.router.overflow == "dropless":
        return tokens_per_group
    if switch.expert_capacity is not None:
        return min(tokens_per_group, switch.expert_capacity)
    factor = switch.capacity_factor if is_training else switch.eval_capacity_factor
    return expert_capacity(
        tokens_per_group,
        switch.num_experts,
        capacity_factor=factor,
        min_capacity=switch.min_capacity,
        num_selected=switch.router.num_selected,
        rounding=switch.capacity_rounding,
    )


def assign_slots(expert_GTS, num_experts: int):
    """Places every choice in its expert's queue: first choices first, then token order.

    Args:
        expert_GTS: chosen experts; `num_experts` for a choice that takes part in nothing.

    Returns:
        slot_GTS: places in the queues, from 0 (0 where a choice takes part in nothing).
        count_GE: length of each queue, before any capacity.
    """
    G, T, S = expert_GTS.shape
    # R: all choices of a group, every token's first choice before any second one.
    expert_GR = expert_GTS.transpose(0, 2, 1).reshape(G, S * T)
    is_expert_GRE = jax.nn.one_hot(expert_GR, num_experts, dtype=jnp.int32)
    queue_GRE = jnp.cumsum(is_expert_GRE, axis=1)
    slot_GR = jnp.sum(is_expert_GRE * (queue_GRE - 1), axis=-1)
    return slot_GR.reshape(G, S, T).transpose(0, 2, 1), queue_GRE[:, -1]
