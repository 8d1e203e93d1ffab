# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product in plain JAX: the kernels' reference, and the code that CPUs run.

Gale et al. 2022, MegaBlocks (arXiv:2211.15841), section 3. TPU and GPU run
`jax.lax.ragged_dot`. On CPU that multiplies every row by every expert's matrix (of 512x1024,
measured: 5 times as long for 8 experts, 10 times for 32), so there are loops: over the experts
that have rows, over blocks of the expert's matrix that stay in the cache (a dot in a loop first
copies its operand; from memory that would be as slow as the product), over tiles of the
expert's rows. Other experts' rows in a tile are masked. Tests lower both paths.
Dims: R rows, D inputs, F outputs, E experts; b rows of a tile; K rows of a block of the
matrix as it is stored, X its columns
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.epilogue import apply_epilogue, finite
from pallas_kernels.operands import vary_like
from pallas_kernels.sorted_rows import group_bounds, rows_of_groups, stable_argsort

# Bytes of a block of a matrix. As large as caches hold if products are added up over blocks,
# which costs a pass over the sums for each; smaller if every block has sums of its own.
BLOCK_BYTES, TRANSPOSED_BLOCK_BYTES = 2**22, 2**20
# If most experts have one row or none, the copy of a block costs more than its product.
FEW_ROWS_BLOCK_BYTES = 2**19
MAX_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes of the loops on CPU; the other back ends have their own `Tiling`.

    Attributes:
        rows: number of rows of a tile; R if there are fewer.
        weight_rows: number of rows of a block of an expert's matrix; it divides D, or F of a
            transposed matrix.
    """

    rows: int
    weight_rows: int

    def check(self, leading: int) -> None:
        """Raises ValueError if the tiling does not fit matrices of `leading` rows."""
        if self.rows < 1:
            raise ValueError(f"tiling has rows={self.rows}; use 1 or more")
        if self.weight_rows < 1 or leading % self.weight_rows:
            raise ValueError(
                f"tiling has weight_rows={self.weight_rows}; use a divisor of {leading}"
            )


def default_tiling(
    R: int, leading: int, columns: int, E: int, *, transpose_w: bool = False
) -> Tiling:
    """Tiles of as many rows as an expert has on average, and blocks that fit the cache.

    Args:
        leading, columns: rows and columns of an expert's matrix, as it is stored.
    """
    average = -(-R // E)
    if average > 4:
        # Equal tiles of equal loads, up to a multiple of 8.
        average = -(-average // -(-average // MAX_ROWS))
        average = -(-average // 8) * 8
    block_bytes = TRANSPOSED_BLOCK_BYTES if transpose_w else BLOCK_BYTES
    if R <= E:
        block_bytes = FEW_ROWS_BLOCK_BYTES
    wanted = max(1, block_bytes // (4 * columns))
    return Tiling(min(average, R), _divisor(leading, wanted))


def candidates(
    R: int, leading: int, columns: int, E: int, *, transpose_w: bool = False
) -> list[Tiling]:
    """Tilings around the default one, which comes first."""
    default = default_tiling(R, leading, columns, E, transpose_w=transpose_w)
    rows = {default.rows, *(min(R, max(1, default.rows * a // 2)) for a in (1, 4))}
    sizes = {default.weight_rows}
    sizes |= {_divisor(leading, max(1, default.weight_rows * a // 4)) for a in (1, 16)}
    others = [Tiling(a, b) for a in sorted(rows) for b in sorted(sizes)]
    return [default] + [tiling for tiling in others if tiling != default]


def _divisor(number: int, at_most: int) -> int:
    """The largest divisor up to `at_most`; the number itself if that is far smaller."""
    largest = max(d for d in range(1, min(number, at_most) + 1) if number % d == 0)
    return largest if 4 * largest >= min(number, at_most) else number


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
):
    """As `api.grouped_matmul`, rounded once at the end; with `transpose_w` w is `[E, F, D]`.

    Args:
        has_residual: whether to return the residual of `apply_epilogue`, too, in the dtype of
            x.
        out_dtype: dtype of the result; None is the dtype of x.

    Raises:
        ValueError: `tiling` does not fit.
    """
    out_dtype = out_dtype or x_RD.dtype
    R, (E, *leading_columns) = x_RD.shape[0], w.shape
    F = leading_columns[0 if transpose_w else 1]
    matrices = [w] if w_gate is None else [w, w_gate]
    if 0 in (R, E, F):
        y_RF = jnp.zeros((R, F), out_dtype)
        residual = (y_RF.astype(x_RD.dtype),) * len(matrices)
        return (y_RF, residual) if has_residual else y_RF
    if x_RD.shape[1] == 0:  # sums of nothing, which may still have a bias
        sums = [jnp.zeros((R, F), jnp.float32) for _ in matrices]
    else:
        tiling = tiling or default_tiling(R, *leading_columns, E, transpose_w=transpose_w)
        tiling.check(leading_columns[0])
        sums = [
            jax.lax.platform_dependent(
                x_RD,
                each,
                group_sizes_E,
                # Not a `functools.partial`: its arguments would be traced.
                cpu=lambda *operands: forward_on_cpu(*operands, transpose_w, tiling),
                default=lambda *operands: forward_by_ragged_dot(*operands, transpose_w),
            )
            for each in matrices
        ]
    if w_gate is bias_EF is activation is gate_R is None:
        [y_RF], residual = sums, sums
    else:
        rows = rows_of_groups(group_sizes_E, R)
        y_RF, residual = apply_epilogue(sums, *rows, bias_EF, activation, gate_R)
    y_RF = y_RF.astype(out_dtype)
    if not has_residual:
        return y_RF
    return y_RF, tuple(finite(each, x_RD.dtype).astype(x_RD.dtype) for each in residual)


def weight_gradient(x_RD, dy_RF, group_sizes_E, *, out_dtype, tiling: Tiling | None = None):
    """`dw_e = sum over its rows of x_r dy_r^T`, `[E, D, F]`; 0 for groups without rows.

    Raises:
        ValueError: `tiling` does not fit.
    """
    R, D = x_RD.shape
    F = dy_RF.shape[1]
    E = group_sizes_E.shape[0]
    if 0 in (R, D, F, E):
        return jnp.zeros((E, D, F), out_dtype)
    tiling = tiling or default_tiling(R, D, F, E)
    tiling.check(D)
    return jax.lax.platform_dependent(
        x_RD,
        dy_RF,
        group_sizes_E,
        cpu=lambda *operands: weight_gradient_on_cpu(*operands, out_dtype, tiling),
        default=lambda *operands: weight_gradient_by_ragged_dot(*operands, out_dtype),
    )


@dataclasses.dataclass(frozen=True)
class Groups:
    """The experts that have rows, and their rows, over which the CPU's loops run.

    Attributes:
        expert_E: experts with rows first.
        start_E, end_E: first row of each expert, and the one after its last.
    """

    expert_E: jax.Array
    num_experts: jax.Array
    start_E: jax.Array
    end_E: jax.Array

    @classmethod
    def of(cls, group_sizes_E, R: int) -> "Groups":
        begin_E, end_E = group_bounds(group_sizes_E, R)
        expert_E = stable_argsort(jnp.int32(end_E == begin_E))
        return cls(expert_E, jnp.sum(end_E > begin_E, dtype=jnp.int32), begin_E, end_E)

    def arrays(self) -> tuple[jax.Array, ...]:
        return self.expert_E, self.num_experts, self.start_E, self.end_E

    def tiles(self, e, rows: int):
        """Number of expert e's tiles of `rows` rows."""
        return (self.end_E[e] - self.start_E[e] + rows - 1) // rows

    def tile(self, e, t, rows: int, R: int):
        """The first row that tile t reads, and which of its rows are its own.

        Tiles begin at any row; one that would end after R begins earlier, with its rows before
        the group, or those of the previous tile, masked.
        """
        wanted = self.start_E[e] + t * rows
        first = jnp.minimum(wanted, R - rows)
        row_b = first + jax.lax.iota(jnp.int32, rows)
        return first, (row_b >= wanted) & (row_b < self.end_E[e])


