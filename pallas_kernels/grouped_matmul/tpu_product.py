# SPDX-License-Identifier: Apache-2.0
"""Rows times the matrix of their expert, on a TPU: plain and quantized weights alike.

For each tile of rows (`tile_schedule.py`) a block of its expert's matrix is copied while the
previous one is multiplied. If an expert has few rows, weights are read most: they have a
triple buffer. The order is columns, tiles, contraction: a matrix block that serves consecutive
tiles is copied once if the contraction is not cut. Of a block of rows a tile multiplies only
those of its expert, in pieces of at most 128 rows; the first piece has the least of four sizes
that holds the remainder. A separate path for blocks with rows of one expert would have at most
1.3% fewer instructions, another way to get the gates of a piece's rows 1.5% (compiled for a v5e
and a v5p); neither is implemented.
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale; r d f blocks; P tiles
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.epilogue import Epilogue, result_of
from pallas_kernels.grouped_matmul.tile_schedule import BlockTiles, num_blocks, tiles_by_block
from pallas_kernels.grouped_matmul.tpu_pipeline import run_pipeline
from pallas_kernels.quantization.qtensor import FLOAT8
from pallas_kernels.tiling.tpu import (
    LANES,
    PIECE_ROWS,
    PIECE_STEP,
    ROW_UNIT,
    Problem,
    Tiling,
    multiplies_int8,
    reads_float8,
    row_unit_of,
)
from pallas_kernels.tpu_chip import Chip, current_chip


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The constants of the kernel's body.

    Attributes:
        num_matrices: 2 in a gated linear unit.
        chunk: columns of a block that are multiplied at a time.
        row_unit: number of rows of which each piece's first row is a multiple.
        chip: the chip; those without `multiplies_int8` multiply int8 rows in bfloat16.
        names: names of the operands after rows and matrices, in order.
    """

    tiling: Tiling
    D: int
    F: int
    is_output_major: bool
    group_size: int | None
    is_group_scaled: bool
    activation: str | None
    has_residual: bool
    num_matrices: int
    chunk: int
    row_unit: int
    chip: Chip
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
    def num_results(self) -> int:
        return 1 + self.num_matrices if self.has_residual else 1

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
    w_gate=None,
    epilogue: Epilogue | None = None,
    out_dtype=None,
    interpret=False,
):
    """`y_r = epilogue(x_r w_e)`, `[R, F]`; zero past the last expert's rows.

    Args:
        x_RD: float32, bfloat16, or int8, whose products with int8 are added up as int32 if the
            chip multiplies int8, else in float32, or float8_e4m3fn with weights of the
            same dtype; for rows of 8 bits `block_R` is a multiple of 32.
        w: [E, D, F], or [E, F, D] if `is_output_major`; the dtype of x, int8, int4 or
            float8_e4m3fn.
        w_gate: the gate's matrices of a gated linear unit, like w.
        out_dtype: dtype of the result; None is the dtype of x, which a residual always has.

    Returns:
        y_RF, with `has_residual` (y_RF, residual).
    """
    num_rows = len(x_RD)
    F = w.shape[1] if is_output_major else w.shape[2]
    epilogue = epilogue or Epilogue()
    x_RD, epilogue = _with_whole_tiles(x_RD, epilogue)
    R, D = x_RD.shape
    row_unit = row_unit_of(x_RD.dtype)
    tiling.check(D, F, row_unit)
    matrices = [w] if w_gate is None else [w, w_gate]
    operands, specs = _epilogue_operands(epilogue, tiling)
    G = epilogue.scales[0].shape[2] if epilogue.scales else 1
    plan = _Plan(
        tiling=tiling,
        D=D,
        F=F,
        is_output_major=is_output_major,
        group_size=D // G,
        is_group_scaled=G > 1,
        activation=epilogue.activation,
        has_residual=epilogue.has_residual,
        num_matrices=len(matrices),
        chunk=tiling.chunk,
        row_unit=row_unit,
        chip=current_chip(),
        names=tuple(operands),
    )
    problem = Problem.of(
        R,
        D,
        F,
        w.shape[0],
        x_RD.dtype,
        w.dtype,
        num_matrices=len(matrices),
        num_results=plan.num_results,
        out_dtype=out_dtype,
    )
    dtypes = [out_dtype or x_RD.dtype] + [x_RD.dtype] * (plan.num_results - 1)
    sums = [pltpu.VMEM(plan.y_block, jnp.float32)] * len(matrices)
    # As if every expert had rows.
    accessed = R * (D * plan.num_blocks_F + F * plan.num_results) * x_RD.dtype.itemsize
    accessed += len(matrices) * w.size * problem.w_bits // 8

    def pipeline(tiles):
        return pipeline_specs(plan, tuple(specs.values()), tiles)

    results = run_pipeline(
        functools.partial(_multiply_tile, plan),
        pipeline,
        lambda sizes_E: tiles_by_block(sizes_E, R, tiling.block_R),
        group_sizes_E,
        [x_RD, *matrices, *operands.values()],
        [((R, F), each) for each in dtypes],
        problem,
        tiling,
        scratch=sums if plan.num_blocks_D > 1 else [],
        bytes_accessed=accessed,
        semantics=(pltpu.PARALLEL, pltpu.ARBITRARY, pltpu.ARBITRARY),
        interpret=interpret,
        name="multiply_rows",
        rows_of_tiles=tiling.multiplied_rows,
    )
    y_RF, *residual = (each[:num_rows] for each in results)
    return (y_RF, tuple(residual)) if epilogue.has_residual else y_RF


