# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product on Hopper GPUs (Mosaic GPU, wgmma), and its weights' gradient.

Bfloat16 and float16 with float32 accumulation. The transposed product reads the same weights
through transposed descriptors of shared memory: nothing is copied.

What Mosaic GPU's interpreter runs, in JAX 0.10.2, 0.11.2 and 0.12.0.1 alike, and what replaces
the rest (`mosaic_gpu.Mosaic`), with the same arithmetic in the same order:

    the schedule, the ring of stages, its barriers, the stores of a group's rows   as shipped
    the masks of the weights' gradient, the epilogue, sums in parts                 as shipped
    transposed views of tiles (0.10.2 reads none)              copies, `Mosaic.transposed`
    swizzled tiles (0.10.2 slices none), register layouts       plain shared memory, no layouts
    registers as operand of wgmma                               through shared memory
    int4 and int8 conversion by prmt and lop3                   XLA's conversion
    fragments of integers, where registers have them            put in order, then converted
    zeros for copies out of bounds                              operands padded to whole tiles
    copies that are still under way                             copies that are done at once
    prefetches into the L2 cache                                none
Dims: R rows, D inputs, F outputs, E experts; P tiles of rows, T rows of a tile,
K one step of D, M features of a tile
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.epilogue import Epilogue, apply_epilogue, finite
from pallas_kernels.grouped_matmul import gpu_weight_gradient
from pallas_kernels.grouped_matmul.gpu_product import Weights, swap_ab
from pallas_kernels.mosaic_gpu import Mosaic, padded
from pallas_kernels.sorted_rows import rows_before
from pallas_kernels.tiling.gpu import (
    Tiling,
    candidates_around,
    checked,
    default_panel,
    default_splits,
    fitted,
    tile_of_rows,
    with_parts,
)

DTYPES = (jnp.bfloat16, jnp.float16)
ALIGNMENT = 64


def refusal(x_dtype, w_dtype, R: int, D: int, F: int, E: int) -> str | None:
    """The reason why the kernels cannot run with these, and what to do; None if they can."""
    if x_dtype not in DTYPES:
        return (
            f"rows are {jnp.dtype(x_dtype)}; Hopper's tensor cores take bfloat16 and float16 "
            "here: cast them, or use implementation='reference'"
        )
    if w_dtype != x_dtype:
        return (
            f"weights are {jnp.dtype(w_dtype)} and rows {jnp.dtype(x_dtype)}; cast one to the "
            "other's dtype"
        )
    if 0 in (R, D, F, E):
        return (
            f"R={R}, D={D}, F={F}, E={E}; nothing to multiply: use implementation='reference'"
        )
    return None


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def default_tiling(
    R: int, D: int, F: int, E: int, dtype=jnp.bfloat16, num_matrices: int = 1
) -> Tiling:
    """The tiling by rows per expert: deep steps for few, wide tiles for many.

    With few rows, reading the weights bounds the time. Two matrices have one accumulator each,
    so that tiles have at most 128 rows.
    """
    tile_n = min(tile_of_rows(R, E), 256 // num_matrices)
    deep = 128 if D % 128 == 0 and tile_n <= 64 else 64
    tiling = Tiling(tile_m=64, tile_n=tile_n, tile_k=deep)
    tiling = dataclasses.replace(tiling, splits=default_splits(tiling, R, D, F, E))
    panel = F if tile_n <= 64 else default_panel(tiling, D, F, 16, num_matrices)
    return fitted(
        dataclasses.replace(tiling, panel=panel),
        dtype,
        dtype,
        most=6,
        num_matrices=num_matrices,
    )


def candidates(R: int, D: int, F: int, E: int, dtype=jnp.bfloat16) -> list[Tiling]:
    """Tilings worth a measurement, the default first."""
    return candidates_around(
        default_tiling(R, D, F, E, dtype),
        R,
        F,
        E,
        (64, 128),
        dtype,
        dtype,
        lambda tiling: checked(tiling, D, dtype, dtype),
    )


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
    interpret: bool = False,
):
    """As `api.grouped_matmul`; with `transpose_w` w is `[E, F, D]`.

    Swizzled copies need multiples of 64 in D and F. Others are padded here, which copies rows
    and weights in every call: pad the weights of a model once if its sizes are odd.

    Args:
        has_residual: whether to return the residual of `apply_epilogue`, too, in the dtype of
            x.
        out_dtype: dtype of the result; None is the dtype of x. For float32 the kernel writes
            the sums of two parts of D, and XLA adds them up and applies the epilogue.

    Raises:
        ValueError: `refusal` has a reason, or the tiling cannot run.
    """
    num_rows, depth = x_RD.shape
    features = w.shape[1] if transpose_w else w.shape[2]
    sizes = (num_rows, depth, features, w.shape[0])
    if reason := refusal(x_RD.dtype, w.dtype, *sizes):
        raise ValueError(reason)
    is_wide = jnp.dtype(out_dtype or x_RD.dtype) != x_RD.dtype
    if is_wide and aligned(depth) % (2 * ALIGNMENT):  # as many steps for each of two parts
        x_RD = padded(x_RD, 1, 2 * ALIGNMENT)
        w, w_gate = (
            None if each is None else padded(each, 1 + transpose_w, 2 * ALIGNMENT)
            for each in (w, w_gate)
        )
        depth = x_RD.shape[1]
    matrices = [
        padded(padded(each, 1, ALIGNMENT), 2, ALIGNMENT)
        for each in (w, w_gate)
        if each is not None
    ]
    depth, tiled = aligned(depth), (num_rows, aligned(depth), aligned(features), w.shape[0])
    tiling = tiling or default_tiling(*tiled, x_RD.dtype, len(matrices))
    if is_wide:
        tiling = with_parts(tiling, depth, x_RD.dtype, w.dtype, len(matrices))
    tiling = checked(tiling, depth, x_RD.dtype, w.dtype, num_matrices=len(matrices))
    mosaic = Mosaic(interpret)
    tiling = dataclasses.replace(tiling, num_sms=tiling.num_sms or mosaic.num_sms)
    x = mosaic.rows(padded(x_RD, 1, ALIGNMENT), tiling.tile_n)
    block = tiling.tile_m * tiling.warpgroups
    matrices = [mosaic.blocks(each, 1 if transpose_w else 2, block) for each in matrices]
    epilogue = Epilogue(
        bias_EF=bias_EF, activation=activation, gate_R=gate_R, has_residual=has_residual
    )
    results, end_E = swap_ab(
        x,
        matrices,
        group_sizes_E,
        tiling,
        _weights(transpose_w, x_RD.dtype, tiling, mosaic),
        epilogue,
        mosaic,
        num_rows=num_rows,
        name="grouped_matmul",
    )
    y_RF, *residual = finished(results, x_RD, features, tiling, end_E, epilogue, out_dtype)
    return (y_RF, tuple(residual)) if has_residual else y_RF


