# SPDX-License-Identifier: Apache-2.0
"""`pallas-kernels bench`: every cell's contenders in turns, as rows and checks.

The form of Table 1 of Kim et al. 2022 (arXiv:2211.10017): speed-ups over unquantized weights
by the number of active experts, and their geometric means.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.aot.gpu_cost import READ_BYTES_PER_S, predicted_s
from pallas_kernels.bench.card import copy_bytes_per_s
from pallas_kernels.bench.cells import Cell, all_cells, cells_of_a_cpu
from pallas_kernels.bench.products import (
    OUT_OF_MEMORY,
    activation_dtype,
    compiled_weight_bytes,
    contenders,
)
from pallas_kernels.bench.timing import Contender, geometric_mean, speedup, take_turns
from pallas_kernels.implementations import current_device, unable
from pallas_kernels.tiling import tpu as tpu_tiling

Measured = list[tuple[Cell, dict[str, Contender]]]


def run(
    rounds: int, cells: Sequence[Cell] | None = None, note: Callable[[str], Any] = print
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measures the cells.

    Args:
        cells: cells to measure; None is the grid for this machine.
        note: function that is told of each cell once it has been measured.

    Returns:
        (rows, checks): a check has `name`, `value` and `bound`.
    """
    if cells is None:
        cells = cells_of_a_cpu() if jax.default_backend() == "cpu" else all_cells()
    measured, cache = [], {}
    for i, cell in enumerate(cells):
        labels = " ".join(map(str, cell.labels().values()))
        try:
            found = contenders(cell, cache, note)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            cache.clear()
            note(f"{i + 1}/{len(cells)}  {labels} does not fit the device's memory: left out")
            continue
        take_turns(found, rounds)
        measured.append((cell, {each.name: each for each in found}))
        times = ", ".join(f"{each.name} {1e6 * each.median_s:.0f} us" for each in found)
        note(f"{i + 1}/{len(cells)}  {labels}: {times}")
    rows = [
        row(cell, each, ours_of(by_name, each.of))
        for cell, by_name in measured
        for each in by_name.values()
    ]
    return rows + means(measured), checks(measured)


def ours_of(by_name: dict[str, Contender], of: str) -> Contender:
    """Our product of unquantized weights in a pass: the first one."""
    return next(each for each in by_name.values() if each.of == of)


def row(cell: Cell, each: Contender, ours: Contender) -> dict[str, Any]:
    """One contender in one cell; `speedup` is over our product of unquantized weights.

    `pass` is `forward`, `dx`, `dw` or `schedule`. `predicted_us` is from the platform's cost
    model, for our products: on Hopper that of their machine code, on a TPU the estimate that
    chooses tilings, for which nothing was fitted.
    """
    seconds = _predicted_s(cell, each)
    is_schedule = each.of == "schedule"
    return {
        **cell.labels(),
        "pass": each.of,
        "contender": each.name,
        "us": 1e6 * each.median_s,
        "p10_us": 1e6 * each.percentile_s(10),
        "p90_us": 1e6 * each.percentile_s(90),
        "predicted_us": None if seconds is None else 1e6 * seconds,
        "weight_gb_per_s": None if is_schedule else each.weight_bytes / each.median_s / 1e9,
        "tflop_per_s": None if is_schedule else cell.flops / each.median_s / 1e12,
        "speedup": speedup(each, ours),
        "error": each.error,
    }


def _predicted_s(cell: Cell, each: Contender) -> float | None:
    """Seconds by the cost model of the platform."""
    bits = {"bfloat16": None, "int8": 8, "int4": 4}
    weights = each.name.removesuffix(f" {each.of}")
    if weights not in bits:
        return None
    bits, device = bits[weights], current_device()
    # Experts without rows have no tiles.
    R, D, F, active = cell.R, cell.D, cell.F, cell.active
    if device.platform == "tpu":
        if each.of == "dx":
            D, F = F, D
        w_dtype = {None: jnp.bfloat16, 8: jnp.int8, 4: jnp.int4}[bits]
        problem = tpu_tiling.Problem.of(
            R, D, F, active, jnp.bfloat16, w_dtype, is_weight_gradient=each.of == "dw"
        )
        tiling = tpu_tiling.candidates(problem)[0]
        return tpu_tiling.estimated_seconds(problem, tiling)
    cards = [name for name in READ_BYTES_PER_S if name in device.kind]
    if unable("gpu", device) is not None or each.of != "forward" or not cards:
        return None
    return predicted_s(R, D, F, active, bits, cards[0])


