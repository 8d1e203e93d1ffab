# SPDX-License-Identifier: Apache-2.0
"""Groups of tokens that several devices share: where they lie, and slots counted across them.

Capacity is a whole number of slots of every expert, so a group should have many tokens an
expert: 512 tokens a core over 2048 experts leave three slots of four empty. Fedus et al. 2021
(arXiv:2101.03961), section 2.2; Mesh-TensorFlow's groups end where a core's tokens do.
Dims: G T S E; P devices that share a group
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from switchx.moe.capacity import assign_slots
from switchx.moe.expert_parallel import token_spec
from switchx.partitioning.constrain import current_rules, num_devices, open_axes
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import MeshAxes

# The dispatchers that can carry tokens of a group that is on several devices.
SHARING = ("all_to_all",)


def shared_axes(dispatcher: str, num_groups: int) -> MeshAxes:
    """The axes of the mesh in use along which devices share groups; () for whole groups."""
    if dispatcher not in SHARING or num_devices() == 1:
        return ()
    return _placement().shared_by(num_groups) or ()


def constrain_shared(x_GT, shared: MeshAxes):
    """Splits `[G, T, ...]` over the devices that share the groups."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = token_spec(_placement().batch, shared)
    return jax.lax.with_sharding_constraint(x_GT, NamedSharding(mesh, spec))


def assign_shared_slots(expert_GTS, num_experts: int, shared: MeshAxes):
    """What `assign_slots` gives, by each device for its own tokens.

    A queue is that of the whole group: devices tell each other how many of their choices name
    each expert, one all-gather of P S E numbers, and count on from those before.

    Args:
        expert_GTS: one group to each set of devices along `shared`.

    Returns:
        slot_GTS, count_GE: see `assign_slots`.
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
        # Everybody's first choices stand before any second one.
        total_SE = jnp.sum(count_PSE, axis=0)
        first_SE = jnp.cumsum(total_SE, axis=0) - total_SE + before_SE
        place_TSE = jnp.cumsum(is_expert_TSE, axis=0) - 1 + first_SE[None]
        slot_TS = jnp.sum(is_expert_TSE * place_TSE, axis=-1)
        count_E = jax.lax.psum(jnp.sum(count_SE, axis=0), shared)
        return slot_TS[None], count_E[None]

    sharded = jax.shard_map(
        body,
        in_specs=tokens,
        out_specs=(tokens, PartitionSpec(tokens[0])),
        axis_names=open_axes(),
        check_vma=True,
    )
    return sharded(expert_GTS)


def _placement() -> Placement:
    return Placement.on(jax.sharding.get_abstract_mesh(), current_rules())
