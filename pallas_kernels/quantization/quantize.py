# SPDX-License-Identifier: Apache-2.0
"""Weights to integers or float8 and back, by rules for the scale, and the resulting error.

Kim et al. 2022 (arXiv:2211.10017), section 3.4: symmetric, per channel, weights only, so
that nothing has to be calibrated.
Dims: E experts, D inputs, F outputs, G groups of D with a scale, C channels of a group
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantization.qtensor import FLOAT8, QTensor, pack_int4

METHODS = ("absmax", "ft", "mse")
VALUES_OF_8_BITS = ("int8", FLOAT8.name)
MAX_FLOAT8 = float(jnp.finfo(FLOAT8).max)  # 448

# Ratios of `mse`: the largest weight times 32/64, 33/64, .. 64/64 is the largest integer.
# For normal weights and D = 4096 the best lies near 0.6 with 4 bits and at 0.9 or above with 8.
CLIP_RATIOS = np.arange(32, 65) / 64


def quantize(
    w_EDF, bits: int, method: str | None = None, group_size: int | None = None, dtype=None
):
    """Quantizes `w_EDF` one expert at a time, so that little more than the QTensor is in
    memory.

    With m the largest magnitude of a channel (of an output feature's D weights, or of
    `group_size` of them) and q = 2^(bits-1) - 1, the scale is

    - `absmax`: m / q; no weight is clipped.
    - `ft`: m / 2^(bits-1), the positive end clipped to q: `symmetric_quantize` of
      FasterTransformer, the library of the paper.
    - `mse`: r m / q with the r of `CLIP_RATIOS` of least squared error; what lies outside
      of -q - 1 .. q is clipped. With 4 bits it has a fifth to a third less error than `absmax`,
      at no cost later.

    Values are rounded to nearest, ties to even. Channels of zeros have scale 1.

    float8_e4m3fn has only `absmax`, with q = 448: the scale takes the largest weight to the
    largest value, so that none overflows, which would be NaN. A weight within 1/28,672 of the
    largest is off by up to a sixteenth of itself, a smaller one by up to 1/458,752 of the
    largest.

    Args:
        w_EDF: floating point, the layout of training.
        bits: 8 or 4. 4-bit values come packed; `QTensor.native` is for kernels.
        method: `absmax`, `ft` or `mse`; None is `mse` with 4 bits and `absmax` with 8.
        group_size: channels of D that share a scale; None is one scale for each output feature.
        dtype: dtype of the values: with 8 bits `int8` (also None) or `float8_e4m3fn`; with 4
            bits None or `int4`.

    Raises:
        ValueError: `bits`, `method` or `dtype` is unknown, D is odd with 4 bits or no multiple
            of `group_size`, or weights are not numeric or not finite. (Under `jax.jit` their
            values are not known; there a NaN makes the scale of its channel NaN.)
    """
    method = method or ("mse" if bits == 4 else "absmax")
    dtype = name_of(dtype or f"int{bits}")
    w_EDF = jnp.asarray(w_EDF) if isinstance(w_EDF, list | tuple) else w_EDF
    _check(w_EDF, bits, method, group_size, dtype)
    return _quantize(jnp.asarray(w_EDF), bits, method, group_size, dtype == FLOAT8.name)


def name_of(dtype) -> str:
    """The name of a dtype, which may be given by name; else its text, which callers refuse."""
    try:
        return dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def quantize_rows(x_RD, dtype="int8"):
    """Rows of 8 bits with a scale each: `x_rd = scale_r values_rd`.

    The largest magnitude is 127, for float8_e4m3fn 448. Values are rounded to nearest, ties to
    even. Rows of zeros have scale 1. A row with NaN has the scale NaN, and its product is NaN.

    Args:
        dtype: `int8` or `float8_e4m3fn`.

    Returns:
        (values_RD, scale_R): of `dtype`, and float32.

    Raises:
        ValueError: the rows are not floating point, or `dtype` is another one.
    """
    if (dtype := name_of(dtype)) not in VALUES_OF_8_BITS:
        raise ValueError(
            f"dtype={dtype!r}; expected {' or '.join(VALUES_OF_8_BITS)}: use one of these"
        )
    x_RD = jnp.asarray(x_RD)
    if x_RD.ndim != 2 or not x_RD.shape[1] or not jnp.issubdtype(x_RD.dtype, jnp.floating):
        raise ValueError(
            f"x_RD has shape {x_RD.shape} and dtype {x_RD.dtype}; expected "
            "floating point [rows, inputs]: reshape or cast it, or use quantize for matrices"
        )
    x_RD = x_RD.astype(jnp.float32)
    is_float8 = dtype == FLOAT8.name
    most = MAX_FLOAT8 if is_float8 else 127
    largest_R = jnp.max(jnp.abs(x_RD), axis=1)
    # The reciprocal of anything less would not be finite.
    is_zero_R = largest_R < most * jnp.finfo(jnp.float32).tiny
    scale_R = jnp.where(is_zero_R, 1, largest_R / most)
    values_RD = x_RD / scale_R[:, None]
    if is_float8:
        return _float8(values_RD), scale_R
    return jnp.clip(jnp.round(values_RD), -most, most).astype(jnp.int8), scale_R


def _float8(values):
    """float8_e4m3fn without NaN and negative zero (see `QTensor`), within -448..448."""
    values = jnp.clip(values, -MAX_FLOAT8, MAX_FLOAT8).astype(FLOAT8)
    is_number = jnp.abs(values.astype(jnp.float32)) > 0  # neither 0 nor NaN
    return jnp.where(is_number, values, jnp.zeros((), FLOAT8))


def dequantize(q: QTensor):
    """float32 `[E, D, F]`: the weights that a QTensor stands for.

    Raises:
        ValueError: `q` is not a QTensor, or has another layout.
    """
    _check_qtensor(q)
    q = q.native()
    E, D, F = q.shape
    G = q.scales_EFG.shape[2]
    values_EFGC = q.values.reshape(E, F, G, D // G).astype(jnp.float32)
    if q.zeros_EFG is not None:
        values_EFGC -= jnp.asarray(q.zeros_EFG)[..., None]
    w_EFD = (values_EFGC * q.scales_EFG[..., None]).reshape(E, F, D)
    return jnp.swapaxes(w_EFD, 1, 2)


def quantization_error(w_EDF, q: QTensor):
    """Root of the mean squared error over that of the mean square, float32 `[E]`.

    0 for an expert of zeros.

    Raises:
        ValueError: the shapes differ, or `q` is of another layout.
    """
    _check_qtensor(q)
    if w_EDF.shape != q.shape:
        raise ValueError(f"w_EDF has shape {w_EDF.shape}, the QTensor {q.shape}; expected one")
    q.check()
    return _error(jnp.asarray(w_EDF), q)


def _check_qtensor(q) -> None:
    if not isinstance(q, QTensor):
        raise ValueError(
            f"q is a {type(q).__name__}; expected a QTensor: use quantize(w_EDF, bits)"
        )


def _check(w_EDF, bits, method, group_size, dtype) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}; use 8 or 4")
    if dtype not in (known := VALUES_OF_8_BITS if bits == 8 else ("int4",)):
        raise ValueError(f"dtype={dtype!r} with bits={bits}; use {' or '.join(known)}, or None")
    if method not in METHODS:
        raise ValueError(f"method={method!r}; use one of {', '.join(METHODS)}")
    if dtype == FLOAT8.name and method != "absmax":
        raise ValueError(
            f"method={method!r} with dtype=float8_e4m3fn; use 'absmax': clipping the largest "
            "makes no step smaller there"
        )
    if w_EDF.ndim != 3 or not jnp.issubdtype(w_EDF.dtype, jnp.floating):
        raise ValueError(
            f"w_EDF has shape {w_EDF.shape} and dtype {w_EDF.dtype}; expected floating point "
            "[experts, inputs, outputs]"
        )
    if not (D := w_EDF.shape[1]):
        raise ValueError("w_EDF has D=0; expected matrices with inputs")
    if bits == 4 and D % 2:
        raise ValueError(
            f"w_EDF has D={D}; 4-bit values are stored in pairs along D: pad D to {D + 1}, or "
            "use bits=8"
        )
    if group_size is not None and (group_size < 1 or D % group_size):
        raise ValueError(
            f"group_size={group_size} does not divide D={D}; use a divisor, or None for one "
            "scale for each output feature"
        )
    if not isinstance(w_EDF, jax.core.Tracer):
        is_finite_E = np.asarray(_is_finite(jnp.asarray(w_EDF)))
        if not is_finite_E.all():
            raise ValueError(
                f"weights of expert {int(np.argmin(is_finite_E))} are NaN or infinite; they "
                "cannot be quantized: look at the checkpoint"
            )


@jax.jit
def _is_finite(w_EDF):
    return jnp.all(jnp.isfinite(w_EDF), axis=(1, 2))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _quantize(w_EDF, bits, method, group_size, is_float8):
    E, D, F = w_EDF.shape
    C = group_size or D

    def one_expert(w_DF):
        w_FGC = w_DF.T.reshape(F, D // C, C).astype(jnp.float32)
        values_FGC, scales_FG = _quantize_channels(w_FGC, bits, method, is_float8)
        values_FD = values_FGC.reshape(F, D)
        return pack_int4(values_FD) if bits == 4 else values_FD, scales_FG

    values, scales_EFG = jax.lax.map(one_expert, w_EDF)
    return QTensor(values, scales_EFG, bits, group_size)


def _quantize_channels(w_FGC, bits, method, is_float8):
    """Values of 8 bits and float32 scales; channels are along the last dimension."""
    largest = MAX_FLOAT8 if is_float8 else 2 ** (bits - 1) - 1
    max_FG1 = jnp.max(jnp.abs(w_FGC), axis=-1, keepdims=True)
    # Relative to their maximum: squares of weights as they are may leave float32's range,
    # and so may the reciprocal of the maximum, which XLA divides by.
    is_zero_FG1 = max_FG1 < jnp.finfo(jnp.float32).tiny * 2 * (largest + 1)  # a scale of 0
    near_1_FG1 = jnp.where(max_FG1 > 1, 2.0**-32, 2.0**32)
    divisor_FG1 = jnp.where(is_zero_FG1, 1, max_FG1 * near_1_FG1)
    relative_FGC = jnp.where(is_zero_FG1, 0, w_FGC * near_1_FG1 / divisor_FG1)
    if method == "mse":
        step_FG1 = _best_clip(relative_FGC, largest) / largest
        low = -largest - 1
    elif method == "ft":
        step_FG1, low = jnp.full_like(max_FG1, 1 / (largest + 1)), -largest - 1
    else:
        step_FG1, low = jnp.full_like(max_FG1, 1 / largest), -largest
    values_FGC = relative_FGC / step_FG1
    if is_float8:
        values_FGC = _float8(values_FGC)
    else:
        values_FGC = jnp.clip(jnp.round(values_FGC), low, largest).astype(jnp.int8)
    scales_FG1 = jnp.where(is_zero_FG1, 1, max_FG1 * step_FG1)
    return values_FGC, scales_FG1[..., 0]


def _best_clip(relative_FGC, largest):
    """The clip ratio of least squared error of each channel."""

    def attempt(best, ratio):
        best_error_FG1, best_ratio_FG1 = best
        step = ratio / largest
        rounded_FGC = step * jnp.clip(jnp.round(relative_FGC / step), -largest - 1, largest)
        error_FG1 = jnp.sum((rounded_FGC - relative_FGC) ** 2, axis=-1, keepdims=True)
        is_better_FG1 = error_FG1 < best_error_FG1
        return (
            jnp.where(is_better_FG1, error_FG1, best_error_FG1),
            jnp.where(is_better_FG1, ratio, best_ratio_FG1),
        ), None

    one_FG1 = jnp.ones((*relative_FGC.shape[:-1], 1), jnp.float32)
    start = jnp.inf * one_FG1, one_FG1
    (_, ratio_FG1), _ = jax.lax.scan(attempt, start, jnp.array(CLIP_RATIOS, jnp.float32))
    return ratio_FG1


@jax.jit
def _error(w_EDF, q):
    def one_expert(expert):
        w_DF, one = expert
        dequantized_DF = dequantize(jax.tree.map(lambda array: array[None], one))[0]
        w_DF = w_DF.astype(jnp.float32)
        largest = jnp.maximum(jnp.max(jnp.abs(w_DF)), jnp.finfo(jnp.float32).tiny)
        # Relative to the largest, so that no square leaves float32's range.
        error = jnp.sum(((w_DF - dequantized_DF) / largest) ** 2)
        total = jnp.sum((w_DF / largest) ** 2)
        return jnp.sqrt(error / jnp.where(total == 0, 1, total))

    return jax.lax.map(one_expert, (w_EDF, q))
