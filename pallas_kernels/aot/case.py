# SPDX-License-Identifier: Apache-2.0
"""One kernel at one shape, as it is compiled ahead of time, and those that have budgets.

A case travels as JSON to the process that has the compiler for the hardware.
Dims: R rows, D inputs, F outputs, E experts, G groups of D with a scale
"""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.cells import MATRICES

OPS = ("grouped_matmul", "quantized_grouped_matmul")
ROWS_OF_8_BITS = ("int8", "float8_e4m3fn")
PASSES = ("forward", "input_gradient", "weight_gradient")
NUM_EXPERTS = 32
# Rows per expert: in a decoding step, and in an encoder or a training batch.
ROWS = {"few": 8, "many": 256}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product to compile.

    Attributes:
        op: one of `OPS`.
        R, D, F, E: rows, contraction, output features, experts.
        dtype: dtype of the rows, `bfloat16`, `float16` or `float32`; `int8` or `float8_e4m3fn`
            for quantized rows, whose results are bfloat16.
        bits: 8 or 4 for quantized weights; None for weights in `dtype`.
        is_float8: whether weights of 8 bits are floating point.
        is_native: whether a kernel that reads fragments (`QTensor.fragments`) gets integers in
            the order of channels instead.
        group_size: channels of D that share a scale; None for one scale for each output
            feature.
        direction: one of `PASSES`; quantized weights have only the forward pass.
        epilogue: whether a forward pass has bias, activation and the rows' gates; the
            activation is a ReLU, in a gated linear unit GELU.
        is_gated_unit: whether a forward pass has the second matrix of a gated linear unit.
        has_residual: whether it is the forward pass of training, which also returns the
            residual.
        tiling: fields of the back end's `Tiling`; None for its default.
    """

    op: str
    R: int
    D: int
    F: int
    E: int
    dtype: str = "bfloat16"
    bits: int | None = None
    is_float8: bool = False
    is_native: bool = False
    group_size: int | None = None
    direction: str = "forward"
    epilogue: bool = False
    is_gated_unit: bool = False
    has_residual: bool = False
    tiling: dict[str, Any] | None = None

    def __post_init__(self):
        for name, known in (("op", OPS), ("direction", PASSES)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        is_quantized = self.op == "quantized_grouped_matmul"
        if is_quantized != (self.bits in (4, 8)):
            raise ValueError(
                f"op={self.op!r} with bits={self.bits}; quantized weights have 4 or 8 bits, "
                "others None"
            )
        if self.dtype in ROWS_OF_8_BITS and not is_quantized:
            raise ValueError(
                f"dtype={self.dtype!r} with op='grouped_matmul'; expected quantized weights "
                "for quantized rows: use op='quantized_grouped_matmul'"
            )
        if self.is_float8 and self.bits != 8:
            raise ValueError(f"is_float8 with bits={self.bits}; float8 weights have bits=8")
        if is_quantized and self.direction != "forward":
            raise ValueError(
                "quantized weights have no gradient; use direction='forward', or "
                "op='grouped_matmul'"
            )


def benchmark_cases() -> dict[str, Case]:
    """Every kernel at the shapes of the benchmark, by name, such as `int8 1024x4096 few`."""
    found = {}
    for D, F in MATRICES:
        for load, rows in ROWS.items():
            sizes = {"R": rows * NUM_EXPERTS, "D": D, "F": F, "E": NUM_EXPERTS}
            for direction in PASSES:
                name = f"bfloat16 {direction} {D}x{F} {load}"
                found[name] = Case("grouped_matmul", **sizes, direction=direction)
            for bits in (8, 4):
                name = f"int{bits} {D}x{F} {load}"
                found[name] = Case("quantized_grouped_matmul", **sizes, bits=bits)
    return found


def epilogue_cases() -> dict[str, Case]:
    """The first product of a layer with many rows, with bias, activation and gates, by name."""
    (D, F), R = MATRICES[0], ROWS["many"] * NUM_EXPERTS
    relu = Case("grouped_matmul", R, D, F, NUM_EXPERTS, epilogue=True)
    geglu = dataclasses.replace(relu, is_gated_unit=True)
    kept = dataclasses.replace(geglu, has_residual=True)
    return {
        f"bfloat16 {name} {D}x{F} many": case
        for name, case in (("relu", relu), ("geglu", geglu), ("geglu and residual", kept))
    }


def variant(op: str = "grouped_matmul", **changes) -> Case:
    """A kernel at the first shape with few rows."""
    D, F = MATRICES[0]
    sizes = {"R": ROWS["few"] * NUM_EXPERTS, "D": D, "F": F, "E": NUM_EXPERTS}
    return Case(op, **sizes | changes)


def build(case: Case, implementation: str):
    """The function of a case on a back end, and the shapes of its arguments.

    Args:
        implementation: `tpu`, `gpu` or `triton`, a module of the op's package.

    Returns:
        (function, specs): `function(*arrays like specs)`, trees of them, runs the kernel.
    """
    module = importlib.import_module(f"pallas_kernels.{case.op}.{implementation}")
    tiling = None if case.tiling is None else module.Tiling(**case.tiling)
    run, options = functools.partial(module.forward, tiling=tiling), {}
    spec, dtype = jax.ShapeDtypeStruct, jnp.dtype(case.dtype)
    R, D, F, E = case.R, case.D, case.F, case.E
    counts = spec((E,), jnp.int32)
    if case.op == "quantized_grouped_matmul":
        G = 1 if case.group_size is None else D // case.group_size
        eight = jnp.float8_e4m3fn if case.is_float8 else jnp.int8
        values = spec((E, F, D), eight if case.bits == 8 else jnp.int4)
        form = getattr(module, "FORM", "native")
        if case.bits == 4 and form == "packed":
            values = spec((E, F, D // 2), jnp.uint8)
        if hasattr(module, "FRAGMENTS") and not (case.is_float8 or case.is_native):
            options |= {"is_fragments": True}
        w = values, spec((E, F, G), jnp.float32)
        operands = spec((R, D), dtype), *w, counts
    elif case.direction == "weight_gradient":
        run = functools.partial(module.weight_gradient, tiling=tiling, out_dtype=dtype)
        w, operands = None, (spec((R, D), dtype), spec((R, F), dtype), counts)
    else:
        w = spec((E, D, F), dtype)
        is_backward = case.direction == "input_gradient"
        options |= {"transpose_w": True} if is_backward else {}
        operands = spec((R, F if is_backward else D), dtype), w, counts
    named = {"w_gate": w} if case.is_gated_unit else {}
    if case.dtype in ROWS_OF_8_BITS:
        named |= {"row_scale_R": spec((R,), jnp.float32)}
        options |= {"out_dtype": jnp.bfloat16}
    if case.epilogue:
        named |= {"bias_EF": spec((E, F), jnp.float32), "gate_R": spec((R,), jnp.float32)}
        options |= {"activation": "gelu" if case.is_gated_unit else "relu"}
    if case.has_residual:
        options |= {"has_residual": True}

    def function(operands, named):
        return run(*operands, **named, **options)

    return function, (operands, named)
