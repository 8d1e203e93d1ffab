# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product on NVIDIA GPUs before and after Hopper, and its weights' gradient.

An A100, L4 or RTX has no wgmma, and Blackwell has a different one. `jax.lax.ragged_dot` is no
way out: compiled for them, it multiplies every row by every expert's matrix. JAX deprecates
this back end of Pallas, Triton, from 0.11 on; it is used while JAX ships it, for these chips,
and on Hopper for what the Hopper kernel refuses, float32.

No schedule is made before the kernel: each block of threads finds its tile among the experts
by prefix sums of their sizes, a vector of E elements. Tiles begin at any row.
Dims: R rows, D inputs, F outputs, E experts, G groups: the experts', then the rows of none;
T rows of a tile, K one step of D (of rows in the gradient), M inputs and N features of a
tile; I rows and J columns of a tile of a matrix as it is stored
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.epilogue import finite, result_of
from pallas_kernels.operands import result_type
from pallas_kernels.tiling import triton as tilings
from pallas_kernels.tiling.triton import Tiling

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def refusal(x_dtype, w_dtype, R: int, D: int, F: int, E: int) -> str | None:
    """The reason why the kernels cannot run with these, and what to do; None if they can."""
    if x_dtype not in DTYPES or w_dtype != x_dtype:
        return (
            f"rows are {jnp.dtype(x_dtype)} and weights {jnp.dtype(w_dtype)}; cast both to "
            "float32, bfloat16 or float16"
        )
    if 0 in (R, D, F, E):
        return (
            f"R={R}, D={D}, F={F}, E={E}; nothing to multiply: use implementation='reference'"
        )
    return None


def default_tiling(R: int, D: int, F: int, E: int, dtype=jnp.bfloat16) -> Tiling:
    """The tiling by rows per expert."""
    return tilings.default_tiling(R, E, dtype)


def candidates(R: int, D: int, F: int, E: int, dtype=jnp.bfloat16) -> list[Tiling]:
    """Tilings worth a measurement, the default first."""
    return tilings.candidates(R, E, dtype)


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
    tiling: Tiling | None = None,
    out_dtype=None,
    interpret: bool = False,
):
    """As `api.grouped_matmul`; with `transpose_w` w is `[E, F, D]`.

    Args:
        has_residual: whether to return the residual of `apply_epilogue`, too, in the dtype of
            x.
        out_dtype: dtype of the result; None is the dtype of x.

    Raises:
        ValueError: `refusal` has a reason, or the tiling is not possible.
    """
    F = w.shape[1] if transpose_w else w.shape[2]
    if reason := refusal(x_RD.dtype, w.dtype, *x_RD.shape, F, w.shape[0]):
        raise ValueError(reason)
    matrices = [(each,) for each in (w, w_gate) if each is not None]

    def product(at: Place, first, K: int, x_ref, w_ref):
        depth_K, D = first + iota(K), x_RD.shape[1]
        x_TK = at.rows_of(x_ref, depth_K)
        if transpose_w:
            return dot(x_TK, at.matrix_of(w_ref, (at.feature_N, F), (depth_K, D)), 1, 1)
        return dot(x_TK, at.matrix_of(w_ref, (depth_K, D), (at.feature_N, F)), 1, 0)

    y_RF, *residual = multiply_rows(
        x_RD,
        matrices,
        group_sizes_E,
        F,
        product,
        tiling=tiling,
        bias_EF=bias_EF,
        activation=activation,
        gate_R=gate_R,
        has_residual=has_residual,
        out_dtype=out_dtype,
        interpret=interpret,
        name="grouped_matmul",
    )
    return (y_RF, tuple(residual)) if has_residual else y_RF


@dataclasses.dataclass(frozen=True)
class Place:
    """A tile of the product: its expert, and which rows and features it has.

    Attributes:
        sizes: (R, D, F), past which there is nothing to read.
        expert: E for the rows of no expert.
        end: the row after the last one of the expert.
    """

    sizes: tuple[int, int, int]
    expert: Any
    row_T: Any
    end: Any
    feature_N: Any

    def rows_of(self, x_ref, depth_K):
        """The rows of the tile's expert, `[T, K]`; zeros for others."""
        mask = (self.row_T < self.end)[:, None] & (depth_K < self.sizes[1])[None]
        return plgpu.load(x_ref.at[self.row_T[:, None], depth_K[None]], mask=mask, other=0)

    def matrix_of(self, w_ref, *axes):
        """A tile of the expert's matrix; `axes` are each axis's indices and their bound."""
        (row_I, num_rows), (column_J, num_columns) = axes
        place = w_ref.at[self.expert, row_I[:, None], column_J[None]]
        if num_rows % row_I.shape[0] == 0 and num_columns % column_J.shape[0] == 0:
            return plgpu.load(place)
        mask = (row_I < num_rows)[:, None] & (column_J < num_columns)[None]
        return plgpu.load(place, mask=mask, other=0)

    def of_features(self, ref, *index):
        """Values of the expert's features, `[1, N]`."""
        mask = self.feature_N < self.sizes[2]
        place = ref.at[(self.expert, self.feature_N, *index)]
        return plgpu.load(place, mask=mask, other=0)[None]


