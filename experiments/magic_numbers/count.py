# SPDX-License-Identifier: Apache-2.0
"""What kernels take with each conversion, off the code compiled for one chip.

    python -m experiments.magic_numbers.count "H200, Mosaic"

prints a line of JSON for each program. It runs in a process of its own, in the environment of
a compiler for hardware that is not there (pallas_kernels/aot).
Dims: R rows, D inputs, F outputs, E experts
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax

from experiments.magic_numbers.conversions import in_kernel, of_type
from pallas_kernels.aot import compiler, gpu_compiler, tpu_compiler
from pallas_kernels.aot.case import NUM_EXPERTS, ROWS, Case, build
from pallas_kernels.aot.gpu_cost import tiling_of
from pallas_kernels.tiling import triton as triton_tiling

# Chip and back end by name: the compiler's target, and the back end's module.
TARGETS = {
    "H200, Mosaic": ("h200", "gpu"),
    "H200, Triton": ("h200", "triton"),
    "A100, Triton": ("a100", "triton"),
    "v5e": ("v5e", "tpu"),
    "v5p": ("v5p", "tpu"),
    "v6e": ("v6e", "tpu"),
}
# A loop of Triton over fewer steps than 4096 channels have is unrolled as a whole.
D, F = 4096, 1024
ARCHITECTURES = {"h200": "sm_90a", "a100": "sm_80"}
# An instruction with the cycles that it stalls its warp, as Mosaic and as nvdisasm write it.
_MOSAIC = re.compile(r"^\s*\S+:\S+:\S+:\S+:(\d+)\s+/\*[0-9a-f]+\*/\s+(.*)")
_NVDISASM = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?;)\s+/\* 0x[0-9a-f]+ \*/\n\s+/\* (0x[0-9a-f]+) \*/",
    re.MULTILINE,
)
_LABEL = re.compile(r"^\s*\.(L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*\(\.(L_x_\d+)\)")
_PRODUCT = re.compile(r"\bHG?MMA\.(?:64x(\d+)x16|16816)")


def programs(name: str) -> list[dict[str, Any]]:
    """`bits` of a weight, `dtype`, `rows` of an expert and `conversion` of each program."""
    dtypes = ("bfloat16",) if TARGETS[name][1] == "tpu" else ("bfloat16", "float16")
    return [
        {"bits": bits, "dtype": dtype, "rows": rows, "conversion": conversion}
        for dtype in dtypes
        for bits in (8, 4)
        for rows in ROWS.values()
        for conversion in of_type(dtype)
    ]


def counts(name: str) -> list[dict[str, Any]]:
    """`programs` with what each takes, in a child process.

    Raises:
        ValueError: the compiler is not installed, or it failed; says which, and what was said.
    """
    which = tpu_compiler if TARGETS[name][1] == "tpu" else gpu_compiler
    with tempfile.TemporaryDirectory() as dump:
        try:
            variables = which.child_variables(dump)
        except FileNotFoundError as error:
            raise ValueError(f"{name}: {error}") from None
        variables |= {compiler.DUMP_VARIABLE: dump}
        if which is gpu_compiler:
            variables["XLA_FLAGS"] = f"--xla_dump_to={dump}"
        child = subprocess.run(
            [sys.executable, "-m", "experiments.magic_numbers.count", name],
            env=os.environ | variables, capture_output=True, text=True,
        )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith('{"bits"')]
    if child.returncode or len(lines) != len(programs(name)):
        raise ValueError(f"{name}: the compiler ended with {child.stderr[-1500:]}")
    return [json.loads(line) for line in lines]


def count(name: str, program: dict[str, Any], dump: pathlib.Path) -> dict[str, Any]:
    """What one program takes, compiled in this process.

    Returns:
        On a TPU `bundles`, the instructions of the kernel. On a GPU of the loop over D, for
        128 channels: `instructions` of a warp, `conversions`, how many of them convert an
        integer, `stalls`, their cycles as ptxas wrote them into the code, and `cycles`, the
        larger of `stalls` and of what a scheduler issues for all warps of a block.
    """
    target, back_end = TARGETS[name]
    case = Case(
        "quantized_grouped_matmul", program["rows"] * NUM_EXPERTS, D, F, NUM_EXPERTS,
        dtype=program["dtype"], bits=program["bits"], is_native=True,
    )  # fmt: skip
    with in_kernel(back_end, program["conversion"]):
        if back_end == "tpu":
            return {"bundles": tpu_compiler.compile_here(target, case, dump)["bundles"]}
        if back_end == "gpu":
            gpu_compiler.compile_here(target, case, dump)
            sass = "\n".join(path.read_text() for path in dump.glob("grouped_*.sass*"))
            return per_channels(case, back_end, loop_of_mosaic(sass))
        function, specs = build(case, back_end)
        sharding = jax.sharding.SingleDeviceSharding(gpu_compiler.described_gpus(target)[0])
        specs = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), specs
        )
        jax.jit(function).lower(*specs).compile()
    [ptx] = (path for path in dump.glob("*.ptx") if path.stat().st_size)
    return per_channels(case, back_end, loop_of_nvdisasm(disassembled(ptx, target)))


def disassembled(ptx: pathlib.Path, target: str) -> str:
    """The machine code of what Triton's compiler hands to ptxas, with its encoding."""
    cubin = ptx.with_suffix(".cubin")
    subprocess.run(["ptxas", f"-arch={ARCHITECTURES[target]}", "-o", cubin, ptx], check=True)
    return subprocess.run(
        ["nvdisasm", "-c", "-hex", cubin], check=True, capture_output=True, text=True
    ).stdout