def _with_whole_tiles(x_RD, epilogue: Epilogue):
    """The rows and their factors, padded to a multiple of 8, or of 32 if they have 8 bits.

    Mosaic copies whole tiles, and a few texts that are decoded together have fewer rows. Rows
    past the last expert's are not read.
    """
    missing = -len(x_RD) % (row_unit_of(x_RD.dtype) if x_RD.dtype.itemsize == 1 else 8)
    if not missing:
        return x_RD, epilogue
    padded = {
        name: jnp.pad(numbers_R, (0, missing))
        for name in ("gate_R", "row_scale_R")
        if (numbers_R := getattr(epilogue, name)) is not None
    }
    return jnp.pad(x_RD, ((0, missing), (0, 0))), dataclasses.replace(epilogue, **padded)


def _epilogue_operands(epilogue: Epilogue, tiling: Tiling):
    """Arrays as the kernel reads them, and the blocks of each, by name."""
    operands, specs = {}, {}
    for name, arrays in (("scale", epilogue.scales), ("zero", epilogue.zeros)):
        for i, each_EFG in enumerate(arrays):
            # All groups of a feature block at once: a row of them is not a whole memory tile.
            each_EGF = jnp.swapaxes(each_EFG, 1, 2).astype(jnp.float32)
            operands[f"{name}{i}"] = each_EGF
            specs[f"{name}{i}"] = ((None, each_EGF.shape[1], tiling.block_F), "expert")
    if epilogue.bias_EF is not None:
        operands["bias"] = epilogue.bias_EF.astype(jnp.float32)[:, None]
        specs["bias"] = ((None, 1, tiling.block_F), "expert")
    for name, numbers_R in (("row_scale", epilogue.row_scale_R), ("gate", epilogue.gate_R)):
        if numbers_R is not None:
            operands[name] = _by_block(numbers_R, tiling)
            specs[name] = ((None, 1, tiling.block_R), "rows")
    return operands, specs


def _by_block(numbers_R, tiling: Tiling):
    """`[blocks, 1, block_R]` float32: a column would take 128 numbers of memory for each."""
    blocks = num_blocks(len(numbers_R), tiling.block_R)
    missing = blocks * tiling.block_R - len(numbers_R)
    return jnp.pad(numbers_R.astype(jnp.float32), (0, missing)).reshape(blocks, 1, -1)


def pipeline_specs(plan: _Plan, specs, tiles: BlockTiles):
    """(grid, blocks of the operands, blocks of the results): what is copied, and when.

    The kernel runs it over references; where launches are recorded, arrays are counted.
    """
    count, with_rows = tiles.count[0], tiles.count[1]

    def fetched(p):
        # A tile that only writes zeros names blocks that are already there.
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
        "rows": lambda f, p, d: (tiles.block_P[fetched(p)], 0, 0),
    }
    w_spec = pl.BlockSpec((None, *plan.w_block), w_index, pipeline_mode=pl.Buffered(3))
    in_specs = [
        pl.BlockSpec(plan.x_block, x_index),
        *[w_spec] * plan.num_matrices,
        *(pl.BlockSpec(block, indices[index]) for block, index in specs),
    ]
    y_spec = pl.BlockSpec(plan.y_block, lambda f, p, d: (tiles.block_P[p], f))
    grid = (plan.num_blocks_F, count, plan.num_blocks_D)
    return grid, in_specs, [y_spec] * plan.num_results