def dot(a, b, contract_a: int, contract_b: int):
    """float32 sums; float32 operands are not rounded to tf32."""
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def multiply_rows(
    x_RD,
    matrices,
    group_sizes_E,
    F: int,
    product: Callable,
    *,
    finish: Callable | None = None,
    tiling: Tiling | None,
    bias_EF,
    activation: str | None,
    gate_R,
    has_residual: bool = False,
    out_dtype=None,
    interpret: bool,
    name: str,
):
    """`[R, F]` in `out_dtype`, and with `has_residual` then the residual, in the dtype of x.

    Args:
        matrices: one, or two of a gated linear unit, each the arrays of which it is made.
        product: function `(place, first, K, x, *arrays)`: the float32 sums `[T, N]` of the step
            of K channels from `first` on.
        finish: function `(sums, place, *arrays)` applied to the sums of all steps.
    """
    (R, D), (E,) = x_RD.shape, group_sizes_E.shape
    if tiling is None:
        tiling = tilings.default_tiling(R, E, x_RD.dtype, len(matrices))
    tiling.check()
    named = {"bias": bias_EF, "gate": gate_R}
    named = {key: each for key, each in named.items() if each is not None}
    dtypes = [out_dtype or x_RD.dtype] + [x_RD.dtype] * (len(matrices) * has_residual)
    arrays = [each for one in matrices for each in one]
    operands = [group_sizes_E, x_RD, *arrays, *named.values()]
    # At most one tile that is not full for each expert with rows, and for the rows of none.
    tiles = R // tiling.rows + min(E, R) + 1

    def body(*refs):
        sizes_ref, x_ref, *refs = refs
        refs, results = refs[: len(operands) - 2], refs[len(operands) - 2 :]
        extras = dict(zip(named, refs[len(arrays) :], strict=True))
        each = len(arrays) // len(matrices)
        parts = [refs[i * each : (i + 1) * each] for i in range(len(matrices))]
        _tile(
            (R, D, F),
            E,
            tiling,
            sizes_ref,
            x_ref,
            parts,
            extras,
            results,
            product,
            finish,
            activation,
        )

    grid = (tiles, pl.cdiv(F, tiling.features))
    results = [((R, F), each) for each in dtypes]
    return _run(body, operands, results, grid, tiling, interpret, name)


def _run(body, operands, results, grid, tiling: Tiling, interpret: bool, name: str) -> list:
    """The results of a kernel, on a GPU or interpreted; the sizes of the groups come first.

    The interpreter moves a tile that reaches out of bounds, masked or not: its arrays are
    longer by the longest side of a tile.
    """
    sizes_E, *arrays = operands
    shapes = [shape for shape, _ in results]
    if interpret:
        most = max(tiling.rows, tiling.features, tiling.depth)
        arrays = [jnp.pad(each, [(0, most)] * each.ndim) for each in arrays]
        results = [(tuple(size + most for size in shape), each) for shape, each in results]
    found = pl.pallas_call(
        body,
        out_shape=[result_type(*each, *operands) for each in results],
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name=name,
    )(sizes_E, *arrays)
    return [each[tuple(map(slice, shape))] for each, shape in zip(found, shapes, strict=True)]


def _tile(
    sizes, E, tiling, sizes_ref, x_ref, parts, extras, results, product, finish, activation
):
    """One block of threads: a tile of rows of one group, by a tile of features."""
    R, D, F = sizes
    group, row_T, end = _rows_of_tile(sizes_ref, pl.program_id(0), tiling.rows, R)
    has_expert = group < E
    feature_N = pl.program_id(1) * tiling.features + iota(tiling.features)
    at = Place(sizes, lax.min(group, jnp.int32(E - 1)), row_T, end, feature_N)

    def step(k, sums):
        first = k * tiling.depth
        return [
            sum_TN + product(at, first, tiling.depth, x_ref, *part)
            for sum_TN, part in zip(sums, parts, strict=True)
        ]

    steps = lax.select(has_expert, jnp.int32(pl.cdiv(D, tiling.depth)), jnp.int32(0))
    zero_TN = jnp.zeros((tiling.rows, tiling.features), jnp.float32)
    sums = lax.fori_loop(0, steps, step, [zero_TN] * len(parts))
    if finish is not None:
        sums = [finish(sum_TN, at, *part) for sum_TN, part in zip(sums, parts, strict=True)]
    z_TN, *others = sums
    if "bias" in extras:
        z_TN = z_TN + at.of_features(extras["bias"]).astype(jnp.float32)
    y_TN = result_of(activation, (z_TN, *others))
    if "gate" in extras:
        gate_T = plgpu.load(extras["gate"].at[row_T], mask=row_T < end, other=0)
        y_TN = y_TN * gate_T.astype(jnp.float32)[:, None]
    mask = (row_T < end)[:, None] & (feature_N < F)[None]
    y_ref, *residual_refs = results
    stores = [(y_ref, y_TN)]
    stores += [
        (ref, finite(value_TN, ref.dtype))
        for ref, value_TN in zip(residual_refs, [z_TN, *others], strict=False)
    ]
    for ref, value_TN in stores:
        # Drops what parameters of the last expert made of rows that have no expert.
        value_TN = jnp.where(has_expert, value_TN, 0.0).astype(ref.dtype)
        plgpu.store(ref.at[row_T[:, None], feature_N[None]], value_TN, mask=mask)


