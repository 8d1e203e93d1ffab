# SPDX-License-Identifier: Apache-2.0
"""Grouped product with int8, int4 or float8 weights on Hopper, dequantized inside the kernel.

Kim et al. 2022, Who Says Elephants Can't Run (arXiv:2211.10017), section 3.3: weights stay
integers up to the registers. There they are converted (`prmt`, `lop3` and one subtraction, the
paper's magic numbers) and go into wgmma as its register operand, which is the first one: so
features are on the rows of wgmma and tokens on its columns (gpu_product.py). The scale of a
feature multiplies the float32 accumulator once, whereas a scale in the weights would cost one
more multiplication for each of them. A scale for each group of D multiplies the sum of each
step instead.

In the order of `QTensor.fragments` a thread has in its 32 bits what it multiplies: two weights
take a `lop3` and a subtraction, two for int8 to bfloat16, and some a shift. In native order
shuffles and `prmt` bring them there; to bfloat16 Mosaic converts them, to float16
quantization/magic_numbers.py.

Through shared memory (`Tiling.through_smem`), the converted weights are written there and
read by wgmma from there: the same products in the same order. The interpreter runs this way,
since it knows no register operand.
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale; T rows
of a tile, K one step of D, M features of a warpgroup, P tiles of rows, N tiles of M features
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from pallas_kernels.epilogue import Epilogue, check_activation
from pallas_kernels.grouped_matmul import gpu as plain
from pallas_kernels.grouped_matmul.gpu_product import Weights, swap_ab
from pallas_kernels.mosaic_gpu import Mosaic, padded
from pallas_kernels.quantization.magic_numbers import int4_to_float16, int8_to_float16
from pallas_kernels.quantization.qtensor import FLOAT8
from pallas_kernels.tiling.gpu import (
    H200_SMS,
    Tiling,
    candidates_around,
    checked,
    default_panel,
    default_splits,
    fitted,
    tile_of_rows,
    with_parts,
)

# Channels whose weights are converted before their product is issued; the conversion of the
# next ones runs beside it.
CONVERTED = 64
_LAYOUTS = {8: plgpu.Layout.WGMMA_UPCAST_2X, 4: plgpu.Layout.WGMMA_UPCAST_4X}
# Layouts of integers in the order of `QTensor.fragments`, which this kernel reads.
FRAGMENTS = {8: plgpu.Layout.WGMMA_8BIT, 4: plgpu.Layout.WGMMA_UPCAST_4X}


def refusal(
    x_dtype, bits: int, R: int, D: int, F: int, E: int, group_size: int | None = None
) -> str | None:
    """The reason why the kernel cannot run with these, and what to do; None if it can."""
    if reason := plain.refusal(x_dtype, x_dtype, R, D, F, E):
        return reason
    if bits not in _LAYOUTS:
        return f"weights of {bits} bits; the kernel converts 8 and 4: quantize to one of these"
    if group_size is not None and group_size != D and (group_size % 64 or D % group_size):
        return (
            f"group_size={group_size}; a step of the kernel has 64 channels at least and one "
            f"scale: use a multiple of 64 that divides D={D}, or one scale for all"
        )
    return None


def default_tiling(
    R: int,
    D: int,
    F: int,
    E: int,
    bits: int,
    dtype=jnp.bfloat16,
    group_size: int | None = None,
    num_matrices: int = 1,
) -> Tiling:
    """The tiling by rows per expert; a row of weights is copied in 128 bytes where it can."""
    tile_n = min(tile_of_rows(R, E), 256 // num_matrices)
    most = group_size or D
    if group_size is not None and group_size < D:
        tile_n = min(tile_n, 128 // num_matrices)  # Each accumulator has a second beside it.
    wanted = 256 if bits == 4 and tile_n <= 64 else 128 if tile_n <= 128 else 64
    # Longer steps have fewer waits; not if D is in parts for want of tiles.
    if bits == 4 and tile_n == 32 and num_matrices == 1 and min(R, E) * F >= 128 * H200_SMS:
        wanted = 512
    depths = (512, 256, 128, 64)
    tile_k = next(k for k in depths if k <= wanted and D % k == 0 and most % k == 0)
    tiling = Tiling(tile_m=64, tile_n=tile_n, tile_k=tile_k)
    panel = F if tile_n <= 64 else default_panel(tiling, D, F, bits, num_matrices)
    tiling = dataclasses.replace(tiling, panel=panel)
    tiling = dataclasses.replace(tiling, splits=default_splits(tiling, R, D, F, E))
    # Registers do not hold the sums of two matrices, nor of more rows with scales by group.
    fits_wide = num_matrices == 1 and tile_n <= (64 if most == D else 32)
    if tiling.splits == 1 and fits_wide and _pays_wide(tiling, R, F, E):
        tiling = dataclasses.replace(tiling, tile_m=128, tile_k=min(tile_k, 256))
    return fitted(tiling, dtype, _w_dtype(bits), most=8, num_matrices=num_matrices)


def _pays_wide(tiling: Tiling, R: int, F: int, E: int) -> bool:
    """Whether each SM has half as many tiles if warpgroups take 128 features.

    The time that a tile takes besides its steps, with few rows as long as four of them, is then
    taken half as often.
    """
    block = tiling.tile_m * tiling.warpgroups
    tiles, wide_tiles = (min(R, E) * -(-F // each) for each in (block, 2 * block))
    return -(-tiles // H200_SMS) >= 2 * -(-wide_tiles // H200_SMS)


def candidates(
    R: int, D: int, F: int, E: int, bits: int, dtype=jnp.bfloat16, group_size: int | None = None
) -> list[Tiling]:
    """Tilings worth a measurement, the default first."""
    return candidates_around(
        default_tiling(R, D, F, E, bits, dtype, group_size),
        R,
        F,
        E,
        (64, 128, 256),
        dtype,
        _w_dtype(bits),
        lambda tiling: _checked(tiling, D, dtype, bits, group_size),
    )


def _w_dtype(bits: int):
    return jnp.int8 if bits == 8 else jnp.int4


def _checked(
    tiling: Tiling, D: int, dtype, bits: int, group_size: int | None, num_matrices: int = 1
) -> Tiling:
    tiling = checked(tiling, D, dtype, _w_dtype(bits), num_matrices=num_matrices)
    has_groups = group_size is not None and group_size != D
    # Each of three has 152 registers per thread; what it converts would be spilled.
    if tiling.warpgroups == 3 and (tiling.tile_m > 64 or has_groups and tiling.tile_n > 64):
        raise ValueError(
            f"tile_m={tiling.tile_m} by tile_n={tiling.tile_n} and the weights that are "
            "converted leave three warpgroups no registers; use two, or tile_m=64 and, with "
            "groups of scales, tile_n <= 64"
        )
    if not has_groups:
        return tiling
    if group_size % tiling.tile_k:
        raise ValueError(
            f"tile_k={tiling.tile_k} reaches over groups of {group_size} channels; use a "
            f"tile_k that divides {group_size}"
        )
    if tiling.tile_m * tiling.tile_n > (most := 64 * 128 // num_matrices):
        raise ValueError(
            f"tile_m={tiling.tile_m} by tile_n={tiling.tile_n} leaves no registers for the sum "
            f"of each group; use tile_m * tile_n <= {most}"
        )
    return tiling


def forward(
    x_RD,
    values_EFD,
    scales_EFG,
    group_sizes_E,
    *,
    w_gate=None,
    bias_EF=None,
    activation=None,
    gate_R=None,
    is_fragments: bool = False,
    out_dtype=None,
    tiling: Tiling | None = None,
    interpret: bool = False,
):
    """As `api.quantized_grouped_matmul`.

    Args:
        values_EFD, scales_EFG: values and scales of a QTensor, native or fragments.
        w_gate: values and scales of the gate's matrices of a gated linear unit.
        is_fragments: whether the values are in the order of `QTensor.fragments`.
        out_dtype: see `forward` of grouped_matmul.

    Raises:
        ValueError: `refusal` has a reason, the activation is unknown, or the tiling cannot
            run.
    """
    (num_rows, D), (E, F, _) = x_RD.shape, values_EFD.shape
    matrices = [(values_EFD, scales_EFG), *([] if w_gate is None else [w_gate])]
    G = scales_EFG.shape[2]
    group_size = D // G if G > 1 else None
    bits = jax.dtypes.itemsize_bits(values_EFD.dtype)
    if reason := refusal(x_RD.dtype, bits, num_rows, D, F, E, group_size):
        raise ValueError(reason)
    check_activation(activation)
    is_wide = jnp.dtype(out_dtype or x_RD.dtype) != x_RD.dtype
    if is_wide and (
        G == 1 and plain.aligned(D) % (2 * plain.ALIGNMENT) or D <= plain.ALIGNMENT
    ):
        x_RD = padded(x_RD, 1, 2 * plain.ALIGNMENT)
        matrices = [(padded(each, 2, 2 * plain.ALIGNMENT), scales) for each, scales in matrices]
        D = x_RD.shape[1]
    # As in `gpu.forward` of grouped_matmul.
    D, tiled_F = plain.aligned(D), plain.aligned(F)
    tiling = tiling or default_tiling(
        num_rows, D, tiled_F, E, bits, x_RD.dtype, group_size, len(matrices)
    )
    if is_wide:
        tiling = with_parts(tiling, D, x_RD.dtype, values_EFD.dtype, len(matrices))
    tiling = _checked(tiling, D, x_RD.dtype, bits, group_size, len(matrices))
    mosaic = Mosaic(interpret)
    tiling = dataclasses.replace(
        tiling,
        num_sms=tiling.num_sms or mosaic.num_sms,
        through_smem=int(interpret) or tiling.through_smem,
    )
    values = [
        padded(padded(each, 1, plain.ALIGNMENT), 2, plain.ALIGNMENT) for each, _ in matrices
    ]
    x = mosaic.rows(padded(x_RD, 1, plain.ALIGNMENT), tiling.tile_n)
    values = [mosaic.blocks(each, 1, tiling.tile_m * tiling.warpgroups) for each in values]
    epilogue = Epilogue(
        scales=tuple(scales for _, scales in matrices),
        bias_EF=bias_EF,
        activation=activation,
        gate_R=gate_R,
    )
    results, end_E = swap_ab(
        x,
        values,
        group_sizes_E,
        tiling,
        _weights(x_RD.dtype, bits, group_size, is_fragments, tiling, mosaic),
        epilogue,
        mosaic,
        num_rows=num_rows,
        name=f"grouped_matmul_{values_EFD.dtype}",
    )
    [y_RF, *_] = plain.finished(results, x_RD, F, tiling, end_E, epilogue, out_dtype)
    return y_RF


def _converted(q_MK, dtype, is_fragments: bool, mosaic: Mosaic):
    """Values as `dtype`, exactly, in the order of channels.

    To bfloat16 Mosaic has magic numbers of its own; to float16 it converts integers one by one.
    Hopper has an instruction for two float8 to float16.
    """
    if is_fragments:
        if mosaic.is_interpreted:
            return _in_order(q_MK).astype(dtype)
        return _from_fragments(q_MK, dtype)
    if q_MK.dtype == FLOAT8:
        q_MK = q_MK.astype(jnp.float16)
        return q_MK if dtype == jnp.float16 else q_MK.astype(jnp.float32).astype(dtype)
    if dtype != jnp.float16:
        return q_MK.astype(dtype)
    return int8_to_float16(q_MK) if q_MK.dtype == jnp.int8 else int4_to_float16(q_MK)


def _weights(
    dtype,
    bits: int,
    group_size: int | None,
    is_fragments: bool,
    tiling: Tiling,
    mosaic: Mosaic,
) -> Weights:
    def load(q_smem):
        return mosaic.load(q_smem, (FRAGMENTS if is_fragments else _LAYOUTS)[bits])

    def multiply(acc_MT, q_MK, x_TK, scratch):
        # Not before it is carried from step to step: then every byte would be an instruction.
        if not is_fragments:
            q_MK = mosaic.as_layout(q_MK, plgpu.Layout.WGMMA)
        for first in range(0, tiling.tile_k, CONVERTED):
            part = slice(first, first + CONVERTED)
            w_MK = _converted(q_MK[:, part], dtype, is_fragments, mosaic)
            x_KT = mosaic.transposed(x_TK.at[:, part], scratch.get("x"))
            if tiling.through_smem:
                scratch["w"][...] = w_MK
                plgpu.commit_smem()
                plgpu.wgmma(acc_MT, scratch["w"], x_KT)
                plgpu.wgmma_wait(0)
            else:
                plgpu.wgmma(acc_MT, w_MK, x_KT)

    scratch = mosaic.scratch_of_transposes(x=((CONVERTED, tiling.tile_n), dtype))
    if tiling.through_smem:
        scratch["w"] = ((tiling.tile_m, CONVERTED), dtype)
    return Weights(
        is_depth_minor=True,
        multiply=multiply,
        scratch=scratch,
        load=load,
        # int4 that is carried from step to step is packed anew by JAX 0.11 and later: 705
        # instructions in a loop that has 380.
        may_load_ahead=bits == 8,
        depth_per_scale=group_size,
    )


def _in_order(q_MK):
    """Fragments in the order of channels, for the interpreter, whose registers have none."""
    (M, K), parts = q_MK.shape, _PARTS[jax.dtypes.itemsize_bits(q_MK.dtype)]
    return jnp.moveaxis(q_MK.reshape(M, K // (8 * parts), 4, 2, parts), 4, 2).reshape(M, K)


# 16-bit numbers of two weights, 16 bits apart in 32, in two instructions or three.
_CONVERSIONS = {
    (4, jnp.dtype(jnp.bfloat16)): """
        mov.b32 magic, 0x43084308;
        lop3.b32 found, $1, 0x000F000F, magic, (0xf0 & 0xcc) ^ 0xaa;
        sub.bf16x2 $0, found, magic;""",
    (4, jnp.dtype(jnp.float16)): """
        mov.b32 magic, 0x64086408;
        lop3.b32 found, $1, 0x000F000F, magic, (0xf0 & 0xcc) ^ 0xaa;
        sub.f16x2 $0, found, magic;""",
    # bfloat16 has no place for 8 bits: 128 + 7 of them, minus 128, or 256 if the 8th is set.
    (8, jnp.dtype(jnp.bfloat16)): """
        mov.b32 magic, 0x43004300;
        lop3.b32 found, $1, 0x007F007F, magic, (0xf0 & 0xcc) | 0xaa;
        lop3.b32 magic, $1, 0x00800080, magic, (0xf0 & 0xcc) | 0xaa;
        sub.bf16x2 $0, found, magic;""",
    (8, jnp.dtype(jnp.float16)): """
        mov.b32 magic, 0x64806480;
        lop3.b32 found, $1, 0x00FF00FF, magic, (0xf0 & 0xcc) ^ 0xaa;
        sub.f16x2 $0, found, magic;""",
}
# Number of products to which the 32 bits of a thread belong.
_PARTS = {8: 2, 4: 4}


def _from_fragments(q_MK, dtype):
    """Integers in the order of `QTensor.fragments` as `dtype` of layout WGMMA, exactly.

    A register has 8 weights of 4 bits, or 4 of 8; those that are 16 bits apart are what this
    thread gives to a product. So no thread needs another's, and a shift comes between
    one product's weights and the next one's (quantization/magic_numbers.py has the arithmetic).
    """
    bits = jax.dtypes.itemsize_bits(q_MK.dtype)
    asm = f"{{ .reg .b32 magic, found; {_CONVERSIONS[bits, jnp.dtype(dtype)]} }}"

    @plgpu.inline_mgpu(
        arg_types=(FRAGMENTS[bits],),
        return_type=plgpu.ShapeDtypeStruct(q_MK.shape, dtype, plgpu.Layout.WGMMA),
    )
    def converted(_, given):
        word = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype))
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(given.shape), dtype=object)
        for (row, column, *rest, _), register in np.ndenumerate(given.registers):
            held = mgpu.utils.bitcast(register, word)
            for i in range(_PARTS[bits]):
                shifted = arith.shrui(held, arith.constant(word, bits * i))
                value = llvm.inline_asm(word, [shifted], asm, "=r,r")
                place = row, column * _PARTS[bits] + i, *rest
                registers[place] = mgpu.utils.bitcast(value, pair)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return converted(q_MK)
