# SPDX-License-Identifier: Apache-2.0
"""What the TPU kernels take of each chip, case by case: the table that tests hold them to.

    SWITCHX_AOT_TPU=.venv/aot_tpu python -m pallas_kernels.aot.tpu_budgets

compiles all cases for all targets again and writes `tpu_budgets.json`; with names of targets
behind it, those alone.
Dims: R D F E
"""

import json
import pathlib
import sys

from pallas_kernels.aot.case import PASSES, Case
from pallas_kernels.aot.tpu_compiler import TOPOLOGIES, compile_cases

TABLE = pathlib.Path(__file__).with_name("tpu_budgets.json")
RESOURCES = ("vmem_bytes", "bundles", "temp_bytes")
SHAPES = ((1024, 4096), (4096, 1024), (768, 3072), (4096, 14336))
EXPERTS = 32
# Rows an expert: of a decoding step, and of an encoder or a training batch.
ROWS = {"few": 8, "many": 256}


def cases() -> dict[str, Case]:
    """By name, such as `int8 1024x4096 few`."""
    found = {}
    for D, F in SHAPES:
        for load, rows in ROWS.items():
            sizes = {"R": rows * EXPERTS, "D": D, "F": F, "E": EXPERTS}
            for direction in PASSES:
                name = f"bfloat16 {direction} {D}x{F} {load}"
                found[name] = Case("grouped_matmul", **sizes, direction=direction)
            for bits in (8, 4):
                name = f"int{bits} {D}x{F} {load}"
                found[name] = Case("quantized_grouped_matmul", **sizes, bits=bits)
    D, F = SHAPES[0]
    sizes = {"R": ROWS["few"] * EXPERTS, "D": D, "F": F, "E": EXPERTS, "bits": 4}
    found[f"int4 epilogue {D}x{F} few"] = Case(
        "quantized_grouped_matmul", **sizes, epilogue=True
    )
    found[f"int4 groups of 128 {D}x{F} few"] = Case(
        "quantized_grouped_matmul", **sizes, group_size=128
    )
    found[f"float32 forward {D}x{F} few"] = Case(
        "grouped_matmul", R=ROWS["few"] * EXPERTS, D=D, F=F, E=EXPERTS, dtype="float32"
    )
    return found


def measure(target: str) -> dict[str, dict]:
    """Resources of every case by its name, or what the compiler said instead."""
    named = cases()
    rows = {}
    for name, result in zip(named, compile_cases(target, named.values()), strict=True):
        error = result["error"]
        rows[name] = {"error": error} if error else {key: result[key] for key in RESOURCES}
    return rows


def load() -> dict[str, dict[str, dict[str, int]]]:
    """The table: resources by target and name of the case."""
    return json.loads(TABLE.read_text())


def main() -> None:
    table = load() if TABLE.exists() else {}
    for target in sys.argv[1:] or TOPOLOGIES:
        table[target] = measure(target)
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table[target].items()
        )
        print(f"{target}:\n{lines}", flush=True)
        TABLE.write_text(_readable(table))


def _readable(table) -> str:
    """JSON with a case a line, so that a change shows as the line it is."""
    targets = []
    for target, rows in table.items():
        lines = (f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        targets.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(targets) + "\n}\n"


if __name__ == "__main__":
    main()
