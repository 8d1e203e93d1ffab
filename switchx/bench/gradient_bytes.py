# SPDX-License-Identifier: Apache-2.0
"""`gradient_bytes_vs_one_reduction`: gradients cross the axes of pure replicas once a step.

A small model's whole training step in 4 and in 16 microbatches is compiled for eight devices on
every mesh of configs/meshes that has replicas (`partitioning/replicas.py`): simulated ones, and
of a v5e where the TPU compiler is installed. All that one device sends along these axes is
counted, loops by their trips, and divided by one reduction of its part of the gradients. XLA's
all-reduce is a reduce-scatter and an all-gather, so each of these counts half.

`expert_gradients_across_experts`: of the same programs, the bytes of sums of expert weights'
gradients over devices that have different experts. There are to be none: the gradient of an
expert is complete where it is.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import jax
import numpy as np

from pallas_kernels.aot import tpu_compiler
from switchx.bench.report import Check
from switchx.compiled.collectives import HloCollective, executed_collectives
from switchx.compiled.devices import describe_devices, has_compiler, run_with_compiler
from switchx.compiled.hlo import array_bytes
from switchx.compiled.training_step import batch_shapes, bytes_on_one_device
from switchx.gin_config.building import job_from_gin
from switchx.partitioning.mesh import named_axes
from switchx.partitioning.replicas import replica_axes
from switchx.partitioning.rules import MeshAxes
from switchx.partitioning.topology import Topology
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
MICROBATCHES = (4, 16)
TOPOLOGY = Topology.parse("v5e:2x4")
MOST = 1.02
# One row is one routing group, so that every replica has whole ones.
BINDINGS = (
    "BATCH_SIZE = 128",
    "INPUTS_LENGTH = 16",
    "TARGETS_LENGTH = 16",
    "VOCAB_SIZE = 1024",
    "SwitchConfig.group_size = 16",
    "ModelConfig.d_model = 64",
    "ModelConfig.d_ff = 128",
    # So large that a slice of each matrix fills the TPU's vectors (`optimizer_slices.py`).
    "ModelConfig.d_head = 64",
    "ModelConfig.scan_layers = True",
    # Divisible by 3, as no other size here is: by it an expert's weight is told from the rest.
    "SwitchConfig.d_ff = 96",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A file of configs/meshes and a number of microbatches."""

    mesh: str
    num_microbatches: int

    def job(self) -> TrainingJob:
        """The job of a case, for eight devices."""
        files = "runs/pretrain_tiny.gin", f"meshes/{self.mesh}.gin"
        return job_from_gin(files, (*BINDINGS, f"NUM_MICROBATCHES = {self.num_microbatches}"))


def mesh_names(devices: Sequence) -> list[str]:
    """The files of configs/meshes that have axes of pure replicas on these devices."""
    names = sorted(path.stem for path in CONFIGS.glob("meshes/*.gin"))
    found = []
    for name in names:
        mesh, count = Case(name, 1).job().mesh, len(devices)
        fits = mesh.num_devices(count) == count
        if fits and replica_axes(mesh.build(devices), mesh.rules):
            found.append(name)
    return found


def compare(case: Case, devices: Sequence) -> dict[str, Any]:
    """A row: bytes that one device sends along the axes of replicas, and one reduction's."""
    job = case.job()
    program = TrainingProgram(job, devices)
    with program.scope():
        step = program.train_step.lower(
            program.abstract_state, batch_shapes(program), *program.abstract_beside
        )
        # What is read off does not depend on LLVM, and its optimizations take long.
        is_cpu = devices[0].platform == "cpu"
        options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
        executed = executed_collectives(step.compile(compiler_options=options).as_text())
    rules = job.mesh.rules
    axes, experts = (
        replica_axes(program.mesh, rules),
        rules.axes("E", program.mesh, table="expert_params"),
    )
    sent = sum(
        count * one.num_bytes * (1 if one.kind == "all-reduce" else 0.5)
        for one, count in executed.items()
        if crossed_axes(one, program.mesh.shape) & set(axes)
    )
    gradients = bytes_on_one_device(program.abstract_state.params)
    return {
        "case": f"{case.mesh}, M={case.num_microbatches}, {devices[0].platform}",
        "mesh": named_axes(program.mesh.shape),
        "axes": " ".join(axes),
        "compiled_bytes": round(sent),
        "one_reduction_bytes": gradients,
        "ratio": sent / gradients,
        "expert_axes": " ".join(experts),
        "across_experts_bytes": bytes_across_experts(
            executed, program.mesh.shape, experts, job.model.switch.d_ff
        ),
    }


