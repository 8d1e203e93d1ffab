# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled to the machine code of an H200 on a machine without one, and their cost.

A description of the GPU (`h200.txtpb`) stands in for it: XLA, Mosaic, ptxas and nvdisasm run
as they would, nothing is executed. They are in the folder that the environment variable
SWITCHX_AOT_GPU names; `compiler.py` says how to run this file. A kernel's resources are of a
thread the registers at launch (Hopper's warpgroups then trade them) and the bytes spilled, the
shared memory of a block, HGMMA and all instructions in the machine code, what the loop over D
and its epilogue have of them (`gpu_cost.py`), XLA's temporary bytes, and how many kernels the
whole product launches, the one of its tile schedule among them.
"""

import functools
import os
import pathlib
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax._src.lib import xla_client
from jax.experimental import topologies
from jaxlib import _jax

from pallas_kernels.aot import compiler
from pallas_kernels.aot.case import Case, benchmark_cases, build, epilogue_cases, variant
from pallas_kernels.aot.gpu_cost import read_loop

TARGETS = {"h200": "h200.txtpb", "a100": "a100.txtpb"}
FOLDER_VARIABLE = "SWITCHX_AOT_GPU"
DEFAULT_FOLDER = ".venv/aot_gpu"
RESOURCES = (
    *("registers", "spill_bytes", "shared_bytes", "hgmma", "instructions", "temp_bytes"),
    *("loop_instructions", "loop_cycles", "loop_latency", "loop_hgmma"),
    *("epilogue_instructions", "epilogue_latency", "kernels"),
)
# Operations of an HLO program that launch nothing.
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


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
    # Few rows: sums in parts, so that every SM has a share of their experts' weights.
    return (
        found
        | epilogue_cases()
        | {
            "float16 forward 1024x4096 few": variant(dtype="float16"),
            "bfloat16 forward 1024x4096 one row": variant(R=1),
            "int4 1024x4096 one row": variant(quantized, bits=4, R=1),
            "bfloat16 forward 4096x1024 8 rows": variant(R=8, D=4096, F=1024),
            "int4 4096x1024 8 rows": variant(quantized, bits=4, R=8, D=4096, F=1024),
        }
    )


def compiler_folder() -> pathlib.Path:
    """The folder that holds the CUDA plugin and its tools.

    Raises:
        FileNotFoundError: the plugin is not installed, or is for another version of JAX.
    """
    folder = compiler.compiler_folder(FOLDER_VARIABLE, DEFAULT_FOLDER, "jax_cuda13_plugin")
    versions = [path.name for path in folder.glob("jax_cuda13_plugin-*.dist-info")]
    if f"jax_cuda13_plugin-{jax.__version__}.dist-info" not in versions:
        raise FileNotFoundError(
            f"the compiler in {folder} is {versions}, JAX is {jax.__version__}; run `make "
            "test-aot`, which installs its version"
        )
    return folder


def compiler_variables() -> dict[str, str]:
    """The environment of a process that compiles for GPUs and has none."""
    folder = compiler_folder()
    toolkit = folder / "nvidia" / "cu13"
    paths = [str(folder), str(compiler.ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_COMPILATION_CACHE_DIR": "",  # A cached kernel leaves no dump.
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": str(toolkit / "lib"),
        "PATH": f"{toolkit / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def child_variables(dump: str) -> dict[str, str]:
    """`compiler_variables`, and where the compiler leaves its notes."""
    return compiler_variables() | {
        "MOSAIC_GPU_CUDA_ROOT": str(compiler_folder() / "nvidia" / "cu13"),
        "MOSAIC_GPU_DUMP_TO": dump,
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
    }


def read_resources(ptxas: str, sass: str, passes: str) -> dict[str, int]:
    """Resources from what the compiler's stages wrote.

    Raises:
        ValueError: a stage did not write what is read here, or ptxas says that products wait
            for each other.
    """
    if notes := re.findall(r".*wgmma.mma_async instructions are serialized.*", ptxas):
        raise ValueError(f"expected products that do not wait for each other, got {notes}")
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
        **read_loop(sass),
    }


def count_kernels(hlo: str) -> int:
    """Kernels that the entry of a compiled program launches; it has no loops.

    Raises:
        ValueError: there is no entry.
    """
    found = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"expected HLO with an ENTRY computation, got {hlo[:200]!r}")
    # Opcodes follow the type, which is one word or a tuple in brackets.
    names = re.findall(
        r"^ +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", found[1], re.MULTILINE
    )
    return sum(name not in _FREE for name in names)


@functools.cache
def described_gpus(target: str, number: int = 1) -> list:
    """The devices that the compiler makes of a description."""
    description = pathlib.Path(__file__).with_name(TARGETS[target]).read_text()
    return topologies.get_topology_desc(
        target, "cuda", topology=f"1x1x{number}", target_config=description
    ).devices


def compile_lowered(lowered, devices, options: Mapping[str, str] | None = None):
    """Compiles a program that was lowered for an `AbstractMesh` of an `AbstractDevice`.

    Described devices of CUDA have no memories: programs that are lowered for them lose the
    memory kinds of their arrays, without a warning. `Lowered.compile` takes no abstract mesh,
    so this does what JAX itself does with a module.

    Args:
        lowered: a `jax.stages.Lowered`, for the platform `cuda`.
        devices: the devices that the compiler describes, in the order of the mesh.
        options: XLA's options, by name.

    Returns:
        An executable of jaxlib, with `hlo_modules()` and `get_compiled_memory_stats()`.
    """
    chosen = xla_client.CompileOptions()
    build = chosen.executable_build_options
    build.num_partitions = len(devices)
    build.use_spmd_partitioning = len(devices) > 1
    build.use_shardy_partitioner = jax.config.jax_use_shardy_partitioner
    build.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id for device in devices]])
    )
    chosen.env_option_overrides = list((options or {}).items())
    module = lowered.compiler_ir("stablehlo")
    return devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), chosen)


def compile_here(target: str, case: Case, dump: pathlib.Path) -> dict[str, int]:
    """Compiles in this process, whose environment is that of `child_variables`.

    Of an A100, whose kernels are Triton's, temporary bytes and kernels are all that is read.
    """
    function, specs = build(case, "gpu" if target == "h200" else "triton")
    sharding = jax.sharding.SingleDeviceSharding(described_gpus(target)[0])
    specs = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), specs
    )
    compiled = jax.jit(function).lower(*specs).compile()
    texts = (
        "\n".join(path.read_text() for path in sorted(dump.glob(pattern)))
        for pattern in ("grouped_*.ptxas", "grouped_*.sass*", "grouped_*.mlir-passes.log")
    )
    whole = {
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernels": count_kernels(compiled.as_text()),
    }
    return read_resources(*texts) | whole if target == "h200" else whole


COMPILER = compiler.Compiler(
    "gpu", TARGETS, budget_cases(), RESOURCES, child_variables, compile_here, is_by_jax=True
)

if __name__ == "__main__":
    COMPILER.main()
