# SPDX-License-Identifier: Apache-2.0
"""Sort-based routing: tokens in the order of their experts, and their results back.

Kim et al. 2022, "Who Says Elephants Can't Run" (arXiv:2211.10017), section 3.3, with the
pruning of finished sentences of section 3.5.
Dims: T tokens; S choices of a token; R = T S rows; E experts; D
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.routing.stable_sort import stable_argsort


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SortedRows:
    """Where each choice of each token goes, `R = T S` rows sorted by expert.

    Attributes:
        source_R: int32, which choice a row is: choice s of token t is `t S + s`.
        row_TS: int32, the row of each choice; the inverse of `source_R`.
        group_sizes_E: int32, rows of each expert. Rows past their sum are pruned ones.
    """

    source_R: jax.Array
    row_TS: jax.Array
    group_sizes_E: jax.Array


def sort_by_expert(expert_TS, num_experts: int, *, is_finished_T=None) -> SortedRows:
    """Sorts choices by expert, those of one expert in the order of tokens and choices.

    Args:
        expert_TS: int32 in 0..E-1; E stands for no expert: such choices are sorted past all
            groups, take part in nothing and give zeros.
        is_finished_T: bool; all choices of a finished token are pruned like that.

    Raises:
        ValueError: `expert_TS` is not int32 `[tokens, choices]`.
    """
    if expert_TS.ndim != 2 or expert_TS.dtype != jnp.int32:
        raise ValueError(
            f"expert_TS has shape {expert_TS.shape} and dtype {expert_TS.dtype}; expected "
            "int32 [tokens, choices]"
        )
    if is_finished_T is not None:
        expert_TS = jnp.where(is_finished_T[:, None], num_experts, expert_TS)
    expert_R = jnp.asarray(expert_TS).reshape(-1)
    source_R = stable_argsort(expert_R)
    row_R = stable_argsort(source_R)
    expert_E = jnp.arange(num_experts, dtype=jnp.int32)
    end_E = jnp.searchsorted(expert_R[source_R], expert_E, side="right").astype(jnp.int32)
    group_sizes_E = jnp.diff(end_E, prepend=jnp.zeros(1, jnp.int32))
    return SortedRows(source_R, row_R.reshape(expert_TS.shape), group_sizes_E)


def permute(x_TD, rows: SortedRows):
    """`[R, D]`: each token as many times as it has choices, sorted by expert."""
    S = rows.row_TS.shape[1]
    return x_TD[rows.source_R // S]


def permute_gates(gate_TS, rows: SortedRows):
    """`[R]`: the gate of each row."""
    return gate_TS.reshape(-1)[rows.source_R]


def unpermute(y_RD, rows: SortedRows, gate_TS=None):
    """`[T, D]`: the sum over a token's choices of gate times result, in float32 between.

    Args:
        gate_TS: None where `y_RD` was multiplied already.
    """
    y_TSD = y_RD[rows.row_TS]
    if y_TSD.shape[1] == 1 and gate_TS is None:
        return y_TSD[:, 0]
    y_TSD = y_TSD.astype(jnp.float32)
    if gate_TS is not None:
        y_TSD = gate_TS.astype(jnp.float32)[..., None] * y_TSD
    return jnp.sum(y_TSD, axis=1).astype(y_RD.dtype)
