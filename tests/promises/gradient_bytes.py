# SPDX-License-Identifier: Apache-2.0
"""`gradient_bytes_vs_one_reduction`: gradients cross the axes of pure replicas once a step.

A small model's whole training step in 4 and in 16 microbatches is compiled for eight devices on
every mesh of configs/meshes that has replicas (`partitioning/replicas.py`): simulated ones, and
of a v5e where the TPU compiler is installed. All that one device sends along these axes is
counted, loops by their trips, and divided by one reduction of its part of the gradients. XLA's
all-reduce is a reduce-scatter and an all-gather, so each of these counts half.

`expert_gradients_across_experts`: in the same programs, the bytes of sums of expert weights'
gradients over devices that have different experts. There should be none: the gradient of an
expert is complete where it is.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import jax
import numpy as np

from switchx.compiled.collectives import HloCollective, executed_collectives
from switchx.compiled.hlo import Array
from switchx.compiled.training_step import bytes_on_one_device
from switchx.gin_config.building import job_from_gin
from switchx.partitioning.replicas import replica_axes
from switchx.partitioning.rules import MeshAxes
from switchx.training.job import TrainingJob
from tests.processes import ROOT
from tests.promises.compiled_steps import NUM_DEVICES, compile_step, on_tpu, print_rows

MICROBATCHES = (4, 16)
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
    # The only size here that is divisible by 3: it tells an expert's weight from the rest.
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
    names = sorted(path.stem for path in ROOT.glob("configs/meshes/*.gin"))
    found = []
    for name in names:
        mesh, count = Case(name, 1).job().mesh, len(devices)
        fits = mesh.num_devices(count) == count
        if fits and replica_axes(mesh.build(devices), mesh.rules):
            found.append(name)
    return found


def compared(case: Case, devices: Sequence) -> Iterator[tuple]:
    """Bytes that one device sends along the axes of replicas over one reduction's, and bytes of
    sums over devices that have different experts."""
    job = case.job()
    program, compiled = compile_step(job, devices)
    executed, sizes = executed_collectives(compiled.as_text()), program.mesh.shape
    rules = job.mesh.rules
    axes = replica_axes(program.mesh, rules)
    sent = sum(
        count * one.num_bytes * (1 if one.kind == "all-reduce" else 0.5)
        for one, count in executed.items()
        if crossed_axes(one, sizes) & set(axes)
    )
    what = f"{case.mesh}, M={case.num_microbatches}, {devices[0].platform}"
    gradients = bytes_on_one_device(program.abstract_state.params)
    yield "gradient_bytes_vs_one_reduction", f"{what}, over {' '.join(axes)}", sent / gradients
    experts = rules.axes("E", program.mesh, table="expert_params")
    across = bytes_across_experts(executed, sizes, experts, job.model.switch.d_ff)
    yield "expert_gradients_across_experts", f"{what}, over {' '.join(experts)}", across


def bytes_across_experts(
    executed: Mapping[HloCollective, int],
    sizes: Mapping[str, int],
    experts: MeshAxes,
    d_ff: int,
) -> int:
    """Bytes of sums of experts' weights over devices that have different experts.

    Args:
        executed: the collectives of a step.
        sizes: sizes of the mesh's axes.
        experts: the axes that experts are split over.
        d_ff: F of an expert. An array with a dimension of F, or of a part of F along some axes,
            is a weight's gradient: values within experts are not summed over axes at all.
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
                    total += scale * Array(*array).num_bytes * count
    return total


def crossed_axes(one: HloCollective, sizes: Mapping[str, int]) -> set[str]:
    """The mesh axes along which the devices of some group differ."""
    shape, found = tuple(sizes.values()), set()
    for group in one.groups:
        places = np.array(np.unravel_index(group, shape))
        is_crossed = np.any(places != places[:, :1], axis=1)
        found |= {axis for axis, crossed in zip(sizes, is_crossed, strict=True) if crossed}
    return found


def everywhere() -> Iterator[tuple]:
    """Rows for simulated devices and for a v5e."""
    yield from all_cases(jax.devices()[:NUM_DEVICES])
    yield from on_tpu("tests.promises.gradient_bytes")


def all_cases(devices: Sequence) -> Iterator[tuple]:
    """Rows for each mesh and number of microbatches."""
    for name in mesh_names(devices):
        for num_microbatches in MICROBATCHES:
            yield from compared(Case(name, num_microbatches), devices)


if __name__ == "__main__":
    print_rows(all_cases)