def finished(
    results, x_RD, features: int, tiling: Tiling, end_E, epilogue: Epilogue, out_dtype=None
) -> list:
    """The kernel's results as `[R, F]` arrays; float32 sums get their epilogue.

    The first is in `out_dtype`; the others, and all if that is None, are in the dtype of x.

    Args:
        end_E: the row after each expert's last one, which sums in parts need.
    """
    if tiling.splits > 1:
        sums = [sums_RF[:, :features] for sums_RF in results]
        rows = rows_before(end_E, len(x_RD))
        y_RF, residual = apply_epilogue(
            sums, *rows, epilogue.bias_EF, epilogue.activation, epilogue.gate_R
        )
        results = [y_RF, *(finite(each, x_RD.dtype) for each in residual)]
    dtypes = [out_dtype or x_RD.dtype] + [x_RD.dtype] * (len(results) - 1)
    return [
        each[:, :features].astype(dtype) for each, dtype in zip(results, dtypes, strict=True)
    ]


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
        ValueError: `refusal` has a reason, or the tiling cannot run.
    """
    sizes = (*x_RD.shape, dy_RF.shape[1], group_sizes_E.shape[0])
    if reason := refusal(x_RD.dtype, dy_RF.dtype, *sizes):
        raise ValueError(reason)
    (_, D), F = x_RD.shape, dy_RF.shape[1]
    x_RD, dy_RF = padded(x_RD, 1, ALIGNMENT), padded(dy_RF, 1, ALIGNMENT)
    dw_EDF = gpu_weight_gradient.weight_gradient(
        x_RD, dy_RF, group_sizes_E, out_dtype=out_dtype, tiling=tiling, mosaic=Mosaic(interpret)
    )
    return dw_EDF[:, :D, :F]


def _weights(transpose_w: bool, dtype, tiling: Tiling, mosaic: Mosaic) -> Weights:
    def multiply(acc_MT, w, x_TK, scratch):
        w_MK = w if transpose_w else mosaic.transposed(w, scratch.get("w"))
        plgpu.wgmma(acc_MT, w_MK, mosaic.transposed(x_TK, scratch.get("x")))

    shapes = {"x": (tiling.tile_k, tiling.tile_n)}
    if not transpose_w:
        shapes["w"] = tiling.tile_m, tiling.tile_k
    scratch = mosaic.scratch_of_transposes(
        **{name: (shape, dtype) for name, shape in shapes.items()}
    )
    return Weights(is_depth_minor=transpose_w, multiply=multiply, scratch=scratch)
