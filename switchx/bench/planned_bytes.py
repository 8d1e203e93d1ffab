# SPDX-License-Identifier: Apache-2.0
"""`switchx check planned_bytes`: what compiled training steps communicate and compute.

A small model's whole training step (forward, backward, optimizer) is compiled for eight
simulated devices on several meshes and, where the TPU compiler is installed, a wider one for
eight chips of a v5e. The bytes of its collectives and the FLOPs of its products are read off
the compiled program, loops by their trips, and compared with `planner.step_comm`, as the
target's compiler would have them, and `planner.step_time`.
"""

import collections
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax

from pallas_kernels.aot import tpu_compiler
from pallas_kernels.grouped_matmul.reference import default_tiling
from switchx.bench.report import Check, Report
from switchx.bench.step_cases import CASES, NUM_DEVICES, SMALL, Case, Sizes, make_job, tpu_cases
from switchx.compiled.collectives import HloCollective, executed_collectives
from switchx.compiled.devices import describe_devices, has_compiler, run_with_compiler
from switchx.compiled.flops import matrix_flops
from switchx.compiled.training_step import batch_shapes
from switchx.partitioning.ticks import branch_shares
from switchx.partitioning.topology import Topology
from switchx.planner.hardware import Compute, hardware_of
from switchx.planner.layout import Layout, Workload
from switchx.planner.step_comm import StepCollective, sparse_layer, step_collectives
from switchx.planner.step_time import executed_flops
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from switchx.training.workload import layout_of, workload_of

BOUND = 0.05
TOPOLOGY = Topology.parse("v5e:2x4")


def run(note: Callable[[str], None] = lambda text: None) -> Report:
    """Compiles every case for simulated devices, and those of `tpu_cases` for a v5e."""
    rows = []
    for case in CASES:
        note(f"compiling {case.name}")
        rows.append(compare(case, jax.devices()[:NUM_DEVICES]))
    rows += _rows_on_tpu(note)
    return Report("check planned_bytes", rows, checks(rows))


