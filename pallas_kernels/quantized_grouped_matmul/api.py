# SPDX-License-Identifier: Apache-2.0
"""`quantized_grouped_matmul`: rows sorted by expert, times int8, int4 or float8 matrices.

Kim et al. 2022, "Who Says Elephants Can't Run" (arXiv:2211.10017), sections 3.3 to 3.5.
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.api import with_group_offset
from pallas_kernels.implementations import REFERENCE, choose, current_device, warn_once
from pallas_kernels.operands import check_quantized, check_tiling
from pallas_kernels.quantization.qtensor import ZEROS_OF_8_BITS, QTensor
from pallas_kernels.quantization.quantize import VALUES_OF_8_BITS, name_of, quantize_rows
from pallas_kernels.sorted_rows import in_32_bits
from pallas_kernels.tiling.tuned import tuned_tiling


def quantized_grouped_matmul(
    x_RD,
    w: QTensor,
    group_sizes_E,
    *,
    w_gate: QTensor | None = None,
    bias_EF=None,
    activation: str | None = None,
    gate_R=None,
    group_offset=None,
    preferred_element_type=None,
    quantize_rows_to=None,
    implementation: str | None = None,
    tiling: Any = None,
    interpret: bool = False,
):
    """`y_r = gate_r act(x_r w_e + bias_e) (x_r w_gate_e)`, e the expert of row r, in x's dtype.

    Weights are dequantized inside of the product, a tile at a time. Products are added up in
    float32, and the scale of a whole channel multiplies the sum. Rows past the last group are
    not read and give zeros; matrices of empty groups are not read: finished sentences whose
    rows are sorted past the groups cost nothing (section 3.5).

    It has no gradient: differentiating raises TypeError. Quantized weights are for
    inference; `jax.lax.stop_gradient` around its arguments, or `grouped_matmul` with
    `dequantize(w)`, says which of the two gradients is meant.

    Args:
        x_RD: float32, bfloat16 or float16.
        w: weights from `quantize`, or from `from_awq` or `from_gptq`, whose zero points a
            TPU's kernel subtracts by way of the sums of the rows; for Hopper's kernel they are
            subtracted from the values, which are then int8, exactly and in twice the bytes.
            Kernels read native values, Hopper's also and fastest `fragments()`: other forms,
            as arguments of a compiled program, are converted whenever it runs, with a warning;
            arrays are converted once (`QTensor.native`).
        w_gate: the gate's matrices of a gated linear unit, quantized like w.
        quantize_rows_to: `int8` or, with float8 weights, `float8_e4m3fn` quantizes the rows as
            well, with one scale for each row (`quantize_rows`). A TPU multiplies int8 by int8
            (int4 weights become int8) and adds up in int32, and float8 by float8 in float32.
            Other back ends multiply the dequantized rows, which Hopper rounds to the dtype of
            x.
        bias_EF, activation, gate_R, group_sizes_E, group_offset, preferred_element_type,
            implementation, tiling, interpret: see `grouped_matmul`. (A QTensor is
            output-major, so there is no `transpose_w`.)

    Raises:
        ValueError: see `grouped_matmul`; or the weights have another layout.
    """
    check_quantized(
        x_RD,
        w,
        group_sizes_E,
        w_gate,
        group_offset=group_offset,
        preferred_element_type=preferred_element_type,
        bias_EF=bias_EF,
        activation=activation,
        gate_R=gate_R,
    )
    if quantize_rows_to is not None:
        quantize_rows_to = _checked_row_dtype(quantize_rows_to, w)
    has_own_zeros = w.bits == 8 and w.zeros_EFG is not None
    if implementation is None and has_own_zeros and current_device().platform == "gpu":
        warn_once(f"quantized_grouped_matmul runs without its kernel: {ZEROS_OF_8_BITS}")
        implementation = REFERENCE
    R, (E, D, F) = x_RD.shape[0], w.shape
    module = choose(
        "quantized_grouped_matmul",
        implementation,
        (x_RD.dtype, w.bits, R, D, F, E, w.group_size),
        interpret=interpret,
    )
    check_tiling(tiling, module)
    is_tuned = w_gate is None and quantize_rows_to is None and not w.is_float8
    # Fragments are read if both matrices are given as such; none are made here.
    given = [each for each in (w, w_gate) if each is not None]
    if not (hasattr(module, "FRAGMENTS") and all(each.is_fragments for each in given)):
        w, w_gate = (each and _weights_of(module, each) for each in (w, w_gate))
    if tiling is None and not interpret and is_tuned:
        tiling = tuned_tiling(module, x_RD.dtype, w.bits, w.group_size, R, D, F, E)
    options = (("activation", activation), ("tiling", tiling))
    options += (("out_dtype", jnp.dtype(preferred_element_type or x_RD.dtype)),)
    options += (("interpret", True),) if interpret else ()

    def multiply(x_RD, gate_R, group_sizes_E):
        scale_R = None
        if quantize_rows_to is not None:
            x_RD, scale_R = _quantized_rows(module, x_RD, quantize_rows_to)
        return _without_gradient(
            module, options, x_RD, scale_R, w, w_gate, group_sizes_E, bias_EF, gate_R
        )

    return with_group_offset(multiply, x_RD, gate_R, group_sizes_E, group_offset, E)


def _weights_of(module: ModuleType, w: QTensor) -> QTensor:
    """The weights in the form that a module reads."""
    is_reference = module.__name__.endswith(f".{REFERENCE}")
    form = getattr(module, "FORM", "native")
    is_other = w.bits == 4 and not is_reference and w.is_packed != (form == "packed")
    has_zeros = w.zeros_EFG is not None and module.__name__.endswith((".gpu", ".triton"))
    if (is_other or has_zeros or w.is_fragments) and isinstance(w.values, jax.core.Tracer):
        made = f"without_zeros().{form}" if has_zeros else form
        warn_once(
            "quantized_grouped_matmul gets integers in a compiled program that are not as its "
            f"kernel reads them, and converts them whenever it runs: give it w.{made}(), made "
            "once"
        )
    if is_reference:
        return w.native() if w.is_fragments else w
    return getattr(w.without_zeros() if has_zeros else w, form)()


def _checked_row_dtype(quantize_rows_to, w: QTensor) -> str:
    """The dtype's name; raises ValueError if these weights do not allow it for rows."""
    name, expected = name_of(quantize_rows_to), VALUES_OF_8_BITS[w.is_float8]
    if name != expected:
        raise ValueError(
            f"quantize_rows_to={quantize_rows_to!r} with weights of {w.values.dtype}; expected "
            f"{expected!r}: use that, or None for rows in their own dtype"
        )
    return name


