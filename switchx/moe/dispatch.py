# SPDX-License-Identifier: Apache-2.0
"""Sort/gather dispatch: tokens are gathered into their experts' slots and back.

The default. Forward and backward are gathers only: each slot knows its token and each
token its slots, so neither direction needs a scatter of activations. Dims: G T S E C D R
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from switchx.moe.plan import RoutingPlan


class Dispatcher(Protocol):
    """Runs `experts` on each token's expert and returns the gated sum of what they give.

    Every dispatcher reads the same plan and returns the same numbers; a dropped token gets
    zero, which leaves it to the residual connection (section 2.2).
    """

    def __call__(
        self, x_GTD: jax.Array, plan: RoutingPlan, experts: Callable[[jax.Array], jax.Array]
    ) -> jax.Array: ...


@jax.custom_vjp
def gather_rows(x_GRD, index_GQ, inverse_GRS):
    """Row `index` of each group; zeros where the index is past the end.

    Args:
        x_GRD: rows.
        index_GQ: which row goes to each of Q places.
        inverse_GRS: the places each row goes to (past the end for none); must be the
            inverse of `index_GQ`. The gradient of row r is the sum of those of its places.
    """
    del inverse_GRS
    return _take(x_GRD, index_GQ)


def _take(x_GRD, index_GQ):
    return jax.vmap(lambda x_RD, index_Q: x_RD.at[index_Q].get(mode="fill", fill_value=0))(
        x_GRD, index_GQ
    )


def _gather_rows_forward(x_GRD, index_GQ, inverse_GRS):
    return _take(x_GRD, index_GQ), (index_GQ, inverse_GRS)


def _gather_rows_backward(residuals, dy_GQD):
    index_GQ, inverse_GRS = residuals
    # One gather a choice: summing a [G, R, S, D] buffer would cost a pass for S = 1.
    dx_GRD = sum(_take(dy_GQD, inverse_GRS[..., s]) for s in range(inverse_GRS.shape[-1]))
    no_gradient = [
        np.zeros(index.shape, jax.dtypes.float0) for index in (index_GQ, inverse_GRS)
    ]
    return dx_GRD, *no_gradient


gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


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


def sort_dispatch(x_GTD, plan: RoutingPlan, experts):
    """Gathers tokens into `[E, G * C, D]`, runs the experts, gathers back and gates.

    The experts may give rows of another width than they get.
    """
    G, T, D = x_GTD.shape
    E, C, S = plan.num_experts, plan.capacity, plan.expert_GTS.shape[-1]
    token_GQ = token_of_slot(plan)
    x_GQD = gather_rows(x_GTD, token_GQ, plan.position_GTS)
    y_ERD = experts(x_GQD.reshape(G, E, C, D).transpose(1, 0, 2, 3).reshape(E, G * C, D))
    width = y_ERD.shape[-1]
    y_GQD = y_ERD.reshape(E, G, C, width).transpose(1, 0, 2, 3).reshape(G, E * C, width)
    y_GTD = jnp.zeros((G, T, width), y_ERD.dtype)
    for s in range(S):
        # A slot holds one choice: for choice s, slots of other choices point past the end.
        is_choice_GQ = (
            jnp.take_along_axis(plan.position_GTS[..., s], jnp.minimum(token_GQ, T - 1), axis=1)
            == jnp.arange(E * C)[None]
        )
        index_GQ = jnp.where(is_choice_GQ, token_GQ, T)
        row_GTD = gather_rows(y_GQD, plan.position_GTS[..., s], index_GQ[..., None])
        y_GTD = y_GTD + row_GTD * plan.gate_GTS[..., s, None].astype(row_GTD.dtype)
    return y_GTD