def _rows_of_tile(sizes_ref, tile, rows: int, R: int):
    """(group, row_T, end) of the n-th tile: the rows T, and the one after the group's last.

    Group E are the rows of no expert. A tile past the last one has a group of its own and
    no rows: `end` is 0.
    """
    group_G, begin_G, end_G = _bounds(sizes_ref, R)
    tiles_G = (end_G - begin_G + (rows - 1)) // rows
    tile_end_G = jnp.cumsum(tiles_G)
    group = _pick(tile_end_G <= tile, 1)
    is_own_G = group_G == group
    first_tile = _pick(is_own_G, tile_end_G - tiles_G)
    end = _pick(is_own_G, end_G)
    first = lax.select(
        end > 0, _pick(is_own_G, begin_G) + (tile - first_tile) * rows, jnp.int32(0)
    )
    return group, first + iota(rows), end


def _bounds(sizes_ref, R: int):
    """(group_G, begin_G, end_G): rows of each expert's group, and then of none, cut at R."""
    (E,) = sizes_ref.shape
    group_G = iota(1 << E.bit_length())  # at least E + 1
    size_G = plgpu.load(sizes_ref.at[group_G], mask=group_G < E, other=0)
    size_G = jnp.where(group_G == E, R, size_G)
    sum_G = jnp.cumsum(size_G)
    return group_G, jnp.minimum(sum_G - size_G, R), jnp.minimum(sum_G, R)


def _pick(is_own_G, value_G):
    return jnp.sum(jnp.where(is_own_G, value_G, jnp.int32(0)))


def iota(size: int):
    return lax.iota(jnp.int32, size)


def weight_gradient(
    x_RD,
    dy_RF,
    group_sizes_E,
    *,
    out_dtype,
    tiling: Tiling | None = None,
    interpret: bool = False,
):
    """`dw_e = x_e^T dy_e` over the rows of each expert, `[E, D, F]`; zero without rows.

    Raises:
        ValueError: `refusal` has a reason, or the tiling is not possible.
    """
    (R, D), F, (E,) = x_RD.shape, dy_RF.shape[1], group_sizes_E.shape
    if reason := refusal(x_RD.dtype, dy_RF.dtype, R, D, F, E):
        raise ValueError(reason)
    if tiling is None:
        is_wide = x_RD.dtype.itemsize == 2
        tiling = Tiling(32, *((128, 128, 8) if is_wide else (64, 64, 4)))
    tiling.check()

    def body(sizes_ref, x_ref, dy_ref, dw_ref):
        expert = pl.program_id(2)
        group_G, begin_G, end_G = _bounds(sizes_ref, R)
        begin, end = (_pick(group_G == expert, each) for each in (begin_G, end_G))
        depth_M = pl.program_id(1) * tiling.depth + iota(tiling.depth)
        feature_N = pl.program_id(0) * tiling.features + iota(tiling.features)

        def step(k, dw_MN):
            row_K = begin + k * tiling.rows + iota(tiling.rows)

            def rows_of(ref, column, size):
                mask = (row_K < end)[:, None] & (column < size)[None]
                return plgpu.load(ref.at[row_K[:, None], column[None]], mask=mask, other=0)

            return dw_MN + dot(rows_of(x_ref, depth_M, D), rows_of(dy_ref, feature_N, F), 0, 0)

        steps = (end - begin + (tiling.rows - 1)) // tiling.rows
        zero_MN = jnp.zeros((tiling.depth, tiling.features), jnp.float32)
        dw_MN = lax.fori_loop(0, steps, step, zero_MN)
        mask = (depth_M < D)[:, None] & (feature_N < F)[None]
        place = dw_ref.at[expert, depth_M[:, None], feature_N[None]]
        plgpu.store(place, dw_MN.astype(out_dtype), mask=mask)

    grid = pl.cdiv(F, tiling.features), pl.cdiv(D, tiling.depth), E
    [dw_EDF] = _run(
        body,
        (group_sizes_E, x_RD, dy_RF),
        [((E, D, F), out_dtype)],
        grid,
        tiling,
        interpret,
        "grouped_matmul_weight_gradient",
    )
    return dw_EDF
