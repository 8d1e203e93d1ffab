# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled to the machine code of an H200 on a machine without one, and their cost.

A description of the GPU (`h200.txtpb`) stands in for it: XLA, Mosaic, ptxas and nvdisasm run
as they would, nothing is executed. The compiler is in packages of its own, which only the
process that compiles sees; J is JAX's version.

    pip install --target .venv/aot_gpu --no-deps jax-cuda13-plugin==J jax-cuda13-pjrt==J \
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-nvdisasm

`python -m pallas_kernels.aot.gpu_compiler h200 --budgets` writes the table that tests hold the
kernels to; without `--budgets`, cases come as a JSON list on standard input and a JSON object
for each goes to standard output.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable

import jax

from pallas_kernels.aot.case import Case, benchmark_cases, build, by_name, variant

TARGETS = {"h200": "h200.txtpb"}
FOLDER_VARIABLE = "SWITCHX_AOT_GPU"
DEFAULT_FOLDER = pathlib.Path(".venv/aot_gpu")
RESOURCES = ("registers", "spill_bytes", "shared_bytes", "hgmma", "instructions", "temp_bytes")
BUDGETS = pathlib.Path(__file__).with_name("gpu_budgets.json")


def budget_cases() -> dict[str, Case]:
    """The cases that the table holds, by name."""
    found = benchmark_cases()
    quantized = "quantized_grouped_matmul"
    for bits in (8, 4):
        variants = {
            "epilogue": {"epilogue": True},
            "groups of 128": {"group_size": 128},
            "float16": {"dtype": "float16"},
        }
        found |= {
            f"int{bits} {name} 1024x4096 few": variant(quantized, bits=bits, **changes)
            for name, changes in variants.items()
        }
    # One row: sums in parts, so that every SM has a share of its expert's weights.
    return found | {
        "float16 forward 1024x4096 few": variant(dtype="float16"),
        "bfloat16 forward 1024x4096 one row": variant(R=1),
        "int4 1024x4096 one row": variant(quantized, bits=4, R=1),
    }


def budgets() -> dict[str, dict[str, int]]:
    """The table: resources by name of the case."""
    return json.loads(BUDGETS.read_text())


def measure(target: str) -> dict[str, dict]:
    """Resources of every case of the table by its name, or what the compiler said instead."""
    named = budget_cases()
    return by_name(named, compile_cases(target, named.values()), RESOURCES)


def folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER)).resolve()


def missing() -> str | None:
    """Why nothing can be compiled here, and the way out; None if it can."""
    plugin = folder() / "jax_cuda13_plugin"
    if not plugin.is_dir():
        return (
            f"no compiler for GPUs in {folder()}; run `make test-aot`, which installs it, or "
            f"`python -m pallas_kernels.aot.install gpu {DEFAULT_FOLDER}`; if it is elsewhere, "
            f"set {FOLDER_VARIABLE} to its folder"
        )
    versions = [p.name for p in folder().glob("jax_cuda13_plugin-*.dist-info")]
    if f"jax_cuda13_plugin-{jax.__version__}.dist-info" not in versions:
        return f"the compiler in {folder()} is {versions}, JAX is {jax.__version__}"
    return None


def compile_cases(target: str, cases: Iterable[Case]) -> list[dict]:
    """Compiles each case in a process of its own that has the compiler.

    Returns:
        For each case `{"case": .., "error": null or text, ..}` with, if there is no error,
        RESOURCES: of a thread the registers at launch (Hopper's warpgroups then trade them)
        and bytes spilled, shared memory of a block, HGMMA and all instructions in the
        machine code, and XLA's temporary bytes.

    Raises:
        ValueError: unknown target, or the compiler is not there.
        RuntimeError: the process ended early.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is not one of {', '.join(TARGETS)}")
    if reason := missing():
        raise ValueError(reason)
    cases = list(cases)
    command = [sys.executable, "-m", "pallas_kernels.aot.gpu_compiler", target]
    with tempfile.TemporaryDirectory() as dumps:
        done = subprocess.run(
            command, env=_environment(dumps), capture_output=True, text=True,
            input=json.dumps([dataclasses.asdict(case) for case in cases]),
        )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(results) != len(cases):
        raise RuntimeError(f"the compiler ended with {done.returncode}: {done.stderr[-2000:]}")
    return results


def compiler_variables() -> dict[str, str]:
    """The environment of a process that compiles for GPUs and has none."""
    toolkit = folder() / "nvidia" / "cu13"
    root = pathlib.Path(__file__).parents[2]
    paths = [str(folder()), str(root), os.environ.get("PYTHONPATH", "")]
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_COMPILATION_CACHE_DIR": "",  # A cached kernel leaves no dump.
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": str(toolkit / "lib"),
        "PATH": f"{toolkit / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _environment(dumps: str) -> dict[str, str]:
    return {
        **os.environ,
        **compiler_variables(),
        "MOSAIC_GPU_CUDA_ROOT": str(folder() / "nvidia" / "cu13"),
        "MOSAIC_GPU_DUMP_TO": dumps,
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
    }


def read_resources(ptxas: str, sass: str, passes: str) -> dict[str, int]:
    """Resources from what the compiler's stages wrote.

    Raises:
        ValueError: one of them did not write what is read here.
    """
    registers = re.findall(r"Used (\d+) registers", ptxas)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas)
    shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)
    instructions = len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+\S", sass))
    if not (registers and spills and shared and instructions):
        raise ValueError(
            "expected registers, spills, shared memory and instructions from ptxas, Mosaic "
            f"and nvdisasm, got {registers}, {spills}, {shared[:1]}, {instructions}; other "
            "versions of these tools may write them otherwise"
        )
    return {
        "registers": max(map(int, registers)),
        "spill_bytes": sum(map(int, spills)),
        "shared_bytes": max(map(int, shared)),
        "hgmma": sass.count("HGMMA"),
        "instructions": instructions,
    }


def _read_dumps(dumps: pathlib.Path) -> dict[str, int]:
    def text(pattern: str) -> str:
        return "\n".join(path.read_text() for path in sorted(dumps.glob(pattern)))

    return read_resources(text("*.ptxas"), text("*.sass*"), text("*.mlir-passes.log"))


def _compile(case: Case, device) -> dict:
    dumps = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    for path in dumps.iterdir():
        path.unlink()
    function, specs = build(case, "gpu")
    sharding = jax.sharding.SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in specs]
    compiled = jax.jit(function).lower(*specs).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {**_read_dumps(dumps), "temp_bytes": temporary}


def _serve(target: str) -> None:
    """The process that compiles: cases in, results out."""
    from jax.experimental import topologies

    description = pathlib.Path(__file__).with_name(TARGETS[target]).read_text()
    device = topologies.get_topology_desc(
        target, "cuda", topology="1x1x1", target_config=description
    ).devices[0]
    for fields in json.load(sys.stdin):
        result = {"case": fields, "error": None}
        try:
            result |= _compile(Case(**fields), device)
        except Exception as error:  # Any compiler error is this case's result.
            result["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--budgets", action="store_true")
    arguments = parser.parse_args()
    if not arguments.budgets:
        _serve(arguments.target)
        return
    rows = measure(arguments.target).items()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows)
    BUDGETS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
