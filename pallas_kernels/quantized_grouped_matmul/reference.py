# SPDX-License-Identifier: Apache-2.0
"""Quantized grouped matrix product in plain JAX: the kernels' reference, and the one for CPUs.

Kim et al. 2022 (arXiv:2211.10017), section 3.4. On CPU a block of one expert's matrix is
dequantized at a time, in the loops of `grouped_matmul.reference`. On TPU and GPU, where kernels
are for use and this is for comparison, it is `jax.lax.ragged_dot` of all matrices dequantized.
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale, C of D in a group; K
of F of a block; X columns of the matrix as it is stored
"""

import jax
import jax.numpy as jnp

from pallas_kernels.epilogue import apply_epilogue
from pallas_kernels.grouped_matmul import reference as unquantized
from pallas_kernels.grouped_matmul.reference import Tiling
from pallas_kernels.operands import vary_like
from pallas_kernels.quantization.magic_numbers import float8_to_float16
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantization.quantize import dequantize
from pallas_kernels.sorted_rows import rows_of_groups


def forward(
    x_RD,
    w: QTensor,
    group_sizes_E,
    *,
    w_gate: QTensor | None = None,
    bias_EF=None,
    activation: str | None = None,
    gate_R=None,
    out_dtype=None,
    tiling: Tiling | None = None,
):
    """As `api.quantized_grouped_matmul`; everything before the last rounding is float32.

    Packed weights are the quicker ones on CPU; the tiling is for CPU.

    Raises:
        ValueError: `tiling` does not fit.
    """
    R, (E, D, F) = x_RD.shape[0], w.shape
    if 0 in (R, D, F, E):
        return jnp.zeros((R, F), out_dtype or x_RD.dtype)
    tiling = tiling or default_tiling(R, D, F, E)
    tiling.check(F)
    sums = [
        jax.lax.platform_dependent(
            x_RD,
            each,
            group_sizes_E,
            cpu=lambda *operands: product_on_cpu(*operands, tiling),
            default=product_of_dequantized,
        )
        for each in ([w] if w_gate is None else [w, w_gate])
    ]
    rows = rows_of_groups(group_sizes_E, R)
    y_RF, _ = apply_epilogue(sums, *rows, bias_EF, activation, gate_R)
    return y_RF.astype(out_dtype or x_RD.dtype)


def default_tiling(R: int, D: int, F: int, E: int) -> Tiling:
    """The tiling of the transposed product: matrices are stored output-major."""
    return unquantized.default_tiling(R, F, D, E, transpose_w=True)


def candidates(R: int, D: int, F: int, E: int) -> list[Tiling]:
    """Tilings around the default one, which comes first."""
    return unquantized.candidates(R, F, D, E, transpose_w=True)


def product_on_cpu(x_RD, w: QTensor, group_sizes_E, tiling: Tiling):
    """float32 `[R, F]`, one block of features of one expert at a time."""
    _, D, F = w.shape
    x_RD = vary_like(x_RD, w, group_sizes_E)
    K, C = tiling.weight_rows, D // w.scales_EFG.shape[2]
    # Low nibbles of a block, then its high ones, are even channels, then odd ones. Putting x in
    # that order is little work; interleaving nibbles takes as long as the product.
    is_split = w.is_packed and C % 2 == 0
    if is_split:
        x_RD = jnp.concatenate([x_RD[:, ::2], x_RD[:, 1::2]], axis=1)

    def weight_block(e, k):
        def block_of(array_EFX):
            shape = (1, K, array_EFX.shape[2])
            return jax.lax.dynamic_slice(array_EFX, (e, k * K, 0), shape)

        block = jax.tree.map(block_of, w)
        scales_KG1 = block.scales_EFG[0][..., None]

        def scaled(values_KGX):
            if w.is_float8:  # XLA's own conversion takes nearly twice as long on a CPU
                bits_KGX = jax.lax.bitcast_convert_type(values_KGX, jnp.int8)
                values_KGX = float8_to_float16(bits_KGX)
            values_KGX = values_KGX.astype(jnp.float32)
            if block.zeros_EFG is not None:
                values_KGX -= block.zeros_EFG[0][..., None]
            return values_KGX * scales_KG1

        if not is_split and w.is_packed:  # by shifts: XLA's own 4 bits go wrong in constants
            packed_KC = block.values[0].astype(jnp.int32)
            pairs = jnp.stack([(packed_KC << 28) >> 28, (packed_KC << 24) >> 28], axis=-1)
            return scaled(pairs.reshape(K, D // C, C)).reshape(K, D)
        if not is_split:
            return scaled(block.native().values.reshape(K, D // C, C)).reshape(K, D)
        packed_KGC = block.values.reshape(K, D // C, C // 2).astype(jnp.int32)
        # A shift to the left and an arithmetic one to the right extend the sign.
        halves = [(packed_KGC << 28) >> 28, (packed_KGC << 24) >> 28]
        return jnp.concatenate([scaled(half).reshape(K, D // 2) for half in halves], axis=1)

    return unquantized.add_up_blocks(x_RD, weight_block, (F, D), group_sizes_E, True, tiling)


def product_of_dequantized(x_RD, w: QTensor, group_sizes_E):
    """float32 `[R, F]` from all matrices dequantized."""
    w_EDF = dequantize(w)
    return unquantized.forward_by_ragged_dot(
        x_RD.astype(jnp.float32), w_EDF, group_sizes_E, False
    )
