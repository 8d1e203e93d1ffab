# SPDX-License-Identifier: Apache-2.0
"""The experts of a sparse layer, all steps between its router and its residual connection.

Kim et al. 2022 (arXiv:2211.10017), sections 3.3 to 3.5: sort, permute, two grouped products
with ReLU between, gate, unpermute. Dims: T D F E S; R = T S
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantized_grouped_matmul.api import quantized_grouped_matmul
from pallas_kernels.routing.sort import (
    permute,
    permute_gates,
    sort_by_expert,
    unpermute,
)


def expert_ffn(
    x_TD,
    expert_TS,
    gate_TS,
    w_in,
    w_out,
    *,
    bias_in_EF=None,
    bias_out_ED=None,
    is_finished_T=None,
    implementation: str | None = None,
    interpret: bool = False,
):
    """`y_t = sum over s of gate_ts (relu(x_t w_in_e + bias_in_e) w_out_e + bias_out_e)`.

    e is expert_ts. Choices of expert E, and tokens that are finished, are never multiplied
    and add zeros; experts that nobody chose are not read.

    Args:
        expert_TS: int32, 0..E-1, or E for none.
        w_in, w_out: `[E, D, F]` and `[E, F, D]`, arrays (differentiable) or QTensors. The
            ReLU, and the gates, are part of the products of QTensors.

    Raises:
        ValueError: what `grouped_matmul` and `quantized_grouped_matmul` refuse; `w_in` and
            `w_out` of different numbers of experts.
    """
    E = w_in.shape[0]
    if w_out.shape[0] != E:
        raise ValueError(f"w_in has {E} experts, and w_out {w_out.shape[0]}; expected the same")
    rows = sort_by_expert(expert_TS, E, is_finished_T=is_finished_T)
    how = {"implementation": implementation, "interpret": interpret}
    x_RD, sizes_E = permute(x_TD, rows), rows.group_sizes_E
    if isinstance(w_in, QTensor):
        h_RF = quantized_grouped_matmul(
            x_RD, w_in, sizes_E, bias_EF=bias_in_EF, activation="relu", **how
        )
    else:
        h_RF = jax.nn.relu(grouped_matmul(x_RD, w_in, sizes_E, bias_EF=bias_in_EF, **how))
    if isinstance(w_out, QTensor):
        gate_R = permute_gates(gate_TS, rows)
        y_RD = quantized_grouped_matmul(
            h_RF, w_out, sizes_E, bias_EF=bias_out_ED, gate_R=gate_R, **how
        )
        return unpermute(y_RD, rows)
    y_RD = grouped_matmul(h_RF, w_out, sizes_E, bias_EF=bias_out_ED, **how)
    # A gate of a pruned choice may be anything, and 0 times NaN is NaN.
    is_pruned_TS = rows.row_TS >= jnp.sum(sizes_E)
    return unpermute(y_RD, rows, jnp.where(is_pruned_TS, 0, gate_TS))
