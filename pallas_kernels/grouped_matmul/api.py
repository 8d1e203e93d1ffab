# SPDX-License-Identifier: Apache-2.0
"""`grouped_matmul`: rows sorted by expert, each times its expert's matrix, and its gradients.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 3.
Dims: R rows, D inputs, F outputs, E experts
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.implementations import choose
from pallas_kernels.operands import check_grouped, sum_over_replicas
from pallas_kernels.sorted_rows import rows_of_groups
from pallas_kernels.tiling.tuned import tuned_tiling


def grouped_matmul(
    x_RD,
    w_EDF,
    group_sizes_E,
    *,
    bias_EF=None,
    implementation: str | None = None,
    tiling: Any = None,
    interpret: bool = False,
):
    """`y_r = x_r w_e + bias_e` with e the expert of row r, `[R, F]` in the dtype of x.

    The first `group_sizes_E[0]` rows are expert 0's, the next `group_sizes_E[1]` expert 1's.
    Rows past the last group are not read and give zeros; matrices of empty groups are not
    read. Products are added up in float32. Differentiable in x, w and bias; neither pass
    transposes the weights in memory.

    Args:
        x_RD, w_EDF, bias_EF: float32, bfloat16 or float16.
        group_sizes_E: int32, summing to at most R. Checked where they are concrete. While they
            are traced they may sum to more: rows past R are neither read nor written.
        implementation: `reference`, `tpu`, `gpu`, or None: see `implementations.choose`.
        tiling: the implementation's `Tiling` of the forward product; None is the tuned one,
            where `switchx tune kernels` has written one, or its heuristic. Gradients take
            the heuristic's.
        interpret: runs a named kernel by interpretation, on any machine and slowly.

    Raises:
        ValueError: shapes that do not agree, an unsupported dtype or alignment, group sizes
            below 0 or above R in sum, an implementation that cannot run here, a damaged file
            of tuned tilings. Nothing has been launched then.
    """
    check_grouped(x_RD, w_EDF, group_sizes_E, bias_EF)
    (R, D), (E, _, F) = x_RD.shape, w_EDF.shape
    module = choose(
        "grouped_matmul",
        implementation,
        (x_RD.dtype, w_EDF.dtype, R, D, F, E),
        interpret=interpret,
    )
    if tiling is None and not interpret:
        tiling = tuned_tiling(module, x_RD.dtype, None, None, R, D, F, E)
    # Only kernels know the option.
    options = (("interpret", True),) if interpret else ()
    y_RF = _grouped(module, tiling, options, x_RD, w_EDF, group_sizes_E)
    if bias_EF is None:
        return y_RF
    expert_R, is_used_R = rows_of_groups(group_sizes_E, R)
    bias_RF = jnp.where(is_used_R[:, None], bias_EF.astype(y_RF.dtype)[expert_R], 0)
    return y_RF + bias_RF


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _grouped(module: ModuleType, tiling, options, x_RD, w_EDF, group_sizes_E):
    return module.forward(x_RD, w_EDF, group_sizes_E, tiling=tiling, **dict(options))


def _grouped_forward(module, tiling, options, x_RD, w_EDF, group_sizes_E):
    y_RF = _grouped(module, tiling, options, x_RD, w_EDF, group_sizes_E)
    return y_RF, (x_RD, w_EDF, group_sizes_E)


def _grouped_backward(module, tiling, options, residuals, dy_RF):
    x_RD, w_EDF, group_sizes_E = residuals
    dx_RD = module.forward(dy_RF, w_EDF, group_sizes_E, transpose_w=True, **dict(options))
    dw_EDF = module.weight_gradient(
        x_RD, dy_RF, group_sizes_E, out_dtype=w_EDF.dtype, **dict(options)
    )
    dx_RD, dw_EDF = sum_over_replicas(dx_RD, x_RD), sum_over_replicas(dw_EDF, w_EDF)
    return dx_RD, dw_EDF, np.zeros(group_sizes_E.shape, jax.dtypes.float0)


_grouped.defvjp(_grouped_forward, _grouped_backward)
