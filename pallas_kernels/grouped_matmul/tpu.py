# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product on a TPU, in bfloat16 and float32, and the gradient of its weights.

Rows times matrices, forward and for the gradient of the rows, are the kernel of
`tpu_product.py`; the weights' gradient is the one at the end of this file.
Dims: R rows, D inputs, F outputs, E experts; r d f blocks; P tiles of rows
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.epilogue import Epilogue
from pallas_kernels.grouped_matmul.tile_schedule import BlockTiles, num_blocks, tiles_by_expert
from pallas_kernels.grouped_matmul.tpu_pipeline import run_pipeline
from pallas_kernels.grouped_matmul.tpu_product import exact_dot, multiply_rows
from pallas_kernels.tiling import tpu as tpu_tiling
from pallas_kernels.tiling.tpu import Problem, Tiling

DTYPES = ("bfloat16", "float32")


def refusal(x_dtype, w_dtype, R: int, D: int, F: int, E: int) -> str | None:
    """The reason why the kernels cannot multiply these, and what to do; None if they can.

    All sizes are allowed, except 1 feature: rests of blocks are masked.
    """
    x_name, w_name = jnp.dtype(x_dtype).name, jnp.dtype(w_dtype).name
    if x_name not in DTYPES:
        return (
            f"x_RD is {x_name}; expected {' or '.join(DTYPES)}: cast the rows, or use "
            "implementation='reference'"
        )
    if w_name != x_name:
        return f"w is {w_name}; expected {x_name}, the dtype of x_RD: cast the weights"
    if 0 in (R, D, F, E):
        return (
            f"x_RD and w have R={R}, D={D}, F={F}, E={E}; expected sizes of 1 or more, as of 0 "
            "there are no blocks: use implementation='reference'"
        )
    if 1 in (D, F):
        return (
            f"w has D={D}, F={F}; expected 2 or more, as Mosaic compiles no product with a "
            "matrix of one row: use implementation='reference'"
        )
    return None


def candidates(R: int, D: int, F: int, E: int, x_dtype, w_dtype) -> list[Tiling]:
    """Tilings that fit the current chip, the best estimate first."""
    return tpu_tiling.candidates(Problem.of(R, D, F, E, x_dtype, w_dtype))


def forward(
    x_RD,
    w,
    group_sizes_E,
    *,
    w_gate=None,
    bias_EF=None,
    activation: str | None = None,
    gate_R=None,
    has_residual: bool = False,
    transpose_w: bool = False,
    out_dtype=None,
    tiling: Tiling | None = None,
    interpret=False,
):
    """As `api.grouped_matmul`; with `transpose_w` w is `[E, F, D]`.

    Args:
        has_residual: whether to return the residual of `apply_epilogue`, too, in the dtype of
            x.
        out_dtype: dtype of the result; None is the dtype of x.
        interpret: True, or `pltpu.InterpretParams`, to run without a TPU.

    Raises:
        ValueError: the tiling is not possible.
    """
    R, D = x_RD.shape
    F = w.shape[1] if transpose_w else w.shape[2]
    if tiling is None:
        num_matrices = 1 if w_gate is None else 2
        problem = Problem.of(
            R,
            D,
            F,
            w.shape[0],
            x_RD.dtype,
            w.dtype,
            num_matrices=num_matrices,
            num_results=1 + num_matrices if has_residual else 1,
            out_dtype=out_dtype,
        )
        tiling = tpu_tiling.candidates(problem)[0]
    return multiply_rows(
        x_RD,
        w,
        group_sizes_E,
        tiling=tiling,
        is_output_major=transpose_w,
        w_gate=w_gate,
        epilogue=Epilogue(
            bias_EF=bias_EF, activation=activation, gate_R=gate_R, has_residual=has_residual
        ),
        out_dtype=out_dtype,
        interpret=interpret,
    )


