# SPDX-License-Identifier: Apache-2.0
"""Rows times the matrix of their expert, on a TPU: plain and quantized weights alike.

For each tile of rows (`tile_schedule.py`) a block of its expert's matrix is copied while the
one before is multiplied. Weights are what is read most when an expert has few rows: they have a
triple buffer. The order is columns, tiles, contraction: a matrix block that serves consecutive
tiles is copied once if the contraction is not cut.
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale; r d f blocks; P tiles
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.tile_schedule import BlockTiles, num_blocks, tiles_by_block
from pallas_kernels.operands import result_type
from pallas_kernels.tiling.tpu import Problem, Tiling, vmem_limit_bytes
from pallas_kernels.tpu_chip import interpret_mode, on_some_tpu, padded_shape, padded_to_tiles

ROWS_OF_A_TILE = 8


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The function of the float32 sums before they are rounded; all of it is optional.

    Attributes:
        scale_EGF: a factor a feature and group of D / G channels.
        bias_EF: added after the scale.
        gate_R: multiplied last.
        relu: whether max(., 0) comes before the gate.
    """

    scale_EGF: jax.Array | None = None
    bias_EF: jax.Array | None = None
    gate_R: jax.Array | None = None
    relu: bool = False


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The constants of the kernel's body."""

    tiling: Tiling
    D: int
    F: int
    out_dtype: jnp.dtype
    is_output_major: bool
    group_size: int | None
    is_group_scaled: bool
    relu: bool
    names: tuple[str, ...]

    @property
    def x_block(self) -> tuple[int, int]:
        return self.tiling.block_R, self.tiling.block_D

    @property
    def w_block(self) -> tuple[int, int]:
        block = self.tiling.block_D, self.tiling.block_F
        return block[::-1] if self.is_output_major else block

    @property
    def y_block(self) -> tuple[int, int]:
        return self.tiling.block_R, self.tiling.block_F

    @property
    def num_blocks_D(self) -> int:
        return num_blocks(self.D, self.tiling.block_D)

    @property
    def num_blocks_F(self) -> int:
        return num_blocks(self.F, self.tiling.block_F)


def multiply_rows(
    x_RD,
    w,
    group_sizes_E,
    *,
    tiling: Tiling,
    is_output_major: bool,
    epilogue: Epilogue | None = None,
    interpret=False,
):
    """`y_r = epilogue(x_r w_e)`, `[R, F]` in the dtype of x; zero past the last expert's rows.

    Args:
        w: [E, D, F], or [E, F, D] if `is_output_major`; the dtype of x, int8 or int4.
    """
    num_rows = len(x_RD)
    F = w.shape[1] if is_output_major else w.shape[2]
    epilogue = epilogue or Epilogue()
    x_RD, epilogue = _with_whole_tiles(x_RD, epilogue)
    R, D = x_RD.shape
    tiling.check(D, F)
    problem = Problem.of(R, D, F, w.shape[0], x_RD.dtype, w.dtype)
    operands, specs = _epilogue_operands(epilogue, tiling)
    G = 1 if epilogue.scale_EGF is None else epilogue.scale_EGF.shape[1]
    plan = _Plan(
        tiling=tiling,
        D=D,
        F=F,
        out_dtype=x_RD.dtype,
        is_output_major=is_output_major,
        group_size=D // G,
        is_group_scaled=G > 1,
        relu=epilogue.relu,
        names=tuple(operands),
    )
    tiles = tiles_by_block(group_sizes_E, R, tiling.block_R)
    arrays = [x_RD, w, *operands.values()]
    blocks = [plan.x_block, plan.w_block, *(block[-2:] for block, _ in specs.values())]
    out_shape = R, F
    if interpret:
        arrays = [padded_to_tiles(*pair) for pair in zip(arrays, blocks, strict=True)]
        out_shape = padded_shape(out_shape, plan.y_block)
    scratch = [pltpu.VMEM(plan.y_block, jnp.float32)] if plan.num_blocks_D > 1 else []
    # As if every expert had rows.
    num_bytes = R * (D * plan.num_blocks_F + F) * x_RD.dtype.itemsize
    num_bytes += w.size * problem.w_bits // 8
    y_RF = pipelined(
        functools.partial(_kernel, plan, tuple(specs.values())), tiles, arrays,
        (out_shape, x_RD.dtype), problem, tiling, scratch=scratch, bytes_accessed=num_bytes,
        interpret=interpret, name="multiply_rows",
    )  # fmt: skip
    return y_RF[:num_rows, :F]


