# SPDX-License-Identifier: Apache-2.0
"""Expert matrices of AWQ and GPTQ checkpoints as QTensors: integers packed into int32.

Lin et al. 2023, AWQ (arXiv:2306.00978); Frantar et al. 2022, GPTQ (arXiv:2210.17323). A
linear layer `[D, F]` has integers q >= 0, a scale s and a zero point z for each output feature
and group of inputs, and `w_df = s_gf (q_df - z_gf)`. Both formats keep `qzeros [G, F / n]` and
`scales [G, F]`, n values to an int32. They differ in `qweight`:

- GPTQ (AutoGPTQ, GPTQModel): `[D / n, F]`, n consecutive inputs in an int32, the first in the
  lowest bits. The format `gptq` stores zero points minus one, `gptq_v2` as they are.
- AWQ (AutoAWQ's "gemm", 4 bits): `[D, F / 8]`, 8 consecutive outputs in an int32, in the order
  0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on, zero points too.

Arrays have a leading axis of experts: stack those of a layer's experts.
Dims: E experts, D inputs, F outputs, G groups of D with a scale, n values of an int32
"""

import numpy as np

from pallas_kernels.quantization.qtensor import QTensor, pack_int4

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ_FORMATS = ("gptq", "gptq_v2")


def from_awq(qweight, qzeros, scales) -> QTensor:
    """The matrices of AutoAWQ's "gemm" version, 4 bits, exactly.

    Args:
        qweight: int32 `[E, D, F / 8]`.
        qzeros: int32 `[E, G, F / 8]`.
        scales: floating point `[E, G, F]`.

    Raises:
        ValueError: shapes or dtypes that do not agree.
    """
    qweight, qzeros, scales = map(np.asarray, (qweight, qzeros, scales))
    _check_arrays({"qweight": qweight, "qzeros": qzeros}, scales)
    E, D, columns = qweight.shape
    G, F = scales.shape[1:]
    _check_shape("qweight", qweight, (E, D, F // 8), columns * 8 == F)
    _check_shape("qzeros", qzeros, (E, G, F // 8), qzeros.shape == (E, G, F // 8))
    return _qtensor(_in_order(qweight), _in_order(qzeros), scales, 4)


def from_gptq(
    qweight, qzeros, scales, g_idx=None, *, bits: int = 4, checkpoint_format: str = "gptq"
) -> QTensor:
    """The matrices of a GPTQ checkpoint, exactly.

    Args:
        qweight: int32 `[E, D / n, F]`, n = 32 / bits.
        qzeros: int32 `[E, G, F / n]`.
        scales: floating point `[E, G, F]`.
        g_idx: int32 `[E, D]`, the group of each input; None if inputs are in order.
        bits: 4 or 8.
        checkpoint_format: the format in quantize_config.json, `gptq` or `gptq_v2`.

    Raises:
        ValueError: shapes or dtypes that do not agree, another number of bits or format, inputs
            that are not in the order of their groups (`desc_act` without `static_groups`).
    """
    if bits not in (4, 8):
        raise ValueError(
            f"bits={bits}; expected 4 or 8, which kernels multiply: quantize with one of "
            "these, or dequantize the checkpoint"
        )
    if checkpoint_format not in GPTQ_FORMATS:
        raise ValueError(
            f"checkpoint_format={checkpoint_format!r}; expected one of {GPTQ_FORMATS}, as "
            "quantize_config.json says it"
        )
    qweight, qzeros, scales = map(np.asarray, (qweight, qzeros, scales))
    _check_arrays({"qweight": qweight, "qzeros": qzeros}, scales)
    n = 32 // bits
    E, rows, _ = qweight.shape
    G, F = scales.shape[1:]
    D = rows * n
    _check_shape("qweight", qweight, (E, rows, F), qweight.shape[2] == F)
    _check_shape("qzeros", qzeros, (E, G, F // n), qzeros.shape == (E, G, F // n))
    if g_idx is not None:
        _check_order(np.asarray(g_idx), E, D, G)
    q_EDF = _unpacked(qweight.swapaxes(1, 2), bits).swapaxes(1, 2)
    zeros_EGF = _unpacked(qzeros, bits)
    if checkpoint_format == "gptq":
        zeros_EGF = (zeros_EGF.astype(np.int16) + 1) % (1 << bits)
    return _qtensor(q_EDF, zeros_EGF, scales, bits)


def _unpacked(packed, bits: int):
    """uint8, the last axis n times as long: values from the lowest bits on."""
    shifts_n = np.arange(0, 32, bits, dtype=np.uint32)
    values = packed.view(np.uint32)[..., None] >> shifts_n & np.uint32((1 << bits) - 1)
    return values.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def _in_order(packed):
    """uint8 values of AWQ's int32, in the order of the features."""
    values = _unpacked(packed, 4)
    ordered = np.empty_like(values)
    for position, feature in enumerate(AWQ_ORDER):
        ordered[..., feature::8] = values[..., position::8]
    return ordered


def _qtensor(q_EDF, zeros_EGF, scales_EGF, bits: int) -> QTensor:
    """A QTensor of these numbers with signed integers: q and z minus half of their range."""
    E, D, F = q_EDF.shape
    G = scales_EGF.shape[1]
    if D % G:
        raise ValueError(
            f"scales have {G} groups for D={D} inputs; expected a divisor: a checkpoint whose "
            "last group is smaller has to be padded"
        )
    half = 1 << (bits - 1)
    values_EFD = (q_EDF.swapaxes(1, 2).astype(np.int16) - half).astype(np.int8)
    zeros_EFG = zeros_EGF.swapaxes(1, 2).astype(np.float32) - half
    return QTensor(
        pack_int4(values_EFD) if bits == 4 else values_EFD,
        np.ascontiguousarray(scales_EGF.swapaxes(1, 2), np.float32),
        bits,
        group_size=None if G == 1 else D // G,
        zeros_EFG=np.ascontiguousarray(zeros_EFG) if zeros_EFG.any() else None,
    )


def _check_arrays(packed, scales) -> None:
    for name, array in packed.items():
        if array.ndim != 3 or array.dtype not in (np.int32, np.uint32):
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}; expected int32 with an axis of "
                "experts and those of a linear layer: stack the experts' arrays"
            )
    if scales.ndim != 3 or scales.dtype.kind == "i" or scales.shape[0] != len(array):
        raise ValueError(
            f"scales is {scales.dtype}{list(scales.shape)}; expected floating point [E, G, F] "
            f"of E={len(array)} experts: stack the experts' arrays"
        )


def _check_shape(name: str, array, expected, holds: bool) -> None:
    if not holds:
        raise ValueError(
            f"{name} has shape {array.shape}; expected {expected} with these scales: are the "
            "format and the number of bits those of the checkpoint?"
        )


def _check_order(g_idx_ED, E: int, D: int, G: int) -> None:
    if g_idx_ED.shape != (E, D):
        raise ValueError(
            f"g_idx has shape {g_idx_ED.shape}; expected {(E, D)}: stack the experts'"
        )
    wrong = g_idx_ED != np.arange(D) // (D // G)
    if wrong.any():
        e, d = np.argwhere(wrong)[0]
        raise ValueError(
            f"g_idx[{e}, {d}]={g_idx_ED[e, d]}; expected {d // (D // G)}, groups of "
            "consecutive inputs: quantize with desc_act=False or static_groups=True, or "
            "dequantize the checkpoint and use quantize()"
        )
