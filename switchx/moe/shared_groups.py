# SPDX-License-Identifier: Apache-2.0
"""Groups of tokens that several devices share: slots counted across them, and their dispatch.

Capacity is a whole number of slots for every expert, so a group should have many tokens per
expert: 512 tokens a core over 2048 experts leave three slots of four empty. Fedus et al. 2021
(arXiv:2101.03961), section 2.2; Mesh-TensorFlow's groups end where a core's tokens do.

Slots travel in two steps. Along the shared axes rows travel, and no empty slots: each device
gathers the group's slots of its share of the experts (a ragged all-to-all). Between the groups
full slots travel, to the experts' own devices, as in `all_to_all.py`: an all-to-all among
devices of equal rank. Both steps carry what an even load fills, so nothing is padded.
Dims: G groups, T tokens of a group, S choices of a token, E experts, C slots of an expert, D
model, R rows, X and Y choices, Q slots; P devices that share a group, O groups that share
experts
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from switchx.moe.capacity import assign_slots
from switchx.moe.config import DISPATCHERS
from switchx.moe.dispatch import ExpertBank, gated_sum, gather_rows
from switchx.moe.dropless import sort_into_rows
from switchx.moe.routing_plan import RoutingPlan
from switchx.moe.sharded_dispatch import run_exchanged, token_spec
from switchx.partitioning.collectives import all_to_all, ragged_all_to_all
from switchx.partitioning.constrain import constrain, current_rules, num_devices, open_axes
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import MeshAxes


def shared_axes(dispatcher: str, num_groups: int) -> MeshAxes:
    """The axes of the mesh in use along which devices share groups; () for whole groups."""
    if not DISPATCHERS[dispatcher].shares_groups or num_devices() == 1:
        return ()
    return _placement().shared_by(num_groups) or ()


def keeps_groups(num_groups: int) -> bool:
    """Whether devices of the mesh in use have whole groups."""
    return num_devices() == 1 or _placement().shared_by(num_groups) == ()


def constrain_groups(x_GT, dims: str, shared: MeshAxes):
    """Splits `[G, T, ...]` over devices, by whole groups where none are shared."""
    if not shared:
        return constrain(x_GT, dims)
    mesh = jax.sharding.get_abstract_mesh()
    spec = token_spec(_placement().batch, shared)
    return jax.lax.with_sharding_constraint(x_GT, NamedSharding(mesh, spec))


def assign_shared_slots(expert_GTS, num_experts: int, shared: MeshAxes):
    """The slots that `assign_slots` gives, computed by each device for its own tokens.

    A queue belongs to the whole group: one all-gather of P S E numbers gives each device's
    choices of each expert, and a device continues the count of the devices before it.

    Args:
        expert_GTS: chosen experts, one group for each set of devices along `shared`.
    """
    if not shared:
        return assign_slots(expert_GTS, num_experts)
    tokens = token_spec(_placement().batch, shared)

    def body(expert_1TS):
        is_expert_TSE = jax.nn.one_hot(expert_1TS[0], num_experts, dtype=jnp.int32)
        count_SE = jnp.sum(is_expert_TSE, axis=0)
        count_PSE = jax.lax.all_gather(count_SE, shared)
        is_before_P = jnp.arange(count_PSE.shape[0]) < jax.lax.axis_index(shared)
        before_SE = jnp.sum(jnp.where(is_before_P[:, None, None], count_PSE, 0), axis=0)
        # The first choices of all devices come before any second one.
        total_SE = jnp.sum(count_PSE, axis=0)
        first_SE = jnp.cumsum(total_SE, axis=0) - total_SE + before_SE
        place_TSE = jnp.cumsum(is_expert_TSE, axis=0) - 1 + first_SE[None]
        slot_TS = jnp.sum(is_expert_TSE * place_TSE, axis=-1)
        return slot_TS[None]

    sharded = jax.shard_map(
        body, in_specs=tokens, out_specs=tokens, axis_names=open_axes(), check_vma=True
    )
    return sharded(expert_GTS)


def _placement() -> Placement:
    return Placement.on(jax.sharding.get_abstract_mesh(), current_rules())


@dataclasses.dataclass(frozen=True)
class SlotOwners:
    """Which device of a group keeps which of the group's slots, and where.

    Experts are split over (between groups, inside of a group). The device of rank p has those
    of every device of rank p in other groups too: O runs of E experts, Q = O E C slots.

    Attributes:
        num_groups, num_devices: O and P.
        experts: experts on one device, E.
        capacity: C.
    """

    num_groups: int
    num_devices: int
    experts: int
    capacity: int

    @property
    def slots(self) -> int:
        return self.num_groups * self.experts * self.capacity

    def device(self, position):
        """The rank of the device; P for a choice without a slot, whose position is O P E C."""
        rank = position // (self.experts * self.capacity) % self.num_devices
        return jnp.where(position < self.slots * self.num_devices, rank, self.num_devices)

    def place(self, position):
        """The place among the device's Q slots."""
        own = self.experts * self.capacity
        return position // (own * self.num_devices) * own + position % own