def forward_on_cpu(x_RD, w, group_sizes_E, transpose_w: bool, tiling: Tiling):
    """The loops of the CPU, float32; see the module."""

    def weight_block(e, k):
        corner = (e, k * tiling.weight_rows, 0)
        shape = (1, tiling.weight_rows, w.shape[2])
        return jax.lax.dynamic_slice(w, corner, shape)[0]

    x_RD = vary_like(x_RD, w, group_sizes_E)
    return add_up_blocks(x_RD, weight_block, w.shape[1:], group_sizes_E, transpose_w, tiling)


def add_up_blocks(x_RD, weight_block, shape, group_sizes_E, transpose_w, tiling: Tiling):
    """Adds up the products of rows with blocks of their experts' matrices, `[R, F]` float32.

    Args:
        x_RD: varies over the mesh axes that the matrices and the sizes vary over, as the sums
            do (`vary_like`).
        weight_block: `(e, k)` -> the k-th block of `tiling.weight_rows` rows of expert e's
            matrix, floating point; each block is computed once.
        shape: shape of an expert's matrix, as it is stored.
    """
    R, K = x_RD.shape[0], tiling.weight_rows
    b = min(tiling.rows, R)
    F = shape[0] if transpose_w else shape[1]
    groups = Groups.of(group_sizes_E, R)
    zeros_RF = jax.lax.full_like(x_RD, 0, jnp.float32, shape=(R, F))

    def expert(i, y_RF):
        e = groups.expert_E[i]

        def block(k, y_RF):
            w_KX = weight_block(e, k).astype(jnp.float32)

            def tile(t, y_RF):
                first, counts_b = groups.tile(e, t, b, R)
                if transpose_w:  # the block is of F
                    x_bD = jax.lax.dynamic_slice_in_dim(x_RD, first, b).astype(jnp.float32)
                    add_bX, corner = _dot(w_KX, x_bD, 1, 1).T, (first, k * K)
                else:  # the block is of D
                    x_bK = jax.lax.dynamic_slice(x_RD, (first, k * K), (b, K)).astype(
                        jnp.float32
                    )
                    add_bX, corner = _dot(x_bK, w_KX, 1, 0), (first, 0)
                old_bX = jax.lax.dynamic_slice(y_RF, corner, add_bX.shape)
                new_bX = jnp.where(counts_b[:, None], old_bX + add_bX, old_bX)
                return jax.lax.dynamic_update_slice(y_RF, new_bX, corner)

            return jax.lax.fori_loop(0, groups.tiles(e, b), tile, y_RF)

        return jax.lax.fori_loop(0, shape[0] // K, block, y_RF)

    return jax.lax.fori_loop(0, groups.num_experts, expert, zeros_RF)


def weight_gradient_on_cpu(x_RD, dy_RF, group_sizes_E, out_dtype, tiling: Tiling):
    """The loops of the CPU; see the module."""
    R, D = x_RD.shape
    F = dy_RF.shape[1]
    E = group_sizes_E.shape[0]
    b, K = min(tiling.rows, R), tiling.weight_rows
    x_RD = vary_like(x_RD, dy_RF, group_sizes_E)
    groups = Groups.of(group_sizes_E, R)
    zeros_EDF = jax.lax.full_like(x_RD, 0, out_dtype, shape=(E, D, F))
    zeros_KF = jax.lax.full_like(x_RD, 0, jnp.float32, shape=(K, F))

    def expert(i, dw_EDF):
        e = groups.expert_E[i]

        def block(k, dw_EDF):
            def tile(t, dw_KF):
                first, counts_b = groups.tile(e, t, b, R)
                # Both are masked, since 0 times NaN is NaN.
                x_bK = jax.lax.dynamic_slice(x_RD, (first, k * K), (b, K))
                dy_bF = jax.lax.dynamic_slice_in_dim(dy_RF, first, b)
                x_bK, dy_bF = (
                    jnp.where(counts_b[:, None], rows_bX.astype(jnp.float32), 0)
                    for rows_bX in (x_bK, dy_bF)
                )
                return dw_KF + _dot(x_bK, dy_bF, 0, 0)

            dw_KF = jax.lax.fori_loop(0, groups.tiles(e, b), tile, zeros_KF)
            corner = (e, k * K, 0)
            return jax.lax.dynamic_update_slice(dw_EDF, dw_KF[None].astype(out_dtype), corner)

        return jax.lax.fori_loop(0, D // K, block, dw_EDF)

    return jax.lax.fori_loop(0, groups.num_experts, expert, zeros_EDF)


def _dot(a, b, contract_a: int, contract_b: int):
    return jax.lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((), ())))


