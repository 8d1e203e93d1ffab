# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product on a TPU, in bfloat16 and float32, with what its gradients need.

Dims: R D F E
"""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import tpu_tiling
from pallas_kernels.grouped_matmul.tpu_rows import multiply_rows
from pallas_kernels.grouped_matmul.tpu_tiling import Problem, Tiling
from pallas_kernels.grouped_matmul.tpu_weight_gradient import sum_outer_products

DTYPES = ("bfloat16", "float32")


def refusal(x_dtype, w_dtype, R: int, D: int, F: int, E: int) -> str | None:
    """Why the kernels cannot multiply these, with the way out; None if they can.

    Any sizes will do: what does not divide is masked.
    """
    x_name, w_name = jnp.dtype(x_dtype).name, jnp.dtype(w_dtype).name
    if x_name not in DTYPES:
        return (
            f"rows are {x_name}, which the TPU kernels do not multiply; use "
            f"{' or '.join(DTYPES)}, or implementation='reference'"
        )
    if w_name != x_name:
        return f"weights are {w_name} and rows {x_name}; cast the weights to {x_name}"
    if 0 in (R, D, F, E):
        return (
            f"R={R}, D={D}, F={F}, E={E} has a size of 0, of which there are no blocks; use "
            "implementation='reference'"
        )
    return None


def default_tiling(
    R: int, D: int, F: int, E: int, x_dtype, w_dtype, *, direction: str = "forward"
) -> Tiling:
    """The tiling of the least estimated time on the current chip.

    Args:
        D, F: as the direction sees them: an `input_gradient` contracts over D and has F
            output features like a forward pass; a `weight_gradient` writes [E, D, F].
        direction: `forward`, `input_gradient` or `weight_gradient`.
    """
    return tpu_tiling.default_tiling(_problem(R, D, F, E, x_dtype, w_dtype, direction))


def candidates(
    R: int, D: int, F: int, E: int, x_dtype, w_dtype, *, direction: str = "forward"
) -> list[Tiling]:
    """Tilings that fit the current chip, the best estimate first; see `default_tiling`."""
    return tpu_tiling.candidates(_problem(R, D, F, E, x_dtype, w_dtype, direction))


def forward(
    x_RD,
    w,
    group_sizes_E,
    *,
    transpose_w: bool = False,
    tiling: Tiling | None = None,
    interpret=False,
):
    """`y_r = x_r w_e`, e the expert of row r: `[R, F]` in the dtype of x.

    Args:
        x_RD: rows sorted by expert; bfloat16 or float32.
        w: [E, D, F]; [E, F, D] with `transpose_w`, as it lies, contracted over its last axis.
        group_sizes_E: int32, rows of each expert; their sum is at most R. The result of rows
            past the last expert's is zero, whatever is in them.
        interpret: True, or `pltpu.InterpretParams`, to run without a TPU.

    Raises:
        ValueError: a tiling that cannot be.
    """
    R, D = x_RD.shape
    F = w.shape[1] if transpose_w else w.shape[2]
    tiling = tiling or default_tiling(R, D, F, w.shape[0], x_RD.dtype, w.dtype)
    return multiply_rows(
        x_RD,
        w,
        group_sizes_E,
        tiling=tiling,
        is_output_major=transpose_w,
        interpret=interpret,
    )


def weight_gradient(
    x_RD, dy_RF, group_sizes_E, *, out_dtype, tiling: Tiling | None = None, interpret=False
):
    """`dw_e = x_e^T dy_e` over the rows of each expert: `[E, D, F]`, zero where it has none.

    Summed in float32. What is in rows past the last expert's does not matter.

    Raises:
        ValueError: a tiling that cannot be.
    """
    [R, D], F, E = x_RD.shape, dy_RF.shape[1], group_sizes_E.shape[0]
    tiling = tiling or default_tiling(
        R, D, F, E, x_RD.dtype, out_dtype, direction="weight_gradient"
    )
    return sum_outer_products(
        x_RD, dy_RF, group_sizes_E, out_dtype=out_dtype, tiling=tiling, interpret=interpret
    )


def _problem(R, D, F, E, x_dtype, w_dtype, direction) -> Problem:
    is_weight_gradient = direction == "weight_gradient"
    return Problem.of(R, D, F, E, x_dtype, w_dtype, is_weight_gradient=is_weight_gradient)
