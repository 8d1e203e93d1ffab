# SPDX-License-Identifier: Apache-2.0
"""Absent devices, as their compilers describe them, and a process that has a compiler.

If JAX finds an accelerator's plug-in, it assumes that the machine has accelerators, so the
compilers are in folders of their own, only on the path of a child process.
"""

import json
import os
import subprocess
from collections.abc import Sequence

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from pallas_kernels.aot import gpu_compiler, tpu_compiler
from switchx.own_code import python_words
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology

# Environment variable of the process that has a compiler.
CHILD_VARIABLE = "SWITCHX_COMPILES"


def has_compiler() -> bool:
    """Whether this is the process that `run_with_compiler` started."""
    return CHILD_VARIABLE in os.environ


def run_with_compiler(
    arguments: Sequence[str], topology: Topology, *, module: str = "switchx", **options
):
    """Runs `python -m switchx ...` in a process that can compile for the slice.

    Args:
        module: module to run.
        options: options of `subprocess.run`.

    Raises:
        FileNotFoundError: no compiler is installed; the message says how to get it.
    """
    if topology.generation.platform == "tpu":
        variables = tpu_compiler.compiler_variables()
    else:
        variables = gpu_compiler.compiler_variables() | {"XLA_FLAGS": ""}
    command = [*python_words(), "-m", module, *arguments]
    return subprocess.run(
        command, env=os.environ | variables | {CHILD_VARIABLE: "1"}, **options
    )


def json_of_child(arguments: Sequence[str], topology: Topology, module: str = "switchx"):
    """The JSON that such a process prints as its last line.

    Raises:
        FileNotFoundError: no compiler is installed; the message says how to get it.
        RuntimeError: the process ended without it; the message has the end of its output.
    """
    child = run_with_compiler(
        arguments, topology, module=module, capture_output=True, text=True
    )
    last = child.stdout.rstrip().rpartition("\n")[2]
    if not last.startswith(("{", "[")):
        raise RuntimeError(
            f"{' '.join(arguments)}: the compiler for {topology} ended with status "
            f"{child.returncode}: {child.stderr[-2000:]}"
        )
    return json.loads(last)


def describe_devices(topology: Topology) -> list:
    """The slice's devices, as the compiler describes them.

    Raises:
        ValueError: the compiler knows no such slice; the message has what it says.
    """
    try:
        if topology.generation.platform == "tpu":
            # Otherwise libtpu describes a v4's cores as separate devices.
            options = {"chip_config_name": "megacore"} if topology.kind == "v4" else {}
            return topologies.get_topology_desc(
                platform="tpu", topology_name=str(topology), **options
            ).devices
        return gpu_compiler.described_gpus(topology.kind, topology.num_devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"topology {topology}: the compiler says: {error}") from error


def described(mesh: Mesh) -> AbstractMesh:
    """The mesh without its devices, but with their kind."""
    device = mesh.devices.flat[0]
    kind = AbstractDevice(
        device_kind=device.device_kind, num_cores=None, platform=device.platform
    )
    return mesh.abstract_mesh.update(abstract_device=kind)


def require_mesh_fits(mesh: MeshSpec, topology: Topology) -> None:
    """Checks that a mesh uses all of a slice's devices, before anything is compiled.

    Raises:
        ValueError: the mesh does not; the message names slices and meshes that go together.
    """
    available = topology.num_devices
    needed = mesh.num_devices(available)
    if needed == available:
        return
    others = mesh.num_devices(1)
    slices = topology.with_devices(needed) or topology.with_devices(others)
    ways = [f"--topology={slices[0]}"] if slices else []
    if available % others == 0:
        ways.append("leave MeshSpec.data out, which then takes the devices that are left")
    else:
        ways.append(f"axes whose product divides {available}")
    raise ValueError(
        f"mesh {mesh} needs {needed} devices, but {topology} has {available}; use "
        f"{', or '.join(ways)}"
    )
