# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for a TPU on a machine that has none, and what they take of it.

    python -m pallas_kernels.aot.tpu_compiler v5e < cases.json

reads a JSON list of cases (`case.py`) and prints a line of JSON for each: `vmem_bytes`, the
vector memory of the kernel; `bundles`, its instructions, counted once however often they run;
`temp_bytes`, what the program around it takes of HBM beside arguments and results; or
`error`, what was said instead. With `--budgets` it compiles all cases of `budget_cases` and
writes their row of the table, which tests hold the kernels to. The compiler is libtpu, found in
the folder that the environment variable SWITCHX_AOT_TPU names; it is put on the path of a child
process alone, because a JAX that finds it takes the machine for one with TPUs.
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
from jax.experimental import topologies

from pallas_kernels.aot.case import Case, benchmark_cases, build, by_name, variant
from pallas_kernels.tpu_chip import described_tpu

# The smallest slice of each generation. The compiler calls a v4's core a device of its own.
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
FOLDER_VARIABLE = "SWITCHX_AOT_TPU"
DEFAULT_FOLDER = ".venv/aot_tpu"
# Tells a process that it is the child, and where its compiler leaves its notes.
DUMP_VARIABLE = "SWITCHX_AOT_DUMP"
KERNEL_NAMES = ("multiply_rows", "sum_outer_products")
BUDGETS = pathlib.Path(__file__).with_name("tpu_budgets.json")
RESOURCES = ("vmem_bytes", "bundles", "temp_bytes")


def budget_cases() -> dict[str, Case]:
    """The cases that the table holds, by name."""
    quantized, int4 = "quantized_grouped_matmul", {"bits": 4}
    return benchmark_cases() | {
        "int4 epilogue 1024x4096 few": variant(quantized, **int4, epilogue=True),
        "int4 groups of 128 1024x4096 few": variant(quantized, **int4, group_size=128),
        "float32 forward 1024x4096 few": variant(dtype="float32"),
    }


def budgets() -> dict[str, dict[str, dict[str, int]]]:
    """The table: resources by target and name of the case."""
    return json.loads(BUDGETS.read_text())


def measure(target: str) -> dict[str, dict]:
    """Resources of every case of the table by its name, or what the compiler said instead."""
    named = budget_cases()
    return by_name(named, compile_cases(target, named.values()), RESOURCES)


def write_budgets(target: str) -> None:
    """Measures a target and puts its rows into the table, a case a line."""
    table = budgets() | {target: measure(target)}
    targets = []
    for name, rows in table.items():
        lines = (f"    {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items())
        targets.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    BUDGETS.write_text("{\n" + ",\n".join(targets) + "\n}\n")


def compiler_folder() -> pathlib.Path:
    """The folder that holds libtpu.

    Raises:
        FileNotFoundError: it is not there; the message says how to install it.
    """
    folder = pathlib.Path(os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER)).absolute()
    if not (folder / "libtpu").is_dir():
        raise FileNotFoundError(
            f"no libtpu in {folder}; run `make test-aot`, which installs it, or "
            f"`python -m pallas_kernels.aot.install tpu {DEFAULT_FOLDER}`; if it is elsewhere, "
            f"name its folder in {FOLDER_VARIABLE}"
        )
    return folder


def compile_cases(target: str, cases: Iterable[Case]) -> list[dict]:
    """Compiles cases for a target in a child process, one result for each, in order.

    Returns:
        Dictionaries with `case` and `error`; where `error` is None also `vmem_bytes`,
        `bundles` and `temp_bytes`.

    Raises:
        ValueError: a target that is not one of `TOPOLOGIES`.
        FileNotFoundError: no compiler; see `compiler_folder`.
        RuntimeError: the child ended before it was done, with the end of what it said.
    """
    if target not in TOPOLOGIES:
        raise ValueError(f"target={target!r} is not one of {', '.join(TOPOLOGIES)}")
    folder, cases = compiler_folder(), list(cases)
    root = str(pathlib.Path(__file__).parents[2])
    with tempfile.TemporaryDirectory() as dump:
        child = subprocess.run(
            [sys.executable, "-m", "pallas_kernels.aot.tpu_compiler", target],
            env=os.environ | child_variables(dump, [root, str(folder)]),
            input=json.dumps([dataclasses.asdict(case) for case in cases]),
            capture_output=True,
            text=True,
        )
    lines = [line for line in child.stdout.splitlines() if line.startswith('{"case"')]
    if len(lines) != len(cases):
        raise RuntimeError(
            f"the compiler for {target} ended with status {child.returncode} after "
            f"{len(lines)} of {len(cases)} cases: {child.stderr[-2000:]}"
        )
    return [json.loads(line) for line in lines]


def compiler_variables(path: list[str]) -> dict[str, str]:
    """The environment of a process that compiles for TPUs and has none.

    Args:
        path: folders of Python packages, the compiler's (`compiler_folder`) among them.
    """
    return {
        # Both are read when JAX is imported; libtpu would look for a TPU, then for a cloud.
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "",
        # From the cache comes a program without notes.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


def child_variables(dump: str, path: list[str]) -> dict[str, str]:
    """`compiler_variables`, and where the compiler leaves its notes."""
    return compiler_variables(path) | {
        DUMP_VARIABLE: dump,
        # The last two stages of seventy: writing out all takes as long as compiling.
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*|.*delay-converter.*",
    }


def compile_here(target: str, case: Case, dump: pathlib.Path) -> dict:
    """Compiles in this process, whose environment is that of `child_variables`."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target])
    device = topology.devices[0]
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh([device], ("x",)), jax.sharding.PartitionSpec()
    )
    result = {"case": dataclasses.asdict(case), "error": None}
    try:
        with described_tpu(device.device_kind, device.num_cores):
            function, specs = build(case, "tpu")
            specs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in specs]
            compiled = jax.jit(function).lower(*specs).compile()
        result |= read_dump(dump)
        result["temp_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    # Whatever the compiler says is the result of the case.
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:1500]
    for file in dump.iterdir():
        file.unlink()
    return result


def read_dump(dump: pathlib.Path) -> dict[str, int]:
    """`vmem_bytes` and `bundles` of the one kernel whose notes lie in the folder."""
    listing = _note(dump, "schedule-analysis_final_bundles").read_text()
    bundles = re.search(r"total scheduled bundles:\s+(\d+)", listing)
    program = _note(dump, "post-delay-converter").read_text()
    sizes = re.findall(r"#allocation\d+ \[.*?space=vmem, size = (0x[0-9a-f]+)", program)
    return {
        "vmem_bytes": sum(int(size, 16) for size in sizes),
        "bundles": int(bundles.group(1)),
    }


def _note(dump: pathlib.Path, name: str) -> pathlib.Path:
    [file] = (file for kernel in KERNEL_NAMES for file in dump.glob(f"*-{kernel}*-{name}.txt"))
    return file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=list(TOPOLOGIES))
    parser.add_argument("--budgets", action="store_true")
    arguments = parser.parse_args()
    if arguments.budgets:
        write_budgets(arguments.target)
        return
    cases = [Case(**fields) for fields in json.load(sys.stdin)]
    if DUMP_VARIABLE in os.environ:
        dump = pathlib.Path(os.environ[DUMP_VARIABLE])
        for case in cases:
            print(json.dumps(compile_here(arguments.target, case, dump)), flush=True)
        return
    for result in compile_cases(arguments.target, cases):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
