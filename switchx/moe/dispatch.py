# SPDX-License-Identifier: Apache-2.0
"""Dispatchers: the protocol, and the two that the compiler splits over a mesh.

`gather_dispatch` is the default. With up to 4 choices per token, its forward and backward
passes consist of gathers only: each slot knows its token and each token its slots.
`einsum_dispatch` is the readable oracle of all dispatchers: one-hot tensors, as in
Mesh-TensorFlow (Fedus et al. 2021, arXiv:2101.03961, appendix F).
Dims: G groups, T tokens of a group, S choices of a token, E experts, C slots of an expert, D
model, R rows, Q places for rows
"""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from switchx.layers.dropout import cheap_again
from switchx.moe.routing_plan import RoutingPlan
from switchx.partitioning.constrain import constrain, current_rules, num_devices, whole
from switchx.partitioning.placement import Placement

# Up to this many choices per token are gathered one by one; more are added up by a scatter.
MOST_GATHERED = 4


class ExpertBank(Protocol):
    """E experts of one kind, as a pytree whose leaves' names end in their dimensions.

    A Switch layer's bank is `switchx.moe.experts.ExpertFFN`.
    """

    def __call__(self, x_ERD: jax.Array) -> jax.Array:
        """Runs every expert on its own block of R rows."""

    def run_rows(
        self, x_RD: jax.Array, count_E: jax.Array, gate_R: jax.Array | None = None
    ) -> jax.Array:
        """The output of each row's expert, times the row's gate, applied in the last product.

        Rows are sorted by expert. Rows past the last expert's are not read and give zeros.
        """

    def on_device(self, index: jax.Array, is_first_part: jax.Array) -> "ExpertBank":
        """The experts of one device of a mesh.

        Args:
            index: the device's number, which gives it random numbers of its own.
            is_first_part: whether this device adds terms that are added once, such as biases;
                of the devices with parts of the same experts, one does.
        """


class Dispatcher(Protocol):
    """Runs each token through its experts and returns the gated sum of their outputs.

    Every dispatcher reads the same plan and returns the same numbers; a dropped token gets
    zero, which leaves it to the residual connection (section 2.2).
    """

    def __call__(
        self, x_GTD: jax.Array, plan: RoutingPlan, experts: ExpertBank
    ) -> jax.Array: ...


def gather_dispatch(x_GTD, plan: RoutingPlan, experts: ExpertBank):
    """Gathers tokens into `[E, G * C, D]`, runs the experts, gathers back and gates."""
    token_GQ = token_of_slot(plan)
    x_ERD = constrain(gather_into_slots(x_GTD, plan, token_GQ), "ERD", uneven="R")
    y_ERD = constrain(experts(x_ERD), "ERD", uneven="R")
    return gather_from_slots(y_ERD, plan, token_GQ)


def einsum_dispatch(x_GTD, plan: RoutingPlan, experts):
    """Dispatches and combines with two einsums over one-hot tensors."""
    G, T, D = x_GTD.shape
    E, C = plan.num_experts, plan.capacity
    dispatch_GTSEC = dispatch_tensor(plan, x_GTD.dtype)
    # Multiplying by zero would not remove the experts' outputs for empty slots if they are NaN.
    is_used_EGC1 = jnp.einsum("GTSEC->EGC", dispatch_GTSEC)[..., None] > 0
    x_EGCD = jnp.einsum("GTSEC,GTD->EGCD", dispatch_GTSEC, x_GTD)
    x_EGCD = jnp.where(is_used_EGC1, x_EGCD, 0)
    y_ERD = experts(constrain(x_EGCD.reshape(E, G * C, D), "ERD", uneven="R"))
    y_EGCD = constrain(y_ERD, "ERD", uneven="R").reshape(E, G, C, -1)
    y_EGCD = jnp.where(is_used_EGC1, y_EGCD, 0)
    combine_GTEC = jnp.einsum(
        "GTSEC,GTS->GTEC", dispatch_GTSEC, plan.gate_GTS.astype(x_GTD.dtype)
    )
    return jnp.einsum("GTEC,EGCD->GTD", combine_GTEC, y_EGCD)


def dispatch_tensor(plan: RoutingPlan, dtype):
    """1 where a choice of token T got slot C of expert E, `[G, T, S, E, C]`."""
    is_expert_GTSE = jax.nn.one_hot(plan.expert_GTS, plan.num_experts, dtype=dtype)
    is_slot_GTSC = jax.nn.one_hot(plan.slot_GTS, plan.capacity, dtype=dtype)
    return jnp.einsum("GTSE,GTSC->GTSEC", is_expert_GTSE, is_slot_GTSC)


def token_of_slot(plan: RoutingPlan):
    """The token in each slot, `[G, E * C]`; T in an empty one."""
    G, T, S = plan.expert_GTS.shape
    num_slots = plan.num_experts * plan.capacity
    token_TS = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[:, None], (T, S))
    empty = jnp.full((num_slots,), T, jnp.int32)
    return jax.vmap(
        lambda position_TS: empty.at[position_TS].set(
            token_TS, mode="drop", unique_indices=True
        )
    )(plan.position_GTS)


def gather_into_slots(x_GTD, plan: RoutingPlan, token_GQ):
    """The token of each expert's slots, `[E, G * C, D]`, zeros in empty ones."""
    G, T, D = x_GTD.shape
    E, C = plan.num_experts, plan.capacity
    x_GQD = _by_groups(gather_rows(x_GTD, token_GQ, plan.position_GTS))
    return x_GQD.reshape(G, E, C, D).transpose(1, 0, 2, 3).reshape(E, G * C, D)


