# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix product with int8, int4 or float8 weights on a TPU, dequantized in the kernel.

The weights cross memory as they are stored and become floating point on their way into the
matrix unit, from native int4: v6e and later convert it in one instruction, and nibbles that
are unpacked by hand take 1.2 to 1.6 times the instructions. The matrix unit of a v5 and later
takes float8_e4m3fn as it is; see `QTensor` for the values that it must not have. The float32
sums are multiplied by the scale after the last channel, so it costs nothing per weight. (Kim et
al. 2022, Who Says Elephants Can't Run, arXiv:2211.10017, sections 3.3 to 3.5.)
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale
"""

import jax.numpy as jnp

from pallas_kernels.epilogue import Epilogue
from pallas_kernels.grouped_matmul import tpu as plain
from pallas_kernels.grouped_matmul.tpu_product import multiply_rows
from pallas_kernels.tiling import tpu as tpu_tiling
from pallas_kernels.tiling.tpu import LANES, Problem, Tiling


def refusal(
    x_dtype, bits: int, R: int, D: int, F: int, E: int, group_size: int | None
) -> str | None:
    """The reason why the kernel cannot multiply these, and what to do; None if it can.

    Any sizes will do, except for the groups of channels that share a scale: they are a multiple
    of 128, and so few that blocks of whole groups fit.
    """
    if reason := plain.refusal(x_dtype, x_dtype, R, D, F, E):
        return reason
    if bits not in (4, 8):
        return f"w has {bits} bits; expected 4 or 8: use quantize(w_EDF, 4) or (w_EDF, 8)"
    if group_size not in (None, D) and (group_size % LANES or D % group_size):
        return (
            f"w has group_size={group_size}; expected a multiple of {LANES} that divides "
            f"D={D}: use one, or one scale a channel, or implementation='reference'"
        )
    try:
        candidates(R, D, F, E, x_dtype, bits, group_size)
    except ValueError as error:
        return str(error)
    return None


def candidates(
    R: int, D: int, F: int, E: int, x_dtype, bits: int, group_size: int | None = None
) -> list[Tiling]:
    """Tilings that fit the current chip, the best estimate first."""
    x_bytes = jnp.dtype(x_dtype).itemsize
    group_size = None if group_size == D else group_size
    return tpu_tiling.candidates(Problem(R, D, F, E, x_bytes, bits, group_size))


def forward(
    x_RD,
    values_EFD,
    scales_EFG,
    group_sizes_E,
    *,
    w_gate=None,
    zeros=None,
    row_scale_R=None,
    bias_EF=None,
    activation: str | None = None,
    gate_R=None,
    out_dtype=None,
    tiling: Tiling | None = None,
    interpret=False,
):
    """As `api.quantized_grouped_matmul`.

    Args:
        values_EFD, scales_EFG: values and scales of a QTensor with native values.
        w_gate: values and scales of the gate's matrices of a gated linear unit.
        zeros: `zeros_EFG` of each of the matrices, or None. A zero point times the sum of the
            row over its channels is subtracted from their product.
        row_scale_R: scales of float8 rows, and of int8 rows, whose products with int8 weights
            are added up as int32.
        out_dtype: dtype of the result; None is the dtype of x.
        interpret: True, or `pltpu.InterpretParams`, to run without a TPU.

    Raises:
        ValueError: the tiling is not possible.
    """
    [R, D], [E, F, G] = x_RD.shape, scales_EFG.shape
    matrices = [(values_EFD, scales_EFG), *([] if w_gate is None else [w_gate])]
    if tiling is None:
        group_size = None if G == 1 else D // G
        problem = Problem.of(
            R,
            D,
            F,
            E,
            x_RD.dtype,
            values_EFD.dtype,
            group_size=group_size,
            num_matrices=len(matrices),
            out_dtype=out_dtype,
        )
        tiling = tpu_tiling.candidates(problem)[0]
    if tiling.block_D % (D // G) and G > 1:
        raise ValueError(
            f"block_D={tiling.block_D} cuts groups of {D // G} channels with one scale; use "
            f"{D}, or a multiple of {D // G}"
        )
    return multiply_rows(
        x_RD,
        values_EFD,
        group_sizes_E,
        tiling=tiling,
        is_output_major=True,
        w_gate=None if w_gate is None else w_gate[0],
        epilogue=Epilogue(
            scales=tuple(scales for _, scales in matrices),
            zeros=tuple(zeros or ()),
            row_scale_R=row_scale_R,
            bias_EF=bias_EF,
            activation=activation,
            gate_R=gate_R,
        ),
        out_dtype=out_dtype,
        interpret=interpret,
    )
