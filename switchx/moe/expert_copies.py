# SPDX-License-Identifier: Apache-2.0
"""Copies of busy experts, so that devices have equal work.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 4.1, where heavily loaded experts get
further devices; DeepSeek-V3 (arXiv:2412.19437), section 3.4, for redundant experts. A bank of R
slots is gathered from the E experts by a table that says whose copy each slot is. The table is
data: a new one needs no new program. Where the gather is differentiated, the gradients of an
expert's copies are added up. `copy_placement.py` makes the tables.
Dims: G groups, T tokens of a group, S choices of a token, Q slots of a group's queues,
E experts, R slots for experts, D model, F ffn, N layers, P devices that the experts are split
over, X any
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.sorted_rows import stable_argsort
from switchx import tree
from switchx.moe.copy_placement import slots_refusal
from switchx.moe.dispatch import (
    Dispatcher,
    ExpertBank,
    gather_from_slots,
    gather_into_slots,
    token_of_slot,
)
from switchx.moe.routing_plan import RoutingPlan, count_choices
from switchx.moe.sharded_dispatch import expert_specs, run_on_devices
from switchx.partitioning.collectives import ragged_all_to_all, vary
from switchx.partitioning.constrain import current_rules, num_devices, open_axes
from switchx.partitioning.placement import Placement


def with_copies(dispatch: Dispatcher, expert_of_slot_R) -> Dispatcher:
    """A dispatcher that runs R slots in place of E experts, with the same numbers.

    The choices that got a slot in an expert's queue go to its copies in turn, so copies of
    one expert differ by at most one choice of a group.

    Args:
        dispatch: any dispatcher.
        expert_of_slot_R: int32, each expert once or more; R divides over the experts' devices.
    """

    def run(x_GTD, plan: RoutingPlan, experts: ExpertBank):
        slots = gather_bank(experts, expert_of_slot_R, plan.num_experts)
        return dispatch(x_GTD, plan_over_slots(plan, expert_of_slot_R), slots)

    return run


def local_slots(expert_of_slot_R) -> Dispatcher:
    """A dispatcher that runs every device's tokens on its own slots: no token travels.

    For routers by task: rows are in the order of their tasks, and a device has the experts of
    its rows' tasks (`copy_placement.place_tasks`).

    Args:
        expert_of_slot_R: int32, each expert once or more; a device's slots have all experts
            that its tokens may choose.
    """

    def run(x_GTD, plan: RoutingPlan, experts: ExpertBank):
        slots = gather_bank(experts, expert_of_slot_R, plan.num_experts)
        return run_on_devices(local, x_GTD, plan, slots)

    def local(x_GTD, plan: RoutingPlan, slots: ExpertBank, placement: Placement):
        count = len(expert_of_slot_R) // placement.size(placement.experts)
        begin = jax.lax.axis_index(placement.experts) * count if placement.experts else 0
        own_R = jax.lax.dynamic_slice_in_dim(expert_of_slot_R, begin, count)
        # A slot of each expert that this device has; `count`, past the last, for all others.
        slot_E = jnp.full(plan.num_experts + 1, count).at[own_R].set(jnp.arange(count))
        own = dataclasses.replace(
            plan,
            expert_GTS=slot_E[plan.expert_GTS].astype(jnp.int32),
            num_experts=count,
            counted_GTS=None,
        )
        token_GQ = token_of_slot(own)
        y_ERD = slots(gather_into_slots(x_GTD, own, token_GQ))
        return gather_from_slots(y_ERD, own, token_GQ)

    return run


def plan_over_slots(plan: RoutingPlan, expert_of_slot_R) -> RoutingPlan:
    """The plan with slots in place of experts; choices, gates and drops stay the same."""
    E, R = plan.num_experts, len(expert_of_slot_R)
    copies_E = jnp.sum(expert_of_slot_R[:, None] == jnp.arange(E)[None], axis=0)
    first_E = jnp.cumsum(copies_E) - copies_E
    slot_R = stable_argsort(expert_of_slot_R)  # by expert, in their order within one
    expert_GTS = jnp.minimum(plan.expert_GTS, E - 1)
    copies_GTS = copies_E[expert_GTS]
    chosen_GTS = slot_R[first_E[expert_GTS] + plan.slot_GTS % copies_GTS]
    expert_GTS = jnp.where(plan.is_routed_GTS, chosen_GTS, R).astype(jnp.int32)
    queue_GTS = jnp.where(plan.is_dropped_GTS, plan.capacity, plan.slot_GTS // copies_GTS)
    return dataclasses.replace(
        plan,
        expert_GTS=expert_GTS,
        slot_GTS=queue_GTS.astype(jnp.int32),
        count_GE=count_choices(expert_GTS, R),
        num_experts=R,
        counted_GTS=None,
    )


def gather_bank(experts: ExpertBank, expert_of_slot_R, num_experts: int) -> ExpertBank:
    """The bank of R slots, each with the weights of its expert.

    On a mesh that splits the experts, weights travel to their slots' devices in one ragged
    all-to-all per array, and their gradients back: a device receives its R / P slots.

    Raises:
        ValueError: R does not divide over the devices of the experts.
    """
    mesh, rules = jax.sharding.get_abstract_mesh(), current_rules()
    axes = Placement.on(mesh, rules).experts if num_devices() > 1 else ()
    if not axes:
        return tree.map_named(
            lambda name, leaf: leaf[expert_of_slot_R] if _has_experts(leaf) else leaf, experts
        )
    devices = Placement.on(mesh, rules).size(axes)
    if reason := slots_refusal(num_experts, len(expert_of_slot_R) - num_experts, devices):
        raise ValueError(reason)
    weights, structure = jax.tree.flatten(experts)
    specs = structure.flatten_up_to(expert_specs(rules, mesh, experts))
    moved = [i for i, leaf in enumerate(weights) if _has_experts(leaf)]

    def body(expert_of_slot_R, *weights):
        return tuple(_to_slots(leaf, expert_of_slot_R, axes) for leaf in weights)

    given = tuple(specs[i] for i in moved)
    gathered = jax.shard_map(
        body,
        in_specs=(PartitionSpec(), *given),
        out_specs=given,
        axis_names=open_axes(),
        check_vma=True,
    )(expert_of_slot_R, *(weights[i] for i in moved))
    for i, leaf in zip(moved, gathered, strict=True):
        weights[i] = leaf
    return structure.unflatten(weights)


def _has_experts(leaf) -> bool:
    return not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_slots(w_EX, expert_of_slot_R, axes):
    """Sends one device's experts to all devices' slots, `[E / P, ...]` -> `[R / P, ...]`."""
    devices, here = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    E, R = len(w_EX), len(expert_of_slot_R)
    slots = R // devices
    source_R = expert_of_slot_R // E
    target_R = jnp.arange(R) // slots
    sizes_PP = jnp.zeros((devices, devices), jnp.int32).at[source_R, target_R].add(1)
    # Every expert has a slot, so at least E (P - 1) slots are of others' experts.
    sent = R - E * (devices - 1)
    slot_R = stable_argsort(vary((source_R != here).astype(jnp.int32), axes))[:sent]
    is_sent_R = source_R[slot_R] == here
    expert_R = jnp.where(is_sent_R, expert_of_slot_R[slot_R] - here * E, E)
    w_RX = w_EX.reshape(E, -1).at[expert_R].get(mode="fill", fill_value=0)
    w_RX = ragged_all_to_all(w_RX, sizes_PP, axes, slots)
    # The rows that arrive are sorted by source; the slots are not.
    own_R = jax.lax.dynamic_slice_in_dim(vary(source_R, axes), here * slots, slots)
    place_R = stable_argsort(stable_argsort(own_R))
    return w_RX[place_R].reshape(slots, *w_EX.shape[1:])