def _multiply_tile(plan: _Plan, tiles: BlockTiles, scratch, x_rd, *refs):
    """One tile of rows with one block of each of its expert's matrices.

    Tiles of a block come in the order of their rows. So a tile may leave anything in the rows
    after its own: the next tile overwrites them, or the block's last one writes zeros.
    """
    matrices, refs = refs[: plan.num_matrices], refs[plan.num_matrices :]
    extras = dict(zip(plan.names, refs, strict=False))
    results = refs[len(extras) :]
    p, d = pl.program_id(1), pl.program_id(2)
    begin = tiles.begin_P[p]
    end = tiles.end_P[p]
    num_tiles = tiles.count[0]
    last_D = plan.num_blocks_D - 1

    def store(sums, piece: _Piece, columns):
        values = _apply_epilogue(plan, extras, sums, piece, columns)
        for result, value in zip(results, values, strict=False):
            value = value.astype(result.dtype)
            if piece.is_first:  # what the previous tile stored above `begin` stays
                row_r = piece.start + lax.broadcasted_iota(jnp.int32, value.shape, 0)
                value = jnp.where(row_r < begin, result[piece.rows, columns], value)
            result[piece.rows, columns] = value

    def multiply(piece: _Piece, columns):
        def products(width=None):
            x = x_rd.at[piece.rows]
            return [
                _product(plan, extras, i, x, w, d, columns, width)
                for i, w in enumerate(matrices)
            ]

        if last_D == 0:
            store(products(), piece, columns)
            return

        def add(width=None):
            for sum_rf, new_rf in zip(scratch, products(width), strict=True):
                sum_rf[piece.rows, columns] += new_rf

        @pl.when(d == 0)
        def _():
            for sum_rf in scratch:
                sum_rf[piece.rows, columns] = jnp.zeros((piece.size, plan.chunk), jnp.float32)

        if plan.D % plan.tiling.block_D:
            pl.when(d < last_D)(add)
            pl.when(d == last_D)(lambda: add(plan.D - last_D * plan.tiling.block_D))
        else:
            add()

        @pl.when(d == last_D)
        def _():
            store([each[piece.rows, columns] for each in scratch], piece, columns)

    def multiply_chunk(columns):
        _for_pieces(plan, begin, end, lambda piece: multiply(piece, columns))

    @pl.when(p < tiles.count[1])
    def _():
        if plan.chunk == plan.tiling.block_F:
            multiply_chunk(slice(None))
            return

        # A loop: the instructions of a whole block would fill the instruction memory.
        @pl.loop(0, plan.tiling.block_F // plan.chunk)
        def _(i):
            multiply_chunk(pl.ds(pl.multiple_of(i * plan.chunk, LANES), plan.chunk))

    next_block = tiles.block_P[jnp.minimum(p + 1, num_tiles - 1)]
    is_last = (p == num_tiles - 1) | (next_block != tiles.block_P[p])

    @pl.when(is_last & (d == last_D) & (end < x_rd.shape[0]))
    def _():
        @pl.loop(end // ROW_UNIT, x_rd.shape[0] // ROW_UNIT)
        def _(i):
            rows = pl.ds(pl.multiple_of(i * ROW_UNIT, ROW_UNIT), ROW_UNIT)
            for result in results:
                value = result[rows]
                row_r = i * ROW_UNIT + lax.broadcasted_iota(jnp.int32, value.shape, 0)
                result[rows] = jnp.where(row_r < end, value, 0)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Rows of a block that are multiplied at once.

    Attributes:
        start: number of the first row, known when the kernel runs.
        unit: number that divides start and size.
        is_first: whether it is the first piece of its tile; the rows above the tile's may be
            another expert's.
    """

    start: jax.Array
    size: int
    unit: int
    is_first: bool

    @property
    def rows(self):
        return pl.ds(pl.multiple_of(self.start, self.unit), self.size)


def _for_pieces(plan: _Plan, begin, end, run) -> None:
    """Runs `run(piece)` for pieces that cover the rows from `begin` to `end` of a block.

    Every piece pushes the matrix into the matrix unit again, which is hidden behind 60 rows or
    more. So all but the first are as large as possible.
    """
    tiling, unit = plan.tiling, plan.row_unit
    start = begin // unit * unit
    further = (end - start - 1) // PIECE_ROWS
    which = (end - start - 1 - further * PIECE_ROWS) // PIECE_STEP
    for i, size in enumerate(tiling.first_pieces):

        @pl.when(which == i)
        def _(size=size):
            # Not beyond the block, whose size is not a multiple of the steps' size.
            first = jnp.minimum(start, tiling.block_R - size - further * PIECE_ROWS)
            run(_Piece(first, size, unit, is_first=True))

    if tiling.block_R <= PIECE_ROWS:
        return
    covered = jnp.minimum((which + 1) * PIECE_STEP, PIECE_ROWS)
    second = jnp.minimum(start, tiling.block_R - covered - further * PIECE_ROWS) + covered

    @pl.loop(0, further)
    def _(i):
        run(_Piece(second + i * PIECE_ROWS, PIECE_ROWS, unit, is_first=False))


def _product(plan: _Plan, extras, which: int, x_rd, w, d, columns, width: int | None):
    """`[block_R, chunk]` in float32; of the first `width` channels if that is given."""
    zeros = extras.get(f"zero{which}")
    if not plan.is_group_scaled:
        w = w[columns, :] if plan.is_output_major else w[:, columns]
        return _dot(plan, x_rd[...], w, width, None if zeros is None else zeros[:, columns])
    size, block_D = plan.group_size, plan.tiling.block_D
    total = jnp.zeros((x_rd.shape[0], plan.chunk), jnp.float32)
    for start in range(0, width or block_D, size):
        channels = slice(start, start + size)
        group = pl.ds(d * (block_D // size) + start // size, 1)
        zeros_1f = None if zeros is None else zeros[group, columns]
        part_rf = _dot(plan, x_rd[:, channels], w[columns, channels], None, zeros_1f)
        total += part_rf * extras[f"scale{which}"][group, columns]
    return total


def _dot(plan: _Plan, x_rd, w, width: int | None, zeros_1f):
    if x_rd.dtype == jnp.int8 and not multiplies_int8(plan.chip):
        x_rd = x_rd.astype(jnp.bfloat16)  # which has integers up to 256
    if x_rd.dtype == FLOAT8 and (width is not None or not reads_float8(plan.chip)):
        x_rd = x_rd.astype(jnp.bfloat16)
    # The matrix unit takes float8 beside bfloat16, in half the time; it cannot be masked.
    is_read = w.dtype == FLOAT8 and x_rd.dtype == jnp.bfloat16 and reads_float8(plan.chip)
    if w.dtype != x_rd.dtype and not (is_read and width is None):
        w = w.astype(x_rd.dtype)
    axis = 1 if plan.is_output_major else 0
    if width is not None:
        # What lies after the last channel is whatever was there: it may be NaN.
        x_rd, w = _first(x_rd, 1, width), _first(w, axis, width)
    y_rf = exact_dot(x_rd, w, 1, axis)
    if zeros_1f is None:
        return y_rf
    return y_rf - jnp.sum(x_rd.astype(jnp.float32), axis=1, keepdims=True) * zeros_1f


def exact_dot(a, b, contract_a: int, contract_b: int):
    """A product in float32; float32 is not rounded to bfloat16, and integers not at all."""
    if a.dtype == jnp.int8:
        contracted = (((contract_a,), (contract_b,)), ((), ()))
        return lax.dot_general(a, b, contracted, preferred_element_type=jnp.int32).astype(
            jnp.float32
        )
    is_exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _first(a, axis: int, width: int):
    """`a` with zeros after the first `width` along an axis."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, a.shape, axis) < width, a, 0)


def _apply_epilogue(plan: _Plan, extras, sums, piece: _Piece, columns):
    """The result, and the residual if it is wanted."""
    if not plan.is_group_scaled and "scale0" in extras:
        sums = [each * extras[f"scale{i}"][:, columns] for i, each in enumerate(sums)]
    if "row_scale" in extras:
        row_scale = _column(extras["row_scale"], piece)
        sums = [each * row_scale for each in sums]
    z_rf, *others = sums
    if "bias" in extras:
        z_rf = z_rf + extras["bias"][:, columns]
    y_rf = result_of(plan.activation, (z_rf, *others))
    if "gate" in extras:
        y_rf = y_rf * _column(extras["gate"], piece)
    return [y_rf, z_rf, *others]


def _column(numbers_1r, piece: _Piece):
    """`[size, 1]`: the numbers of the rows of a piece, out of a block's, which lie in a row."""
    shape = piece.size, numbers_1r.shape[1]
    row_r = piece.start + lax.broadcasted_iota(jnp.int32, shape, 0)
    is_its = row_r == lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(is_its, numbers_1r[...], 0), axis=1, keepdims=True)