def loop_of_mosaic(sass: str) -> list[tuple[int, str]]:
    """`loop` of what Mosaic dumps."""
    lines = []
    for line in sass.splitlines():
        if found := _MOSAIC.match(line):
            lines.append((int(found[1]), found[2]))
        elif label := _LABEL.match(line):
            lines.append((None, label[1]))
    return loop(lines)


def loop_of_nvdisasm(sass: str) -> list[tuple[int, str]]:
    """`loop` of what nvdisasm prints; bits 41 to 44 of the second word are the stall."""
    pieces = re.split(r"^(?=\s*\.L_x_\d+:)", sass, flags=re.MULTILINE)
    lines = []
    for piece in pieces:
        if label := _LABEL.match(piece):
            lines.append((None, label[1]))
        lines += [
            ((int(each[2], 16) >> 41) & 15, each[1]) for each in _NVDISASM.finditer(piece)
        ]
    return loop(lines)


def loop(lines: list[tuple[int | None, str]]) -> list[tuple[int, str]]:
    """Stalls and instructions of the loop over D, the one of the tallest tile and innermost.

    Args:
        lines: of a label the stall is None.

    Raises:
        ValueError: there is no loop with products of the tensor core.
    """
    begins = {text: i for i, (stall, text) in enumerate(lines) if stall is None}
    loops = []
    for end, (stall, text) in enumerate(lines):
        branch = _BRANCH.search(text) if stall is not None else None
        begin = begins.get(branch[1], end + 1) if branch else end + 1
        body = [line for line in lines[begin : end + 1] if line[0] is not None]
        if products := products_of(body):
            per_product = products / sum("MMA" in text for _, text in body)
            loops.append((-per_product, len(body), body))
    if not loops:
        raise ValueError(f"expected a loop with products among {len(lines)} instructions")
    return min(loops, key=lambda each: each[:2])[2]


def products_of(body: list[tuple[int, str]]) -> int:
    """Multiplications of one warp; an HGMMA is issued by four."""
    found = (_PRODUCT.search(text) for _, text in body)
    return sum(16 * int(each[1]) * 16 if each[1] else 16 * 8 * 16 for each in found if each)


def per_channels(case: Case, back_end: str, body: list[tuple[int, str]]) -> dict[str, Any]:
    if back_end == "gpu":
        tiling = tiling_of(case)
        rows, features = tiling.tile_n, tiling.tile_m * tiling.warpgroups
        warps = 4 * tiling.warpgroups
    else:
        tiling = triton_tiling.default_tiling(case.R, case.E, case.dtype)
        rows, features, warps = tiling.rows, tiling.features, tiling.warps
    channels = products_of(body) * warps // (rows * features)
    to_128 = 128 / channels
    instructions = len(body)
    stalls = sum(stall for stall, _ in body)
    conversions = sum(bool(re.search(r"\b(I2F|I2FP)\b", text)) for _, text in body)
    return {
        "instructions": instructions * to_128,
        "stalls": stalls * to_128,
        "conversions": conversions * to_128,
        "cycles": max(stalls, instructions * warps // 4) * to_128,
    }


def main() -> None:
    name, dump = sys.argv[1], pathlib.Path(os.environ[compiler.DUMP_VARIABLE])
    for program in programs(name):
        print(json.dumps(program | count(name, program, dump)), flush=True)
        for file in dump.iterdir():
            file.unlink()


if __name__ == "__main__":
    main()