def means(measured: Measured) -> list[dict[str, Any]]:
    """Geometric means of the speed-ups by active experts, of up to 16 tokens and of all."""
    groups: dict[tuple, list[float]] = {}
    for cell, by_name in measured:
        for each in by_name.values():
            if each is (ours := ours_of(by_name, each.of)):
                continue
            for tokens in ("all", *(["<=16"] if cell.tokens <= 16 else [])):
                key = (cell.active, cell.E, tokens, cell.load, each.name)
                groups.setdefault(key, []).append(speedup(each, ours))
    return [
        {
            "matrix": "geometric mean",
            "active": active,
            "experts": experts,
            "tokens": tokens,
            "load": load,
            "contender": name,
            "speedup": geometric_mean(values),
        }
        for (active, experts, tokens, load, name), values in groups.items()
    ]


def checks(measured: Measured) -> list[dict[str, Any]]:
    """The checks; each has the value of the worst cell that it is about."""
    ours = jnp.dtype(activation_dtype()).name
    full_bytes = compiled_weight_bytes(None) * 4 / jnp.dtype(activation_dtype()).itemsize
    every = (each for _, by_name in measured for each in by_name.values())
    # Not by `max`, which loses a NaN behind a number.
    error = float(np.max([each.error for each in every if each.error is not None]))
    found = [
        _check("int8_bytes_vs_f32", compiled_weight_bytes(8) / full_bytes, "<=0.25"),
        _check("int4_bytes_vs_f32", compiled_weight_bytes(4) / full_bytes, "<=0.125"),
        _check("max_error_vs_float64", error, "<=1e-5" if ours == "float32" else "<=1e-2"),
    ]
    if jax.default_backend() == "cpu":
        slowdowns = [
            speedup(by_name["batched einsum"], by_name[ours])
            for _, by_name in measured
            if "batched einsum" in by_name
        ]
        found.insert(0, _check("reference_vs_batched_einsum", max(slowdowns), "<=1.5"))
    if unable("gpu", current_device()) is None:
        found += checks_of_hopper(measured, copy_bytes_per_s())
    return found


def checks_of_hopper(measured: Measured, copied_bytes_per_s: float) -> list[dict[str, Any]]:
    """Checks of a Hopper card's targets; those whose cells were not measured are left out."""
    few = [(c, n) for c, n in measured if c.active == c.E == 32 and c.tokens <= 16]
    many = [(c, n) for c, n in measured if c.active == c.E and c.tokens >= 256]
    bandwidths = [n["bfloat16"].weight_bytes / n["bfloat16"].median_s for _, n in few]
    values = {
        "int8_vs_bf16_32": (_speedups(few, "int8", "bfloat16"), ">=1.6"),
        "int4_vs_bf16_32": (_speedups(few, "int4", "bfloat16"), ">=2.4"),
        "bf16_vs_cublas": (_speedups(many, "bfloat16", "dense bfloat16"), ">=0.8"),
        "bf16_vs_copy_bandwidth": ([b / copied_bytes_per_s for b in bandwidths], ">=0.8"),
        "bf16_vs_ragged_dot": (_speedups(measured, "bfloat16", "ragged_dot bfloat16"), ">=1"),
    }
    return [_check(name, min(each), bound) for name, (each, bound) in values.items() if each]


def _speedups(measured: Iterable, fast: str, slow: str) -> list[float]:
    return [speedup(n[fast], n[slow]) for _, n in measured if fast in n and slow in n]


def _check(name: str, value: float, bound: str) -> dict[str, Any]:
    if math.isnan(value):
        raise RuntimeError(f"{name} is NaN: a product gave NaN")
    return {"name": name, "value": float(value), "bound": bound}
