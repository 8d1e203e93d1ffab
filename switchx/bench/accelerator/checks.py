# SPDX-License-Identifier: Apache-2.0
"""The checks of `check accelerator`, computed from the rows of its parts.

Aims refer to the card's own rates, as measured in the same call, never to a datasheet's.
"""

import re
from collections.abc import Iterable
from typing import Any

ROWS_OF_KERNELS = (1, 4, 16)
BOUNDS = {
    "kernel_tests_failed": "==0",
    "texts_differing": "==0",
    "bf16_vs_copy": ">=0.85",
    "bf16_vs_cublas_256": ">=0.85",
    **{f"int8_vs_bf16_rows{n}": ">=1.6" for n in ROWS_OF_KERNELS},
    **{f"int4_vs_bf16_rows{n}": ">=2.4" for n in ROWS_OF_KERNELS},
    "switch8_vs_dense_card": ">=0.85",
    "switch8_vs_torch_card": ">=2",
    "decode_b1_vs_torch_card": ">=5",
    "decode_b96_vs_torch_card": ">=3",
}
TESTS = ("kernel_tests", "all_kernel_tests")


def values_of(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The value of each check in `BOUNDS` that has rows; later rows replace earlier ones."""
    found = {
        (each["part"], each["case"]): each for each in rows if each["measured"] is not None
    }
    values = _of_kernels(found) | _of_tests(found) | _of_models(found)
    return {name: values[name] for name in BOUNDS if values.get(name) is not None}


def _of_kernels(found: dict) -> dict[str, float | None]:
    def of(case: str, field: str = "measured"):
        return found.get(("variants", case), {}).get(field)

    values, shape = {}, _first(found, "variants", r"bfloat16, (\w+), rows 4")
    for n in ROWS_OF_KERNELS:
        plain = of(f"bfloat16, {shape}, rows {n}")
        for weights in ("int8", "int4"):
            ours = of(f"{weights}, {shape}, rows {n}")
            values[f"{weights}_vs_bf16_rows{n}"] = plain / ours if plain and ours else None
    read = [of(f"bfloat16, {shape}, rows {n}", "weight_tb_per_s") for n in ROWS_OF_KERNELS]
    if all(read) and ("card", "copy") in found:
        values["bf16_vs_copy"] = min(read) / found["card", "copy"]["measured"]
    grouped, dense = (of(f"{way}bfloat16, {shape}, rows 256") for way in ("", "dense "))
    values["bf16_vs_cublas_256"] = dense / grouped if grouped and dense else None
    return values


def _of_tests(found: dict) -> dict[str, float]:
    # A test that ran in both parts counts with its outcome in the later one.
    outcomes = {
        case: row["measured"]
        for (part, case), row in found.items()
        if part in TESTS and row["unit"] == "test"
    }
    if not outcomes:
        return {}
    failed = sum(each in ("failed", "error") for each in outcomes.values())
    return {"kernel_tests_failed": float(failed)}


def _of_models(found: dict) -> dict[str, float | None]:
    def of(part: str, case: str, field: str):
        return found.get((part, case), {}).get(field)

    experts = _first(found, "training", r"(\d+ experts), gather")
    ways = [of("training", f"{experts}, {way}", "vs_dense") for way in ("gather", "dropless")]
    values = {"switch8_vs_dense_card": max(filter(None, ways), default=None)}
    values["switch8_vs_torch_card"] = of("training", f"{experts}, AdamW", "vs_torch")
    for n in (1, 96):
        case = f"bfloat16, batch {n}, 1 beams, loops in command buffers"
        values[f"decode_b{n}_vs_torch_card"] = of("decoding", case, "vs_torch")
    rows = [row for (part, _), row in found.items() if part == "decoding"]
    # From our kernels against XLA's products, and from the card against the CPU: a program with
    # other compiler options has the same kernels.
    differing = [row["measured"] for row in rows if row["unit"] == "texts differing"]
    if differing:
        values["texts_differing"] = float(sum(differing))
    return values


def _first(found: dict, part: str, pattern: str) -> str | None:
    """The pattern's first group in the first case of a part that matches it, or None."""
    cases = (re.fullmatch(pattern, case) for name, case in found if name == part)
    return next((match[1] for match in cases if match), None)
