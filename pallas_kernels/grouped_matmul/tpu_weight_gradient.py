# SPDX-License-Identifier: Apache-2.0
"""The gradient of every expert's matrix, on a TPU: `dw_e = x_e^T dy_e` over the expert's rows.

The rows are what is summed over, so they are the innermost axis of the pipeline: one expert's
sum stays in fast memory until its last block of rows has been added. `x` is contracted over
its first axis as it lies; no transposed copy of it is made.
Dims: R D F E; r d f blocks of them
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.memory_tiles import padded_shape, padded_to_tiles
from pallas_kernels.grouped_matmul.tpu_tiling import Problem, Tiling, vmem_limit_bytes
from pallas_kernels.grouped_matmul.visits import num_blocks, visits_of_experts
from pallas_kernels.shard_map_types import result_type
from pallas_kernels.tpu_chip import interpret_mode, on_some_tpu


def sum_outer_products(
    x_RD, dy_RF, group_sizes_E, *, out_dtype, tiling: Tiling, interpret=False
):
    """`[E, D, F]` in `out_dtype`, summed in float32; zero for an expert without rows."""
    [R, D], F, E = x_RD.shape, dy_RF.shape[1], group_sizes_E.shape[0]
    out_dtype = jnp.dtype(out_dtype)
    tiling.check(D, F)
    problem = Problem.of(R, D, F, E, x_RD.dtype, out_dtype, is_weight_gradient=True)
    visits = visits_of_experts(group_sizes_E, R, tiling.block_R)
    out_shape = E, D, F
    if interpret:
        x_RD = padded_to_tiles(x_RD, (tiling.block_R, tiling.block_D))
        dy_RF = padded_to_tiles(dy_RF, (tiling.block_R, tiling.block_F))
        out_shape = padded_shape(out_shape, (tiling.block_D, tiling.block_F))
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    # Where the result is float32 the sum is built up in its own block.
    needs_sum = out_dtype != jnp.float32
    call = pl.pallas_call(
        functools.partial(_kernel, tiling, D, F),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(tiling.cores,),
            in_specs=[any_space, any_space],
            out_specs=any_space,
            scratch_shapes=[pltpu.VMEM((tiling.block_D, tiling.block_F), jnp.float32)]
            * needs_sum,
        ),
        out_shape=result_type(out_shape, out_dtype, *visits, x_RD, dy_RF),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_limit_bytes(problem, tiling),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * R * D * F,
            bytes_accessed=R * D * num_blocks(F, tiling.block_F) * x_RD.dtype.itemsize
            + R * F * num_blocks(D, tiling.block_D) * dy_RF.dtype.itemsize
            + E * D * F * out_dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret_mode(interpret),
        name="sum_outer_products",
    )
    with on_some_tpu(tiling.cores):
        return call(*visits, x_RD, dy_RF)[:, :D, :F]


def _kernel(tiling, D, F, *refs):
    expert_V, block_V, begin_V, end_V, count, x_RD, dy_RF, dw_EDF, *scratch = refs
    block_R, block_D, block_F = tiling.block_R, tiling.block_D, tiling.block_F
    pltpu.emit_pipeline(
        functools.partial(_visit, expert_V, begin_V, end_V, count, scratch),
        grid=(num_blocks(D, block_D), num_blocks(F, block_F), count[0]),
        in_specs=[
            pl.BlockSpec((block_R, block_D), lambda d, f, v: (block_V[v], d)),
            pl.BlockSpec((block_R, block_F), lambda d, f, v: (block_V[v], f)),
        ],
        out_specs=[pl.BlockSpec((None, block_D, block_F), lambda d, f, v: (expert_V[v], d, f))],
        core_axis=0 if tiling.cores > 1 else None,
        dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
    )(x_RD, dy_RF, dw_EDF)


def _visit(expert_V, begin_V, end_V, count, scratch, x_rd, dy_rf, dw_df):
    """One block of rows, added to one block of one expert's gradient."""
    v = pl.program_id(2)
    begin, end = begin_V[v], end_V[v]
    is_first = (v == 0) | (expert_V[jnp.maximum(v - 1, 0)] != expert_V[v])
    following = jnp.minimum(v + 1, count[0] - 1)
    is_last = (v == count[0] - 1) | (expert_V[following] != expert_V[v])
    [sum_df] = scratch or [dw_df]

    @pl.when(is_first)
    def _():
        sum_df[...] = jnp.zeros_like(sum_df)

    # All rows of most blocks are the expert's: those need no mask.
    is_whole = (begin == 0) & (end == x_rd.shape[0])

    @pl.when(is_whole)
    def _():
        sum_df[...] += _outer(x_rd[...], dy_rf[...])

    @pl.when((begin < end) & ~is_whole)
    def _():
        # Zeros on both sides: in rows of nobody either may be NaN.
        sum_df[...] += _outer(_between(x_rd[...], begin, end), _between(dy_rf[...], begin, end))

    if scratch:

        @pl.when(is_last)
        def _():
            dw_df[...] = sum_df[...].astype(dw_df.dtype)


def _between(a_rx, begin, end):
    row_rx = lax.broadcasted_iota(jnp.int32, a_rx.shape, 0)
    return jnp.where((row_rx >= begin) & (row_rx < end), a_rx, 0)


def _outer(x_rd, dy_rf):
    is_exact = x_rd.dtype == jnp.float32
    return lax.dot_general(
        x_rd,
        dy_rf,
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