def weight_gradient(
    x_RD, dy_RF, group_sizes_E, *, out_dtype, tiling: Tiling | None = None, interpret=False
):
    """`dw_e = x_e^T dy_e` over the rows of each expert: `[E, D, F]`, zero if it has none.

    The sums are over rows, so these are the innermost axis of the pipeline: one
    expert's sum stays in fast memory, in float32, until its last tile of rows has been added.
    `x` is contracted over its first axis as it lies; no transposed copy of it is made. What is
    in rows past the last expert's does not matter.

    Raises:
        ValueError: the tiling is not possible.
    """
    # Mosaic copies no block of fewer than 8 rows.
    missing = max(0, 8 - len(x_RD))
    x_RD, dy_RF = (jnp.pad(each, ((0, missing), (0, 0))) for each in (x_RD, dy_RF))
    R, D = x_RD.shape
    F = dy_RF.shape[1]
    E = group_sizes_E.shape[0]
    out_dtype = jnp.dtype(out_dtype)
    problem = Problem.of(R, D, F, E, x_RD.dtype, out_dtype, is_weight_gradient=True)
    tiling = tiling or tpu_tiling.candidates(problem)[0]
    tiling.check(D, F)
    # If the result is float32, the sum is built up in its own block.
    block = pltpu.VMEM((tiling.block_D, tiling.block_F), jnp.float32)
    num_bytes = R * D * num_blocks(F, tiling.block_F) * x_RD.dtype.itemsize
    num_bytes += R * F * num_blocks(D, tiling.block_D) * dy_RF.dtype.itemsize
    [dw_EDF] = run_pipeline(
        _add_tile,
        functools.partial(_pipeline, tiling, D, F),
        lambda sizes_E: tiles_by_expert(sizes_E, R, tiling.block_R),
        group_sizes_E,
        (x_RD, dy_RF),
        [((E, D, F), out_dtype)],
        problem,
        tiling,
        scratch=[] if out_dtype == jnp.float32 else [block],
        bytes_accessed=num_bytes + E * D * F * out_dtype.itemsize,
        semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
        interpret=interpret,
        name="sum_outer_products",
    )
    return dw_EDF


def _pipeline(tiling: Tiling, D: int, F: int, tiles: BlockTiles):
    """(grid, blocks of the operands, blocks of the result)."""
    block_R, block_D, block_F = tiling.block_R, tiling.block_D, tiling.block_F
    in_specs = [
        pl.BlockSpec((block_R, block_D), lambda d, f, p: (tiles.block_P[p], d)),
        pl.BlockSpec((block_R, block_F), lambda d, f, p: (tiles.block_P[p], f)),
    ]
    dw_spec = pl.BlockSpec((None, block_D, block_F), lambda d, f, p: (tiles.expert_P[p], d, f))
    grid = num_blocks(D, block_D), num_blocks(F, block_F), tiles.count[0]
    return grid, in_specs, [dw_spec]


def _add_tile(tiles: BlockTiles, scratch, x_rd, dy_rf, dw_df):
    """One tile of rows, added to one block of its expert's gradient."""
    p, last = pl.program_id(2), tiles.count[0] - 1
    expert = tiles.expert_P[p]
    begin = tiles.begin_P[p]
    end = tiles.end_P[p]
    is_first = (p == 0) | (tiles.expert_P[jnp.maximum(p - 1, 0)] != expert)
    is_last = (p == last) | (tiles.expert_P[jnp.minimum(p + 1, last)] != expert)
    [sum_df] = scratch or [dw_df]

    @pl.when(is_first)
    def _():
        sum_df[...] = jnp.zeros_like(sum_df)

    # All rows of most blocks are the expert's: these need no mask.
    is_whole = (begin == 0) & (end == x_rd.shape[0])

    @pl.when(is_whole)
    def _():
        sum_df[...] += exact_dot(x_rd[...], dy_rf[...], 0, 0)

    @pl.when((begin < end) & ~is_whole)
    def _():
        # Zeros on both sides: in rows of no expert either may be NaN.
        x_own, dy_own = (_between(each[...], begin, end) for each in (x_rd, dy_rf))
        sum_df[...] += exact_dot(x_own, dy_own, 0, 0)

    if scratch:

        @pl.when(is_last)
        def _():
            dw_df[...] = sum_df[...].astype(dw_df.dtype)


def _between(a_rx, begin, end):
    row_rx = lax.broadcasted_iota(jnp.int32, a_rx.shape, 0)
    return jnp.where((row_rx >= begin) & (row_rx < end), a_rx, 0)
