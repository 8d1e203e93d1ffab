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
PASSES = ("forward", "input_gradient", "weight_gradient")
EXPERTS = 32
# Rows an expert: of a decoding step, and of an encoder or a training batch.
ROWS = {"few": 8, "many": 256}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product to compile.

    Attributes:
        op: one of `OPS`.
        R, D, F, E: rows, contraction, output features, experts.
        dtype: of the rows, `bfloat16`, `float16` or `float32`.
        bits: 8 or 4 for quantized weights; None for weights in `dtype`.
        group_size: channels of D that share a scale; None for one scale an output feature.
        direction: one of `PASSES`; quantized weights have the forward pass alone.
        epilogue: with bias, ReLU and gate.
        tiling: fields of the back end's `Tiling`; None for its default.
    """

    op: str
    R: int
    D: int
    F: int
    E: int
    dtype: str = "bfloat16"
    bits: int | None = None
    group_size: int | None = None
    direction: str = "forward"
    epilogue: bool = False
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
            sizes = {"R": rows * EXPERTS, "D": D, "F": F, "E": EXPERTS}
            for direction in PASSES:
                name = f"bfloat16 {direction} {D}x{F} {load}"
                found[name] = Case("grouped_matmul", **sizes, direction=direction)
            for bits in (8, 4):
                name = f"int{bits} {D}x{F} {load}"
                found[name] = Case("quantized_grouped_matmul", **sizes, bits=bits)
    return found


def variant(op: str = "grouped_matmul", **changes) -> Case:
    """A kernel at the first shape with few rows."""
    D, F = MATRICES[0]
    sizes = {"R": ROWS["few"] * EXPERTS, "D": D, "F": F, "E": EXPERTS}
    return Case(op, **sizes | changes)


def build(case: Case, implementation: str):
    """The function of a case on a back end, and the shapes of its arguments.

    Args:
        implementation: `tpu` or `gpu`, a module of the op's package.

    Returns:
        (function, specs): `function(*arrays like specs)` runs the kernel.
    """
    module = importlib.import_module(f"pallas_kernels.{case.op}.{implementation}")
    tiling = None if case.tiling is None else module.Tiling(**case.tiling)
    if case.op == "quantized_grouped_matmul":
        return _quantized(case, module, tiling)
    R, D, F, E = case.R, case.D, case.F, case.E
    dtype, run = jnp.dtype(case.dtype), module.forward
    first, second, options = (R, D), (E, D, F), {}
    if case.direction == "weight_gradient":
        run, second, options = module.weight_gradient, (R, F), {"out_dtype": dtype}
    if case.direction == "input_gradient":
        first, options = (R, F), {"transpose_w": True}
    specs = (jax.ShapeDtypeStruct(shape, dtype) for shape in (first, second))
    counts = jax.ShapeDtypeStruct((E,), jnp.int32)
    return functools.partial(run, tiling=tiling, **options), (*specs, counts)


def _quantized(case: Case, module, tiling):
    R, D, F, E = case.R, case.D, case.F, case.E
    G = 1 if case.group_size is None else D // case.group_size
    spec = jax.ShapeDtypeStruct
    specs = (
        spec((R, D), jnp.dtype(case.dtype)),
        spec((E, F, D), jnp.int8 if case.bits == 8 else jnp.int4),
        spec((E, F, G), jnp.float32),
        spec((E,), jnp.int32),
    )
    if not case.epilogue:
        return functools.partial(module.forward, tiling=tiling), specs

    def run(x_RD, values_EFD, scales_EFG, group_sizes_E, bias_EF, gate_R):
        return module.forward(
            x_RD, values_EFD, scales_EFG, group_sizes_E, bias_EF=bias_EF,
            activation="relu", gate_R=gate_R, tiling=tiling,
        )  # fmt: skip

    return run, (*specs, spec((E, F), jnp.float32), spec((R,), jnp.float32))
