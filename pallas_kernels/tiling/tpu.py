# SPDX-License-Identifier: Apache-2.0
"""Block sizes of the TPU kernels: those that fit, ordered by an estimate of their time.

The estimate is a roofline: the memory traffic or the steps of the pipeline, whichever takes
longer. In a step a matrix block is pushed into the matrix unit, which takes the same time
whatever the number of rows it meets, and multiplied; the shorter of the two is mostly hidden
behind the longer. The constants were read off the instructions that the compiler schedules for
matrices of 1024x1024 and 16 to 256 rows (`aot/tpu_compiler.py`), which they match to within a
tenth; no chip has been timed, and `candidates` are for a machine that has one.
Dims: R rows, D inputs, F outputs, E experts
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.tile_schedule import num_blocks
from pallas_kernels.quantization.qtensor import FLOAT8
from pallas_kernels.tpu_chip import MIB, Chip, current_chip

# From schedules: control of the pipeline, and the rows whose products take as long as their
# matrix takes to get into the matrix unit, by generation. An integer is converted on its way; a
# v4 does that by way of 32 bits, in 7 instructions for 1024 of them, so there they save memory
# but no time.
STEP_S = 1.5e-7
PUSH_ROWS = {4: 70, 5: 55, 6: 115, 7: 80}
PUSH_ROWS_QUANTIZED = {4: 430, 5: 60, 6: 120, 7: 140}
# A v4 does not multiply int8, a tpu7x converts it. Where it is multiplied, products and
# pushes take half the time of bfloat16.
INT8_GENERATIONS = (5, 6)
# The matrix unit reads float8 itself, from v5 on: getting into the unit takes as long as these
# bfloat16 rows. Only a tpu7x multiplies it by float8 in half the time.
PUSH_ROWS_FLOAT8 = {4: 880, 5: 40, 6: 125, 7: 65}
FLOAT8_GENERATIONS = (7,)
# The part of the shorter of products and pushes that is not hidden.
EXPOSED = 0.25
# A weight gradient's sum is loaded and stored once per step, half of it while the unit is busy.
SUM_S = 4e-13
# Larger bodies compile slowly, and spill: [4096, 1024] takes 3 times the bundles of
# [4096, 512] on a v5e. So larger blocks are multiplied in chunks of their columns.
MAX_MATRIX = 1 << 21
MAX_PRODUCTS = 1 << 29
ROWS = (16, 32, 64, 128, 256, 512)
LANES = 128
# Rows begin at multiples of a tile of memory, and are multiplied in pieces of 128 rows and one
# of a multiple of 32.
ROW_UNIT = 16
PIECE_ROWS = 128
PIECE_STEP = 32


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of the blocks of a TPU kernel.

    Attributes:
        block_R: rows. The weight gradient sums over these.
        block_D: channels of the contraction; the whole of D is best if it fits, since matrix
            blocks are then fetched once per expert instead of once per block of rows. The
            weight gradient writes blocks of [block_D, block_F].
        block_F: output features.
        cores: tensor cores that share the columns; 2 on a v4 or v5p used as one device.
    """

    block_R: int
    block_D: int
    block_F: int
    cores: int = 1

    @property
    def first_pieces(self) -> tuple[int, ...]:
        """Sizes that the first piece of a tile's rows may have (`tpu_product.py`)."""
        most = min(self.block_R, PIECE_ROWS)
        return (*range(PIECE_STEP, most, PIECE_STEP), most)

    def multiplied_rows(self, begin_P, end_P):
        """Rows that `tpu_product.py` multiplies for the rows of each tile, `[P]`."""
        spanned_P = end_P - begin_P // ROW_UNIT * ROW_UNIT
        further_P, rest_P = np.divmod(np.maximum(spanned_P - 1, 0), PIECE_ROWS)
        first_P = np.asarray(self.first_pieces)[rest_P // PIECE_STEP]
        return np.where(end_P > begin_P, first_P + further_P * PIECE_ROWS, 0)

    @property
    def unrolled_rows(self) -> int:
        """Rows whose products are instructions of their own."""
        return sum(self.first_pieces) + PIECE_ROWS * (self.block_R > PIECE_ROWS)

    @property
    def chunk(self) -> int:
        """Columns of a matrix block that are multiplied at a time; all, or a part of them."""
        parts = 1
        while self.block_F % (2 * parts * LANES) == 0 and (
            self.block_D * self.block_F // parts > MAX_MATRIX
            or self.unrolled_rows * self.block_D * self.block_F // parts > MAX_PRODUCTS
        ):
            parts *= 2
        return self.block_F // parts

    def check(self, D: int, F: int, row_unit: int = ROW_UNIT) -> None:
        """Raises ValueError if no TPU can address the blocks.

        Args:
            row_unit: row unit of the rows' dtype, see `row_unit_of`.
        """
        unit = PIECE_ROWS if self.block_R > PIECE_ROWS else row_unit
        if self.block_R < row_unit or self.block_R % unit:
            raise ValueError(
                f"block_R={self.block_R} is not a multiple of {unit}; use one of {ROWS}"
            )
        for name, block, size in (("block_D", self.block_D, D), ("block_F", self.block_F, F)):
            if block != size and (block % LANES or not 0 < block < size):
                raise ValueError(
                    f"{name}={block} is neither {size} nor a smaller multiple of {LANES}; "
                    f"use {size} or one of those"
                )
        if self.cores < 1:
            raise ValueError(f"cores={self.cores} is less than 1; use 1 or the chip's cores")


def multiplies_int8(chip: Chip) -> bool:
    """Whether the chip's matrix unit multiplies int8 by int8 without converting it."""
    return chip.generation in INT8_GENERATIONS


def reads_float8(chip: Chip) -> bool:
    """Whether the chip's matrix unit takes float8_e4m3fn as it is."""
    return chip.generation >= 5


def row_unit_of(x_dtype) -> int:
    """The unit at whose multiples pieces of a block's rows begin: rows of a memory tile."""
    return PIECE_STEP if jnp.dtype(x_dtype).itemsize == 1 else ROW_UNIT


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product, for which tile sizes are chosen.

    Attributes:
        R, D, F, E: rows, contraction, output features, experts; for a weight gradient the
            shapes of [E, D, F] and the rows summed over.
        x_bytes, w_bits: bytes of an element of the rows, and bits of an element of the
            matrices.
        group_size: channels that share a scale, if D has more than one group.
        is_weight_gradient: whether it is the weight gradient's kernel.
        num_matrices: number of matrices: 2 in a gated linear unit, whose tiles of rows are
            multiplied by both; else 1.
        num_results: number of result arrays: 1, and the arrays of a residual.
        y_bytes: bytes of an element of the result; None is x_bytes.
        is_float8: whether weights of 8 bits are floating point, and rows of 8 bits.
    """

    R: int
    D: int
    F: int
    E: int
    x_bytes: int
    w_bits: int
    group_size: int | None = None
    is_weight_gradient: bool = False
    num_matrices: int = 1
    num_results: int = 1
    y_bytes: int | None = None
    is_float8: bool = False

    @classmethod
    def of(cls, R, D, F, E, x_dtype, w_dtype, out_dtype=None, **fields) -> "Problem":
        x_bytes = jnp.dtype(x_dtype).itemsize
        fields["y_bytes"] = jnp.dtype(out_dtype or x_dtype).itemsize
        fields["is_float8"] = w_dtype == FLOAT8
        return cls(R, D, F, E, x_bytes, jax.dtypes.itemsize_bits(w_dtype), **fields)

    @property
    def result_bytes(self) -> int:
        """Bytes of one element of each result."""
        return (self.y_bytes or self.x_bytes) + (self.num_results - 1) * self.x_bytes


def candidates(problem: Problem) -> list[Tiling]:
    """Tilings that fit the memory of the current chip, the best estimate first.

    Raises:
        ValueError: no tiling fits.
    """
    chip = current_chip()
    sizes = [block for block in ROWS if problem.x_bytes > 1 or block >= PIECE_STEP]
    rows = [block for block in sizes if block < problem.R + 16] or sizes[:1]
    tilings = [
        Tiling(*blocks, cores=chip.cores)
        for blocks in itertools.product(rows, _depths(problem), _columns(problem.F))
    ]
    # Half of the memory: the compiler needs room for what does not fit its registers.
    fitting = [
        tiling
        for tiling in tilings
        if vmem_bytes(problem, tiling) <= chip.vmem_bytes // 2 and _is_small(problem, tiling)
    ]
    if not fitting:
        raise ValueError(
            f"no blocks of {problem} fit {chip.vmem_bytes} bytes of vector memory; use the "
            "reference implementation"
        )
    return sorted(fitting, key=lambda tiling: estimated_seconds(problem, tiling))


def _is_small(problem: Problem, tiling: Tiling) -> bool:
    """Whether the body that the compiler unrolls is small enough."""
    columns, rows = tiling.block_F, tiling.block_R
    if not problem.is_weight_gradient:
        columns, rows = tiling.chunk, tiling.unrolled_rows
    matrix = tiling.block_D * columns
    return matrix <= MAX_MATRIX and rows * matrix <= MAX_PRODUCTS


def _columns(size: int) -> list[int]:
    blocks = [block for block in (128, 256, 512, 1024, 2048, 4096) if block < size]
    return [*blocks, size] if size <= 4096 else blocks


def _depths(problem: Problem) -> list[int]:
    """All of D, or pieces of it; without a remainder unless D has no such pieces."""
    D, unit = problem.D, max(problem.group_size or 1, LANES)
    powers = 4096, 2048, 1024, 512, 256
    pieces = [piece for piece in powers if piece < D and piece % unit == 0]
    if not pieces:  # if groups divide none of these
        pieces = [unit * n for n in (8, 4, 2, 1) if unit * n <= min(D - 1, max(powers))]
    return [D, *([piece for piece in pieces if D % piece == 0] or pieces)]


def vmem_bytes(problem: Problem, tiling: Tiling) -> int:
    """Vector memory of the kernel's buffers, and of its sums in float32, once."""
    r, d, f = tiling.block_R, tiling.block_D, tiling.block_F
    if problem.is_weight_gradient:
        buffers = 2 * r * (d + f) * problem.x_bytes + 2 * d * f * problem.w_bits // 8
        return buffers + 4 * d * f
    buffers = 2 * r * (d * problem.x_bytes + f * problem.result_bytes)
    buffers += problem.num_matrices * 3 * d * f * problem.w_bits // 8
    is_widened = problem.w_bits < 16 and current_chip().generation == 4
    return buffers + 4 * r * f * problem.num_matrices + 4 * d * f * is_widened


def vmem_limit_bytes(problem: Problem, tiling: Tiling) -> int:
    """The vector memory that the kernel may take: its buffers and room for the compiler.

    No more, because XLA keeps operands of other operations in the rest.
    """
    needed = vmem_bytes(problem, tiling)
    return min(needed + max(needed // 2, 8 * MIB), current_chip().vmem_bytes * 15 // 16)


def estimated_seconds(problem: Problem, tiling: Tiling) -> float:
    """Estimates a product's time on the current chip, for even group sizes; see the module."""
    chip = current_chip()
    R, D, F, E = problem.R, problem.D, problem.F, problem.E
    r, d, f = tiling.block_R, tiling.block_D, tiling.block_F
    num_R, num_D, num_F = (num_blocks(*pair) for pair in ((R, r), (D, d), (F, f)))
    tiles = num_R + min(E, R) - 1
    steps = tiles * num_D * (-(-num_F // tiling.cores) * tiling.cores)
    # A float32 product is made of six bfloat16 ones; one of 8 bits is half of one.
    by_generation = FLOAT8_GENERATIONS if problem.is_float8 else INT8_GENERATIONS
    is_halved = problem.x_bytes == 1 and chip.generation in by_generation
    passes = 6 if problem.x_bytes == 4 else 0.5 if is_halved else 1
    row_s = passes * 2 * d * f / chip.flops_per_s
    if problem.is_weight_gradient:
        steps_s = steps * (STEP_S + r * row_s + SUM_S * d * f)
        traffic = R * (D * num_F + F * num_D) * problem.x_bytes
        traffic += E * D * F * problem.w_bits // 8
        first = r * (d + f) * problem.x_bytes
    else:
        rows, pieces = multiplied_rows(problem, tiling)
        push_rows = pieces * _push_rows(problem, chip, passes)
        rows = max(rows, push_rows) + EXPOSED * min(rows, push_rows)
        steps_s = steps * STEP_S + steps / tiles * rows * row_s * problem.num_matrices
        # An uncut matrix block stays for all its rows, and rows for all their experts.
        times_w = min(E, R) if num_D == 1 else tiles
        rows_x = R if num_D == 1 else tiles * r
        traffic = problem.num_matrices * times_w * D * F * problem.w_bits // 8
        traffic += rows_x * D * num_F * problem.x_bytes + R * F * problem.result_bytes
        first = problem.num_matrices * d * f * problem.w_bits // 8
        first += r * d * problem.x_bytes
    # Nothing is multiplied while the first blocks arrive.
    return max(steps_s, traffic / chip.bytes_per_s) / tiling.cores + (first / chip.bytes_per_s)


def _push_rows(problem: Problem, chip: Chip, passes: float) -> float:
    """Rows whose products take as long as their matrix takes to get into the matrix unit."""
    if problem.is_float8 and problem.x_bytes < 4:  # beside float32 it is converted
        return PUSH_ROWS_FLOAT8[chip.generation] / passes
    is_as_it_is = problem.w_bits >= 16 or passes < 1
    return (PUSH_ROWS if is_as_it_is else PUSH_ROWS_QUANTIZED)[chip.generation]


def multiplied_rows(problem: Problem, tiling: Tiling) -> tuple[float, float]:
    """Rows that all tiles multiply, about, and in how many pieces, for even sizes of groups.

    A tile multiplies its own rows, up to a tile of memory before them, and the excess of its
    first piece's size.
    """
    R, E, r = problem.R, min(problem.E, problem.R), tiling.block_R
    tiles = num_blocks(R, r) + E - 1
    if r <= PIECE_STEP:
        return tiles * r, tiles
    pieces = tiles + max(0, R / PIECE_ROWS - tiles / 2) * (r > PIECE_ROWS)
    return min(R + tiles * (ROW_UNIT + PIECE_STEP) / 2, tiles * r), pieces
