# SPDX-License-Identifier: Apache-2.0
"""The routing plan: what a router decided, in the one form that every dispatcher reads.

Dims: G groups, T tokens of a group, S choices of a token, E experts, C slots of an expert
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingPlan:
    """Which expert each token goes to, with what weight, and into which slot.

    Attributes:
        expert_GTS: int32 chosen experts; `num_experts` where nothing is routed (padding).
        gate_GTS: float32 weight of each expert's output, with the router's gradient.
        slot_GTS: int32 place in the expert's queue; a place of `capacity` or more is dropped.
        count_GE: int32 tokens that asked for each expert, before capacity.
        num_experts, capacity: E and C.
        balance_GE: int32 choices that the balance loss counts, where they are others than
            those of `count_GE`; None where they are the same.
    """

    expert_GTS: jax.Array
    gate_GTS: jax.Array
    slot_GTS: jax.Array
    count_GE: jax.Array
    num_experts: int = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    balance_GE: jax.Array | None = None

    @property
    def counted_GE(self):
        """The choices that the balance loss counts."""
        return self.count_GE if self.balance_GE is None else self.balance_GE

    @property
    def is_routed_GTS(self):
        """Whether a choice asks for an expert at all."""
        return self.expert_GTS < self.num_experts

    @property
    def is_kept_GTS(self):
        """Whether a choice got a slot."""
        return self.is_routed_GTS & (self.slot_GTS < self.capacity)

    @property
    def position_GTS(self):
        """Place in the G buffers of E * C slots; E * C where a choice has none."""
        position_GTS = self.expert_GTS * self.capacity + self.slot_GTS
        return jnp.where(self.is_kept_GTS, position_GTS, self.num_experts * self.capacity)