def bytes_across_experts(
    executed: Mapping[HloCollective, int],
    sizes: Mapping[str, int],
    experts: MeshAxes,
    d_ff: int,
) -> int:
    """Bytes of sums of experts' weights over devices that have different experts.

    Args:
        executed: the collectives of a step.
        sizes: of the mesh's axes.
        experts: the axes that experts are split over.
        d_ff: F of an expert. What has a dimension of it, or of a part of it along some axes, is
            the gradient of a weight: values within experts are not summed over axes at all.
    """
    parts = {math.prod(some) for n in range(3) for some in combinations(sizes.values(), n)}
    found = {d_ff // each for each in parts if d_ff % each == 0 and (d_ff // each) % 3 == 0}
    total = 0
    for one, count in executed.items():
        is_sum = one.kind in ("all-reduce", "reduce-scatter")
        if is_sum and crossed_axes(one, sizes) & set(experts):
            scale = len(one.groups[0]) if one.kind == "reduce-scatter" else 1
            for array in one.arrays:
                if found & set(array[1]):
                    total += scale * array_bytes(array) * count
    return total


def crossed_axes(one: HloCollective, sizes: Mapping[str, int]) -> set[str]:
    """The mesh axes along which the devices of some group differ."""
    shape, found = tuple(sizes.values()), set()
    for group in one.groups:
        places = np.array(np.unravel_index(group, shape))
        is_crossed = np.any(places != places[:, :1], axis=1)
        found |= {axis for axis, crossed in zip(sizes, is_crossed, strict=True) if crossed}
    return found


def measured_rows(note: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """The rows of this process' devices, and those of a v5e from another process."""
    rows = _rows(jax.devices()[: TOPOLOGY.num_devices], note)
    try:
        tpu_compiler.compiler_folder()
    except FileNotFoundError as error:
        note(f"gradients on {TOPOLOGY} left out: {error}")
        return rows
    note(f"compiling gradients for {TOPOLOGY}")
    child = run_with_compiler(
        (), TOPOLOGY, module="switchx.bench.gradient_bytes", capture_output=True, text=True
    )
    if child.returncode:
        raise RuntimeError(f"gradients on {TOPOLOGY}: {child.stderr[-2000:]}")
    return rows + json.loads(child.stdout.splitlines()[-1])


def _rows(devices: Sequence, note: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for name in mesh_names(devices):
        for num_microbatches in MICROBATCHES:
            note(f"compiling gradients on {name}, {num_microbatches} microbatches")
            rows.append(compare(Case(name, num_microbatches), devices))
    return rows


def check(rows: list[dict[str, Any]]) -> Check:
    """The largest ratio of all meshes, numbers of microbatches and platforms."""
    worst = max(row["ratio"] for row in rows)
    return Check("gradient_bytes_vs_one_reduction", worst, f"<={MOST}")


def check_experts(rows: list[dict[str, Any]]) -> Check:
    """The bytes of all programs together."""
    total = sum(row["across_experts_bytes"] for row in rows)
    return Check("expert_gradients_across_experts", total, "==0")


def main() -> int:
    """Prints the rows of `TOPOLOGY` in the process that has its compiler."""
    if not has_compiler():
        raise RuntimeError("run `switchx bench scale`, which starts this with the compiler")
    rows = _rows(describe_devices(TOPOLOGY), lambda text: None)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