def _quantized_rows(module: ModuleType, x_RD, dtype: str):
    """Quantized rows in the form that a module multiplies, and their scales if it takes any."""
    values_RD, scale_R = quantize_rows(x_RD, dtype)
    if module.__name__.endswith(".tpu"):
        return values_RD, scale_R
    dtype = jnp.float32 if module.__name__.endswith(f".{REFERENCE}") else x_RD.dtype
    return (values_RD.astype(jnp.float32) * scale_R[:, None]).astype(dtype), None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@in_32_bits
def _without_gradient(
    module: ModuleType,
    options,
    x_RD,
    scale_R,
    w: QTensor,
    w_gate,
    group_sizes_E,
    bias_EF,
    gate_R,
):
    options = dict(options, bias_EF=bias_EF, gate_R=gate_R)
    if scale_R is not None:
        options["row_scale_R"] = scale_R
    if module.__name__.endswith(f".{REFERENCE}"):
        return module.forward(x_RD, w, group_sizes_E, w_gate=w_gate, **options)
    if w_gate is not None:
        options["w_gate"] = w_gate.values, w_gate.scales_EFG
    if w.is_fragments:
        options["is_fragments"] = True
    if w.zeros_EFG is not None:
        options["zeros"] = [each.zeros_EFG for each in (w, w_gate) if each is not None]
    return module.forward(x_RD, w.values, w.scales_EFG, group_sizes_E, **options)


@_without_gradient.defjvp
def _refuse(module, options, primals, tangents):
    raise TypeError(
        "quantized_grouped_matmul has no gradient: put jax.lax.stop_gradient around its "
        "arguments, or use grouped_matmul with dequantize(w)"
    )