def forward_by_ragged_dot(x_RD, w, group_sizes_E, transpose_w: bool):
    """The product by `jax.lax.ragged_dot`, for TPU and GPU; float32, 0 past the groups."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_w else 1,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    begin_E, end_E = group_bounds(group_sizes_E, x_RD.shape[0])
    x_RD = _zero_from(x_RD, end_E[-1])
    w = w.astype(x_RD.dtype)
    y_RF = jax.lax.ragged_dot_general(
        x_RD,
        w,
        end_E - begin_E,
        numbers,
        precision=_precision(x_RD.dtype),
        preferred_element_type=jnp.float32,
    )
    return _zero_from(y_RF, end_E[-1])


def weight_gradient_by_ragged_dot(x_RD, dy_RF, group_sizes_E, out_dtype):
    """The gradient by `jax.lax.ragged_dot`, which TPU and GPU run."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(),
    )
    begin_E, end_E = group_bounds(group_sizes_E, x_RD.shape[0])
    x_RD, dy_RF = (_zero_from(array, end_E[-1]) for array in (x_RD, dy_RF))
    dw_EDF = jax.lax.ragged_dot_general(
        x_RD,
        dy_RF,
        end_E - begin_E,
        numbers,
        precision=_precision(x_RD.dtype),
        preferred_element_type=jnp.float32,
    )
    return dw_EDF.astype(out_dtype)


def _precision(dtype) -> jax.lax.Precision | None:
    """By default accelerators round float32 operands to 8 or 11 bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _zero_from(x_RX, row):
    is_used_R = jax.lax.iota(jnp.int32, x_RX.shape[0]) < row
    return jnp.where(is_used_R[:, None], x_RX, 0)
