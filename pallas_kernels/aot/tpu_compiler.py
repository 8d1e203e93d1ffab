# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for a TPU on a machine that has none, and the resources they take.

The compiler is libtpu, in the folder that the environment variable SWITCHX_AOT_TPU names.
`compiler.py` says how to run this file. A kernel's resources are `vmem_bytes`, the end of what
it allocates of vector memory, where branches share addresses; `bundles`, its instructions,
counted once however often they run; `temp_bytes`, what the program around it takes of HBM
beside arguments and results.
"""

import os
import pathlib
import re

import jax
from jax.experimental import topologies

from pallas_kernels.aot import compiler
from pallas_kernels.aot.case import NUM_EXPERTS, ROWS, Case, benchmark_cases, build, variant
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
KERNEL_NAMES = ("multiply_rows", "sum_outer_products")


def budget_cases() -> dict[str, Case]:
    """The cases that the table holds, by name."""
    quantized, int4 = "quantized_grouped_matmul", {"bits": 4}
    float8 = {"bits": 8, "is_float8": True}
    many = {"R": ROWS["many"] * NUM_EXPERTS}
    rows = {"dtype": "float8_e4m3fn"}
    return benchmark_cases() | {
        "int4 epilogue 1024x4096 few": variant(quantized, **int4, epilogue=True),
        "int4 groups of 128 1024x4096 few": variant(quantized, **int4, group_size=128),
        "float32 forward 1024x4096 few": variant(dtype="float32"),
        "float8 1024x4096 few": variant(quantized, **float8),
        "float8 1024x4096 many": variant(quantized, **float8, **many),
        "float8 rows 1024x4096 many": variant(quantized, **float8, **many, **rows),
    }


def compiler_folder() -> pathlib.Path:
    """The folder that holds libtpu; raises FileNotFoundError if it is not installed."""
    return compiler.compiler_folder(FOLDER_VARIABLE, DEFAULT_FOLDER, "libtpu")


def compiler_variables() -> dict[str, str]:
    """The environment of a process that compiles for TPUs and has none."""
    path = [str(compiler.ROOT), str(compiler_folder()), os.environ.get("PYTHONPATH", "")]
    return {
        # Both are read when JAX is imported; libtpu would look for a TPU, then for a cloud.
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": "",
        # A program from the cache comes without notes.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


def child_variables(dump: str) -> dict[str, str]:
    """`compiler_variables`, and where the compiler leaves its notes."""
    # The last two of seventy stages: writing all of them takes as long as compiling.
    return compiler_variables() | {
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*|.*delay-converter.*"
    }


def compile_here(target: str, case: Case, dump: pathlib.Path) -> dict[str, int]:
    """Compiles in this process, whose environment is that of `child_variables`."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target])
    device = topology.devices[0]
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh([device], ("x",)), jax.sharding.PartitionSpec()
    )
    with described_tpu(device.device_kind, device.num_cores):
        function, specs = build(case, "tpu")
        specs = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), specs
        )
        compiled = jax.jit(function).lower(*specs).compile()
    return read_dump(dump) | {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes}


def read_dump(dump: pathlib.Path) -> dict[str, int]:
    """`vmem_bytes` and `bundles` of the one kernel whose notes lie in the folder."""
    listing = _note(dump, "schedule-analysis_final_bundles").read_text()
    bundles = re.search(r"total scheduled bundles:\s+(\d+)", listing)
    program = _note(dump, "post-delay-converter").read_text()
    # Offsets are hexadecimal, except for 0.
    found = re.findall(r"space=vmem, size = (0x[0-9a-f]+), offset = (0x[0-9a-f]+|0)", program)
    return {
        "vmem_bytes": max(int(size, 16) + int(offset, 16) for size, offset in found),
        "bundles": int(bundles.group(1)),
    }


def _note(dump: pathlib.Path, name: str) -> pathlib.Path:
    [file] = (file for kernel in KERNEL_NAMES for file in dump.glob(f"*-{kernel}*-{name}.txt"))
    return file


COMPILER = compiler.Compiler(
    "tpu",
    TOPOLOGIES,
    budget_cases(),
    ("vmem_bytes", "bundles", "temp_bytes"),
    child_variables,
    compile_here,
)

if __name__ == "__main__":
    COMPILER.main()
