# SPDX-License-Identifier: Apache-2.0
"""Grouped product with int8, int4 or float8 weights on NVIDIA GPUs before and after Hopper.

Kim et al. 2022, Who Says Elephants Can't Run (arXiv:2211.10017), section 3.3: weights cross
memory as they are stored, only those of experts with rows, and become floating point in
registers. Triton has no int4: weights of 4 bits are read packed, and multiplied as two halves,
the even and the odd channels, so that nibbles are not interleaved. It does not convert float8
below compute capability 8.9: its bits are moved to where float16 has them. Where compiled code
is shorter for it, integers are converted by the paper's magic numbers
(quantization/magic_numbers.py).
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale; T rows of a tile,
K one step of D, H half of it, N features of a tile
"""

import jax
import jax.numpy as jnp

from pallas_kernels.epilogue import check_activation
from pallas_kernels.grouped_matmul import triton as plain
from pallas_kernels.grouped_matmul.triton import Place, dot, iota, multiply_rows
from pallas_kernels.quantization.magic_numbers import (
    float8_to_float16,
    int8_to_float16,
    nibbles_to_float,
)
from pallas_kernels.quantization.qtensor import FLOAT8
from pallas_kernels.tiling import triton as tilings
from pallas_kernels.tiling.triton import SMALLEST, Tiling

# The form of a `QTensor` that `forward` reads.
FORM = "packed"
# Offsets in byte arrays from this size up to twice it are wrong in Triton (JAX 0.10 to 0.12).
_MOST_BYTES = 2**31


def refusal(
    x_dtype, bits: int, R: int, D: int, F: int, E: int, group_size: int | None = None
) -> str | None:
    """The reason why the kernel cannot run with these, and what to do; None if it can."""
    if reason := plain.refusal(x_dtype, x_dtype, R, D, F, E):
        return reason
    if bits not in (4, 8) or D * bits % 8:
        return f"weights of {bits} bits, D={D}; use 8 bits, or 4 and an even D"
    if group_size not in (None, D) and (group_size % (2 * SMALLEST) or D % group_size):
        return (
            f"group_size={group_size}; use a multiple of {2 * SMALLEST} that divides D={D}, or "
            "one scale for all"
        )
    if _MOST_BYTES <= E * D * F * bits // 8 <= 2 * _MOST_BYTES:
        return (
            f"weights of E={E}, D={D}, F={F} take {E * D * F * bits // 8} bytes, whose offsets "
            "Triton computes in 32 bits: split the experts"
        )
    return None


def candidates(
    R: int,
    D: int,
    F: int,
    E: int,
    bits: int,
    dtype=jnp.bfloat16,
    group_size: int | None = None,
    num_matrices: int = 1,
) -> list[Tiling]:
    """Tilings worth a measurement, the default first."""
    group_size = group_size or D
    found = tilings.candidates(R, E, dtype, num_matrices)
    return [each for each in found if group_size == D or group_size % each.depth == 0]


def forward(
    x_RD,
    values,
    scales_EFG,
    group_sizes_E,
    *,
    w_gate=None,
    bias_EF=None,
    activation=None,
    gate_R=None,
    tiling: Tiling | None = None,
    out_dtype=None,
    interpret: bool = False,
):
    """As `api.quantized_grouped_matmul`.

    Args:
        values, scales_EFG: values and scales of a QTensor with packed values.
        w_gate: values and scales of the gate's matrices of a gated linear unit.

    Raises:
        ValueError: `refusal` has a reason, the activation is unknown, or the tiling is not
            possible.
    """
    (R, D), (E, F, last), G = x_RD.shape, values.shape, scales_EFG.shape[2]
    bits = 4 if values.dtype == jnp.uint8 else 8
    is_float8 = values.dtype == FLOAT8
    group_size = D // G
    if reason := refusal(x_RD.dtype, bits, R, D, F, E, None if G == 1 else group_size):
        raise ValueError(reason)
    check_activation(activation)
    matrices = [(values, scales_EFG), *([] if w_gate is None else [w_gate])]
    if is_float8:
        matrices = [(jax.lax.bitcast_convert_type(q, jnp.int8), scale) for q, scale in matrices]
    if tiling is None:
        fitting = candidates(R, D, F, E, bits, x_RD.dtype, group_size, len(matrices))
        tiling = (fitting or [Tiling(SMALLEST, 64, 2 * SMALLEST)])[0]
    if G > 1 and group_size % tiling.depth:
        raise ValueError(
            f"depth={tiling.depth} reaches over groups of {group_size} channels; use a depth "
            f"that divides {group_size}"
        )

    def product(at: Place, first, K: int, x_ref, values_ref, scales_ref):
        if bits == 8:
            depth_K = first + iota(K)
            q_NK = at.matrix_of(values_ref, (at.feature_N, F), (depth_K, D))
            q_NK = float8_to_float16(q_NK) if is_float8 else q_NK
            parts = [(depth_K, _converted(q_NK, x_RD.dtype))]
        else:
            half_H = first // 2 + iota(K // 2)
            pairs_NH = at.matrix_of(values_ref, (at.feature_N, F), (half_H, last))
            halves = _halves(pairs_NH, x_RD.dtype)
            parts = [(2 * half_H + i, w_NH) for i, w_NH in enumerate(halves)]
        sum_TN = sum(dot(at.rows_of(x_ref, depth), w, 1, 1) for depth, w in parts)
        if G == 1:
            return sum_TN
        return sum_TN * at.of_features(scales_ref, first // group_size)

    def finish(sum_TN, at: Place, values_ref, scales_ref):
        return sum_TN * at.of_features(scales_ref, 0) if G == 1 else sum_TN

    [y_RF] = multiply_rows(
        x_RD,
        matrices,
        group_sizes_E,
        F,
        product,
        finish=finish,
        tiling=tiling,
        bias_EF=bias_EF,
        activation=activation,
        gate_R=gate_R,
        out_dtype=out_dtype,
        interpret=interpret,
        name=f"grouped_matmul_{'float' if is_float8 else 'int'}{bits}",
    )
    return y_RF


def _converted(q_NK, dtype):
    """Values as `dtype`; int8 to float16 by magic numbers, which avoid a slow conversion."""
    is_slow = (q_NK.dtype, dtype) == (jnp.int8, jnp.float16)
    return int8_to_float16(q_NK) if is_slow else q_NK.astype(dtype)


def _halves(pairs_NH, dtype):
    """The low and the high nibbles of bytes as `dtype`; to 16 bits by magic numbers."""
    if dtype == jnp.float32:
        pairs_NH = pairs_NH.astype(jnp.int32)
        # A shift to the left and an arithmetic one to the right extend the sign.
        return [((pairs_NH << (28 - 4 * i)) >> 28).astype(dtype) for i in (0, 1)]
    pairs_NH = pairs_NH.astype(jnp.uint16)
    return [
        nibbles_to_float(each, dtype)
        for each in (pairs_NH & jnp.uint16(15), pairs_NH >> jnp.uint16(4))
    ]