def _with_whole_tiles(x_RD, epilogue: Epilogue):
    """The rows and their gates, padded to a multiple of 8: Mosaic copies whole tiles of memory.

    Few texts that are decoded together have fewer rows. Rows past the last expert's are not
    read.
    """
    missing = -len(x_RD) % ROWS_OF_A_TILE
    if not missing:
        return x_RD, epilogue
    if epilogue.gate_R is not None:
        epilogue = dataclasses.replace(epilogue, gate_R=jnp.pad(epilogue.gate_R, (0, missing)))
    return jnp.pad(x_RD, ((0, missing), (0, 0))), epilogue


def pipelined(
    kernel, tiles, arrays, out, problem: Problem, tiling: Tiling, *, scratch,
    bytes_accessed: int, interpret, name: str,
):  # fmt: skip
    """The result, of shape and dtype `out`, of a kernel that runs a pipeline over tiles.

    Args:
        scratch: memory of the kernel, after the references of tiles, arrays and result.
        bytes_accessed: for XLA's scheduler.
    """
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles),
            grid=(tiling.cores,),
            in_specs=[any_space] * len(arrays),
            out_specs=any_space,
            scratch_shapes=scratch,
        ),
        out_shape=result_type(*out, *tiles, *arrays),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=vmem_limit_bytes(problem, tiling),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * problem.R * problem.D * problem.F,
            bytes_accessed=bytes_accessed,
            transcendentals=0,
        ),
        interpret=interpret_mode(interpret),
        name=name,
    )
    with on_some_tpu(tiling.cores):
        return call(*tiles, *arrays)


def _epilogue_operands(epilogue: Epilogue, tiling: Tiling):
    """Arrays as the kernel reads them, and the blocks of each, by name."""
    operands, specs = {}, {}
    if epilogue.scale_EGF is not None:
        # All groups of a feature block at once: a row of them is no whole tile of memory.
        operands["scale"] = epilogue.scale_EGF
        specs["scale"] = ((None, epilogue.scale_EGF.shape[1], tiling.block_F), "expert")
    if epilogue.bias_EF is not None:
        operands["bias"] = epilogue.bias_EF.astype(jnp.float32)[:, None]
        specs["bias"] = ((None, 1, tiling.block_F), "expert")
    if epilogue.gate_R is not None:
        operands["gate"] = epilogue.gate_R.astype(jnp.float32)[:, None]
        specs["gate"] = ((tiling.block_R, 1), "rows")
    return operands, specs


def _kernel(plan: _Plan, specs, *refs):
    num_tile_arrays, num_inputs = len(BlockTiles._fields), 2 + len(specs)
    tiles, refs = BlockTiles(*refs[:num_tile_arrays]), refs[num_tile_arrays:]
    inputs, y_RF, scratch = refs[:num_inputs], refs[num_inputs], refs[num_inputs + 1 :]
    count, with_rows = tiles.count[0], tiles.count[1]

    def fetched(p):
        # A tile that only writes zeros names what is there already.
        return jnp.minimum(p, jnp.maximum(with_rows - 1, 0))

    def fetched_D(p, d):
        return jnp.where(p < with_rows, d, plan.num_blocks_D - 1)

    def x_index(f, p, d):
        return tiles.block_P[fetched(p)], fetched_D(p, d)

    def w_index(f, p, d):
        e, d = tiles.expert_P[p], fetched_D(p, d)
        return (e, f, d) if plan.is_output_major else (e, d, f)

    indices = {
        "expert": lambda f, p, d: (tiles.expert_P[p], 0, f),
        "rows": lambda f, p, d: (tiles.block_P[fetched(p)], 0),
    }
    pltpu.emit_pipeline(
        functools.partial(_multiply_tile, plan, tiles, scratch),
        grid=(plan.num_blocks_F, count, plan.num_blocks_D),
        in_specs=[
            pl.BlockSpec(plan.x_block, x_index),
            pl.BlockSpec((None, *plan.w_block), w_index, pipeline_mode=pl.Buffered(3)),
            *(pl.BlockSpec(block, indices[index]) for block, index in specs),
        ],
        out_specs=[pl.BlockSpec(plan.y_block, lambda f, p, d: (tiles.block_P[p], f))],
        core_axis=0 if plan.tiling.cores > 1 else None,
        dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY, pltpu.ARBITRARY),
    )(*inputs, y_RF)