def _rows_on_tpu(note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Those of another process, which has the TPU compiler; none where it is not installed."""
    try:
        tpu_compiler.compiler_folder()
    except FileNotFoundError as error:
        note(f"{TOPOLOGY} left out: {error}")
        return []
    note(f"compiling {len(tpu_cases())} cases for {TOPOLOGY}")
    child = run_with_compiler(
        (), TOPOLOGY, module="switchx.bench.planned_bytes", capture_output=True, text=True
    )
    if child.returncode:
        raise RuntimeError(f"planned bytes on {TOPOLOGY}: {child.stderr[-2000:]}")
    return json.loads(child.stdout.splitlines()[-1])


def main() -> int:
    """Prints the rows of `TOPOLOGY` in the process that has its compiler."""
    if not has_compiler():
        raise RuntimeError("run `switchx check planned_bytes`, which starts this")
    devices = describe_devices(TOPOLOGY)
    print(json.dumps([compare(case, devices, sizes) for case, sizes in tpu_cases()]))
    return 0


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The largest errors of all rows."""
    found = []
    for kind in ("bytes", "flops"):
        name = f"relative_error_of_{kind}"
        worst = max(abs(row[name]) for row in rows if name in row)
        found.append(Check(f"hlo_vs_planner_{kind}", worst, f"<={BOUND}"))
    return found


def compare(case: Case, devices: Sequence, sizes: Sizes = SMALL) -> dict[str, Any]:
    """A row: bytes of a case compiled and planned, by kind and altogether, and FLOPs."""
    job, is_cpu = make_job(case, sizes), devices[0].platform == "cpu"
    step, workload = compile_step(job, devices), workload_of(job)
    compute = hardware_of(devices[0].device_kind).compute if not is_cpu else None
    planned = planned_bytes(workload, step.layout, compute)
    compiled = step.num_bytes
    name = case.name if sizes.compute == "float32" else f"{case.name} {sizes.compute}"
    row = {"case": name, "devices": f"{len(devices)} {devices[0].device_kind}"}
    for kind in sorted(compiled | planned):
        row[f"{kind}_compiled_bytes"] = compiled[kind]
        row[f"{kind}_planned_bytes"] = planned[kind]
    # By kind: one that is too many must not make up for another that is too few.
    wrong = sum(abs(compiled[kind] - planned[kind]) for kind in compiled | planned)
    row["relative_error_of_bytes"] = wrong / compiled.total()
    flops = step.flops(sorted_rows(workload, step.layout))
    planned_flops = executed_flops(workload, step.layout)
    row |= {"compiled_flops": flops, "planned_flops": round(planned_flops)}
    row["relative_error_of_flops"] = planned_flops / flops - 1
    return row


@dataclasses.dataclass(frozen=True)
class SortedRows:
    """Rows of a device's experts where the data says how many each of them has.

    Attributes:
        num_rows: of the array that they are in, with tokens or without.
        load: rows of one expert in an even load.
        tile: rows that are multiplied at once.
    """

    num_rows: int
    num_experts: int
    load: float
    tile: int

    @property
    def num_tiles(self) -> int:
        return self.num_experts * math.ceil(self.load / self.tile)

    @property
    def share(self) -> Fraction:
        """Of all rows, those with tokens."""
        return Fraction(self.num_experts * self.load) / self.num_rows


def sorted_rows(workload: Workload, layout: Layout) -> SortedRows | None:
    """The rows of a Switch layer; None where every expert has a block of as many."""
    if layout.dispatcher is None or layout.has_equal_blocks:
        return None
    layer = sparse_layer(workload, layout, "decoder")
    choices = layer.num_groups * layer.tokens_per_group * layer.num_choices
    experts = layer.over_slots.num_experts // layout.parts_of("E", "expert_params")
    rows = choices // layout.parts(layout.batch_axes)
    if layout.dispatcher == "ragged_all_to_all":
        parts = layout.parts_of("E", "expert_params")
        slots = layer.over_slots.num_experts * layer.num_groups * layer.capacity
        rows = min(parts * rows, slots // layout.parts(layout.batch_axes))
    of_experts = layout.rules.axes("E", layout, table="expert_params")
    # Devices with copies of all experts, which have tokens of their own.
    replicas = tuple(axis for axis in layout.batch_axes if axis not in of_experts)
    load = choices / layout.parts(replicas) / layer.over_slots.num_experts
    tile = default_tiling(rows, layer.d_model, layer.d_ff, experts).rows
    return SortedRows(rows, experts, load, tile)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled training step, as its text counts it.

    Attributes:
        argument_bytes: that a device holds of the state and the batch.
        layout: the same step, for the planner.
    """

    text: str
    argument_bytes: int
    layout: Layout
    shares: dict[str, Fraction]

    @property
    def executed(self) -> collections.Counter[HloCollective]:
        """How often each collective is executed in a step."""
        return executed_collectives(self.text, self.shares)

    @property
    def num_bytes(self) -> collections.Counter:
        """Bytes by kind of collective."""
        counted = collections.Counter()
        for each, count in self.executed.items():
            counted[each.kind] += each.num_bytes * count
        return counted

    def flops(self, rows: SortedRows | None) -> int:
        """FLOPs of all matrix products of one device."""
        if rows is None:
            return matrix_flops(self.text, shares=self.shares)
        return matrix_flops(
            self.text, trips=rows.num_tiles, shares=self.shares, kernel_share=rows.share
        )


def compile_step(job: TrainingJob, devices: Sequence) -> Compiled:
    """Compiles a job's training step for so many devices."""
    program = TrainingProgram(job, devices)
    with program.scope():
        step = program.train_step.lower(
            program.abstract_state, batch_shapes(program), *program.abstract_beside
        )
        # What is read off does not depend on LLVM, and its optimizations take long.
        is_cpu = devices[0].platform == "cpu"
        options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
        compiled = step.compile(compiler_options=options)
    layout = layout_of(job, program.mesh.shape)
    shares = branch_shares(program.pipeline) if job.mesh.pipe > 1 else {}
    held = compiled.memory_analysis().argument_size_in_bytes
    return Compiled(compiled.as_text(), held, layout, shares)


def planned_bytes(
    workload: Workload, layout: Layout, compute: Compute | None
) -> collections.Counter:
    """Bytes by kind of collective as the planner has them.

    Args:
        compute: of the devices; None for a CPU's.
    """
    counted = collections.Counter()
    if compute is not None:
        planned = step_collectives(workload, layout, compute)
    else:
        planned = step_collectives(workload, layout)
        planned = compiled_on_cpu(planned, layout, is_hoisted=not workload.model.scan_layers)
    for each in planned:
        counted[each.kind] += round(each.total_bytes)
    return counted


def compiled_on_cpu(
    planned: list[StepCollective], layout: Layout, *, is_hoisted: bool = False
) -> list[StepCollective]:
    """The same collectives of a model that computes in float32 as XLA's CPU compiler has them.

    It reduces the terms of a sum one by one, makes an all-reduce over all replicas and a slice
    where others reduce-scatter, and has no ragged all-to-all.

    Args:
        is_hoisted: a loop over microbatches gathers the same weights in every turn, as blocks
            are not scanned: it gathers them before.
    """

    def on_cpu(each: StepCollective) -> StepCollective:
        kind, axes, num_bytes = each.kind, each.axes, each.num_bytes
        if each.by_compiler and kind == "reduce-scatter":
            kind, axes = "all-reduce", layout.batch_axes
        if kind == "ragged-all-to-all":  # emulated, `partitioning/collectives.py`
            kind, num_bytes = "all-gather", num_bytes * layout.parts(axes)
        count = each.count * each.terms
        if is_hoisted and each.by_compiler and kind == "all-gather":
            count /= layout.num_microbatches
        return dataclasses.replace(
            each, kind=kind, axes=axes, num_bytes=num_bytes, count=count, terms=1
        )

    return [on_cpu(each) for each in planned]


if __name__ == "__main__":
    sys.exit(main())
