# SPDX-License-Identifier: Apache-2.0
"""Exported programs compiled ahead of time for a target topology, and the memory they need.

    SWITCHX_AOT_TPU=.venv/aot_tpu switchx deploy --platform=tpu ...

compiles where the compiler is installed (docs/compiled.md says how), in a separate process:
if JAX sees the compiler, it assumes that the machine has accelerators. Nothing is run.
"""

import importlib
import json
import pathlib
import re
import sys
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.aot import gpu_compiler
from pallas_kernels.aot.tpu_compiler import TOPOLOGIES
from switchx.compiled.collectives import collectives_by_kind
from switchx.compiled.devices import describe_devices, described, run_with_compiler
from switchx.fields import json_text
from switchx.hardware.spec import hardware_of
from switchx.inference.run_exported import MANIFEST
from switchx.partitioning.topology import GENERATIONS, Topology

PROGRAMS = ("prefill", "step")


def slice_for(device_kind: str, devices: int) -> Topology | None:
    """A slice of this number of devices of a kind, or for one device the smallest slice.

    None if there is none, or the kind is not known.
    """
    try:
        name = hardware_of(device_kind).name
    except ValueError:
        return None
    if name not in GENERATIONS:
        return None
    smallest = Topology.parse(TOPOLOGIES.get(name, name))
    if devices == 1:
        return smallest
    return next(iter(smallest.with_devices(devices)), None)


def compile_programs(
    folder: pathlib.Path, platform: str, topology: Topology
) -> dict[str, Any] | None:
    """Compiles the programs of an export for a device of a slice, and measures each.

    Returns:
        `needed_bytes` on the device, `host_bytes` in its host's memory and `collectives` (how
        often each kind is executed) of prefill and step; None if no compiler is installed.

    Raises:
        RuntimeError: the compiler refuses a program; the message has its error.
    """
    words = [str(folder), platform, str(topology)]
    try:
        done = run_with_compiler(
            words, topology, module="switchx.deploy.compiled", capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    if done.returncode:
        errors = re.findall(r"^[\w.]+Error: .*", done.stderr, re.MULTILINE) or ["", done.stderr]
        raise RuntimeError(
            f"the compiler for {topology} refuses the programs of {folder.name}: "
            f"{errors[-1].strip()[-600:]}; use another --device_kind, --mesh or --bits"
        )
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    """Compiles in this process: FOLDER PLATFORM TOPOLOGY; prints a JSON object."""
    folder, platform, name = argv
    if platform == "cuda":
        # Importing it tells XLA where the runtime of Hopper's kernels is.
        importlib.import_module("jax.experimental.mosaic.gpu")
    root = pathlib.Path(folder)
    manifest = json.loads((root / MANIFEST).read_bytes())
    sizes = manifest["mesh"]
    needed = int(np.prod(list(sizes.values())))
    devices = np.array(describe_devices(Topology.parse(name))[:needed], object)
    types = (AxisType.Auto,) * len(sizes)
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    programs = manifest["programs"][platform]
    found = {each: _compiled(root, programs, each, platform, mesh) for each in PROGRAMS}
    print(json_text(found))
    return 0


def _compiled(
    root: pathlib.Path, programs, name: str, platform: str, mesh: Mesh
) -> dict[str, Any]:
    devices, options = list(mesh.devices.flat), programs.get("compiler_options")
    is_described = platform == "cuda" and len(devices) == 1
    if is_described:  # described devices have no memories to place a ring's experts in
        mesh = described(mesh)

    def structs(described: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            each: jax.ShapeDtypeStruct(
                x["shape"],
                x["dtype"],
                sharding=NamedSharding(
                    mesh, PartitionSpec(*map(tuple, x["axes"])), memory_kind=x.get("memory")
                ),
            )
            for each, x in described.items()
        }

    program = programs[name]
    exported = jax_export.deserialize(bytearray((root / program["file"]).read_bytes()))
    run = jax.jit(exported.call, donate_argnums=() if name == "prefill" else (1,))
    traced = run.trace(structs(programs["weights"]), structs(program["in"]))
    lowered = traced.lower(lowering_platforms=(platform,))
    if is_described:
        compiled = gpu_compiler.compile_lowered(lowered, devices, options)
        memory = compiled.get_compiled_memory_stats()
        text = compiled.hlo_modules()[0].to_string()
    else:
        compiled = lowered.compile(compiler_options=options)
        memory, text = compiled.memory_analysis(), compiled.as_text()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    used = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    executed = collectives_by_kind(text)
    return {
        "needed_bytes": memory.argument_size_in_bytes + max(0, results) + used,
        "host_bytes": memory.host_argument_size_in_bytes,
        "collectives": {kind: count for kind, (count, _) in executed.items()},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