def run_shared(
    x_GTD,
    plan: RoutingPlan,
    experts: ExpertBank,
    placement: Placement,
    shared: MeshAxes,
    exchange_parts: int = 1,
):
    """Runs one device's tokens, which are of one group, through experts on any device.

    Args:
        shared: the last axes of the experts' axes; see `Placement.shared_by`.
        exchange_parts: number of parts in which the slots are sent between groups.
    """
    S = plan.expert_GTS.shape[-1]
    between = tuple(axis for axis in placement.experts if axis not in shared)
    num_groups, num_devices = placement.size(between), placement.size(shared)
    experts_here = plan.num_experts // (num_groups * num_devices)
    owners = SlotOwners(num_groups, num_devices, experts_here, plan.capacity)
    position_X = plan.position_GTS.reshape(-1)
    sent = sort_into_rows(owners.device(position_X), num_devices, rows=position_X.size)
    token_1R = (sent.choice_R // S)[None]
    row_1TS = sent.row_X.reshape(plan.expert_GTS.shape)
    x_1RD = gather_rows(x_GTD, token_1R, row_1TS)

    position_PX = jax.lax.all_gather(position_X, shared)
    size_PP, row_1Q, slot_1R = _arrivals(owners, position_PX, jax.lax.axis_index(shared))
    x_RD = ragged_all_to_all(x_1RD[0], size_PP, shared, owners.slots)
    x_1QD = gather_rows(x_RD[None], row_1Q, slot_1R[..., None])

    def exchange(x_OECD):
        return all_to_all(x_OECD, between) if between else x_OECD

    x_OECD = x_1QD.reshape(num_groups, owners.experts, owners.capacity, -1)
    parts = exchange_parts if between else 1
    y_1QD = run_exchanged(x_OECD, experts, exchange, parts).reshape(x_1QD.shape)
    y_1RD = gather_rows(y_1QD, slot_1R, row_1Q[..., None])
    y_RD = ragged_all_to_all(y_1RD[0], size_PP.T, shared, position_X.size)
    return gated_sum(y_RD[None], token_1R, row_1TS, plan.gate_GTS)


def _arrivals(owners: SlotOwners, position_PX, here):
    """Who sends how many rows to whom, and where the rows that come here belong.

    Rows arrive by source, those of one source in the order of their choices.

    Returns:
        size_PP: rows from device (first index) to device (second).
        row_1Q: the arriving row of each slot; Q in an empty one.
        slot_1R: the slot of each arriving row; Q past the last row. R is Q.
    """
    device_PX, Q = owners.device(position_PX), owners.slots
    rank_P = jnp.arange(owners.num_devices)
    size_PP = jnp.sum(device_PX[:, :, None] == rank_P[None, None], axis=1, dtype=jnp.int32)
    is_here_Y = (device_PX == here).reshape(-1)
    row_Y = jnp.where(is_here_Y, jnp.cumsum(is_here_Y, dtype=jnp.int32) - 1, Q)
    slot_Y = jnp.where(is_here_Y, owners.place(position_PX.reshape(-1)), Q)
    empty_Q = jnp.full_like(slot_Y, Q, shape=(Q,))

    def invert(index_Y, value_Y):
        return empty_Q.at[index_Y].set(value_Y, mode="drop", unique_indices=True)[None]

    return size_PP, invert(slot_Y, row_Y), invert(row_Y, slot_Y)