def _multiply_tile(plan: _Plan, tiles: BlockTiles, scratch, x_rd, w, *refs):
    """One tile of rows with one block of its expert's matrix."""
    extras, y_rf = dict(zip(plan.names, refs[:-1], strict=True)), refs[-1]
    p, d = pl.program_id(1), pl.program_id(2)
    begin, end = tiles.begin_P[p], tiles.end_P[p]
    is_first = (p == 0) | (tiles.block_P[jnp.maximum(p - 1, 0)] != tiles.block_P[p])

    # A block that is one expert's alone has every row stored below.
    is_whole = (begin == 0) & (end == y_rf.shape[0])

    @pl.when(is_first & (d == 0) & ~is_whole)
    def _():
        y_rf[...] = jnp.zeros_like(y_rf)

    def store(sum_rf):
        y_new = _apply_epilogue(plan, extras, sum_rf).astype(plan.out_dtype)
        row_r = lax.broadcasted_iota(jnp.int32, y_new.shape, 0)
        # Rows of another expert, stored by the tile before this one, stay.
        y_rf[...] = jnp.where((row_r >= begin) & (row_r < end), y_new, y_rf[...])

    has_rows = p < tiles.count[1]
    last = plan.num_blocks_D - 1
    if last == 0:
        pl.when(has_rows)(lambda: store(_product(plan, extras, x_rd, w, d)))
        return
    [sum_rf] = scratch

    @pl.when(has_rows & (d == 0))
    def _():
        sum_rf[...] = jnp.zeros_like(sum_rf)

    is_cut = plan.D % plan.tiling.block_D != 0

    @pl.when(has_rows & (d < last) if is_cut else has_rows)
    def _():
        sum_rf[...] += _product(plan, extras, x_rd, w, d)

    @pl.when(has_rows & (d == last))
    def _():
        if is_cut:
            width = plan.D - last * plan.tiling.block_D
            sum_rf[...] += _product(plan, extras, x_rd, w, d, width)
        store(sum_rf[...])


def _product(plan: _Plan, extras, x_rd, w, d, width: int | None = None):
    """`[block_R, block_F]` in float32; of the first `width` channels if that is given."""
    if not plan.is_group_scaled:
        return _dot(plan, x_rd[...], w[...], width)
    size, block_D = plan.group_size, plan.tiling.block_D
    total = jnp.zeros((x_rd.shape[0], plan.tiling.block_F), jnp.float32)
    for start in range(0, width or block_D, size):
        channels = slice(start, start + size)
        group = pl.ds(d * (block_D // size) + start // size, 1)
        part_rf = _dot(plan, x_rd[:, channels], w[:, channels], None)
        total += part_rf * extras["scale"][group, :]
    return total


def _dot(plan: _Plan, x_rd, w, width: int | None):
    if w.dtype != x_rd.dtype:
        w = w.astype(x_rd.dtype)
    axis = 1 if plan.is_output_major else 0
    if width is not None:
        # What lies behind the last channel is whatever was there: it may be NaN.
        x_rd, w = _first(x_rd, 1, width), _first(w, axis, width)
    return exact_dot(x_rd, w, 1, axis)


def exact_dot(a, b, contract_a: int, contract_b: int):
    """A product, added up in float32; float32 operands are not rounded to bfloat16."""
    is_exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _first(a, axis: int, width: int):
    """`a` with zeros behind the first `width` along an axis."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, a.shape, axis) < width, a, 0)


def _apply_epilogue(plan: _Plan, extras, y_rf):
    if "scale" in extras and not plan.is_group_scaled:
        y_rf = y_rf * extras["scale"][...]
    if "bias" in extras:
        y_rf = y_rf + extras["bias"][...]
    if plan.relu:
        y_rf = jnp.maximum(y_rf, 0)
    if "gate" in extras:
        y_rf = y_rf * extras["gate"][...]
    return y_rf