def gather_from_slots(y_ERD, plan: RoutingPlan, token_GQ):
    """The gated sum of what experts returned for a token's slots, `[G, T, D]`."""
    G = plan.expert_GTS.shape[0]
    E, C, D = plan.num_experts, plan.capacity, y_ERD.shape[-1]
    y_GQD = y_ERD.reshape(E, G, C, D).transpose(1, 0, 2, 3).reshape(G, E * C, D)
    return gated_sum(_by_groups(y_GQD), token_GQ, plan.position_GTS, plan.gate_GTS)


def _by_groups(x_GQD):
    """Splits slots like the groups of their tokens, if these divide over the devices.

    Gathers are then local, forward and backward, and slots travel to their experts and back.
    Left to itself, XLA gathers from slots that are split; beside a manual axis it aborts there,
    so if groups do not divide, every device has all slots.
    """
    if num_devices() == 1:
        return x_GQD
    mesh = jax.sharding.get_abstract_mesh()
    if Placement.on(mesh, current_rules()).shared_by(len(x_GQD)) == ():
        return constrain(x_GQD, "GQD")
    return whole(x_GQD) if mesh.manual_axes else x_GQD


def gated_sum(y_GQD, token_GQ, place_GTS, gate_GTS=None):
    """Sum over a token's choices of gate times the row in the choice's place.

    Args:
        y_GQD: rows in Q places.
        token_GQ: the token of each place; T where there is none.
        place_GTS: the place of each choice, past the end for none; a place has one at most.
        gate_GTS: weights of the choices; None if the rows are already multiplied by them.
    """
    T, S = place_GTS.shape[1:]
    if S > MOST_GATHERED:
        if gate_GTS is not None:
            y_GQD = gated(y_GQD, _gate_of_place(gate_GTS, place_GTS, y_GQD))
        return _add_rows(y_GQD, token_GQ, T)
    rows = []
    for s in range(S):
        index_GQ = token_GQ
        if S > 1:
            # A place holds one choice: for choice s, all other places point past the end.
            token_of_choice_GQ = jnp.minimum(token_GQ, T - 1)
            is_choice_GQ = (
                jnp.take_along_axis(place_GTS[..., s], token_of_choice_GQ, axis=1)
                == jnp.arange(token_GQ.shape[1])[None]
            )
            index_GQ = jnp.where(is_choice_GQ, token_GQ, T)
        row_GTD = gather_rows(y_GQD, place_GTS[..., s], index_GQ[..., None])
        if gate_GTS is not None:
            row_GTD = gated(row_GTD, gate_GTS[..., s])
        rows.append(row_GTD)
    return functools.reduce(jnp.add, rows)


@cheap_again
def gated(y_RD, gate_R):
    """Rows times their gates, in float32, rounded once; so is the sum of a gate's gradient.

    Moving it into the last product's epilogue would save 5% of a layer of 64 experts on a v5e,
    by the compiler's estimate, but gates would need an exchange of their own on a mesh, and
    gradients would get slower on a v5p.
    """
    wide = jnp.promote_types(y_RD.dtype, jnp.float32)
    return (y_RD.astype(wide) * gate_R[..., None]).astype(y_RD.dtype)


def _gate_of_place(gate_GTS, place_GTS, y_GQD):
    """The gate of the choice in each place, `[G, Q]`, zero where there is none."""

    def set_gates(place_TS, gate_TS, y_QD):
        zeros_Q = jax.lax.full_like(gate_TS, 0, shape=y_QD.shape[:1])
        return zeros_Q.at[place_TS].set(gate_TS, mode="drop", unique_indices=True)

    return jax.vmap(set_gates)(place_GTS, gate_GTS, y_GQD)


@jax.custom_vjp
def gather_rows(x_GRD, index_GQ, inverse_GRS):
    """Row `index` of each group; zeros where the index is past the end.

    Args:
        x_GRD: rows.
        index_GQ: number of the row for each of Q places.
        inverse_GRS: the places each row goes to (past the end for none); must be the
            inverse of `index_GQ`. The gradient of row r is the sum of its places' gradients.
    """
    del inverse_GRS
    return _take(x_GRD, index_GQ)


def _gather_rows_forward(x_GRD, index_GQ, inverse_GRS):
    return _take(x_GRD, index_GQ), (index_GQ, inverse_GRS)


def _gather_rows_backward(residuals, dy_GQD):
    index_GQ, inverse_GRS = residuals
    S = inverse_GRS.shape[-1]
    if S <= MOST_GATHERED:
        # One gather per choice: summing a [G, R, S, D] buffer would cost a pass for S = 1.
        dx_GRD = sum(_take(dy_GQD, inverse_GRS[..., s]) for s in range(S))
    else:
        dx_GRD = _add_rows(dy_GQD, index_GQ, inverse_GRS.shape[1])
    return dx_GRD, *(np.zeros(index.shape, jax.dtypes.float0) for index in residuals)


gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


def _take(x_GRD, index_GQ):
    return jax.vmap(lambda x_RD, index_Q: x_RD.at[index_Q].get(mode="fill", fill_value=0))(
        x_GRD, index_GQ
    )


def _add_rows(y_GQD, index_GQ, num_rows: int):
    """Adds each place to row `index` of its group; an index past the end adds nothing."""

    def add(y_QD, index_Q):
        zeros_RD = jax.lax.full_like(y_QD, 0, shape=(num_rows, y_QD.shape[-1]))
        return zeros_RD.at[index_Q].add(y_QD, mode="drop")

    return jax.vmap(add)(y_GQD, index_GQ)
