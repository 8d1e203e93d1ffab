# SPDX-License-Identifier: Apache-2.0
"""`hlo_vs_planner_bytes`, `hlo_vs_planner_flops`: what compiled training steps take.

A small model's whole training step (forward, backward, optimizer) is compiled for eight
simulated devices on several meshes and, where the TPU compiler is installed, a wider one for
eight chips of a v5e. The bytes of its collectives and the FLOPs of its products are read off
the compiled program, loops by their trips, and compared with `planner.step_comm`, as the
target's compiler would have them, and `planner.step_time`.
"""

import collections
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction

import jax

from pallas_kernels.grouped_matmul.reference import default_tiling
from switchx.compiled.collectives import executed_collectives
from switchx.compiled.flops import matrix_flops
from switchx.compiled.workload import layout_of, workload_of
from switchx.hardware.spec import Compute, hardware_of
from switchx.pipeline.ticks import branch_shares
from switchx.planner.layout import Layout, Workload
from switchx.planner.step_comm import StepCollective, sparse_layer, step_collectives
from switchx.planner.step_time import executed_flops
from tests.promises.compiled_steps import NUM_DEVICES, compile_step, on_tpu, print_rows
from tests.promises.step_cases import CASES, SMALL, Case, Sizes, make_job, tpu_cases

BRIEF = tuple(
    case
    for case in CASES
    if case.name
    in (
        "dense data=2 fsdp=2 model=2",
        "1f1b pipe=2 data=4",
        "copies all_to_all data=2 expert=2 model=2",
    )
)


def everywhere() -> Iterator[tuple]:
    """Rows for simulated devices and for a v5e."""
    yield from on_simulated_devices()
    yield from on_tpu("tests.promises.planned_bytes")


def on_simulated_devices(cases=CASES) -> Iterator[tuple]:
    """Rows of each case."""
    for case in cases:
        yield from compared(case, jax.devices()[:NUM_DEVICES])


def compared(case: Case, devices: Sequence, sizes: Sizes = SMALL) -> Iterator[tuple]:
    """Relative errors of a case's bytes and FLOPs, and the bytes of each kind."""
    job = make_job(case, sizes)
    workload, is_cpu = workload_of(job), devices[0].platform == "cpu"
    program, compiled = compile_step(job, devices)
    text, layout = compiled.as_text(), layout_of(job, program.mesh.shape)
    shares = branch_shares(program.pipeline) if job.mesh.pipe > 1 else {}
    measured = collections.Counter()
    for each, count in executed_collectives(text, shares).items():
        measured[each.kind] += each.num_bytes * count
    compute = None if is_cpu else hardware_of(devices[0].device_kind).compute
    planned = planned_bytes(workload, layout, compute)
    what = f"{case.name}, {sizes.compute}, {devices[0].device_kind}"
    for kind in sorted(measured | planned):
        yield f"compiled {kind} bytes", what, measured[kind]
        yield f"planned {kind} bytes", what, planned[kind]
    yield "hlo_vs_planner_bytes", what, bytes_error(measured, planned)
    rows = sorted_rows(workload, layout)
    of_rows = {} if rows is None else {"trips": rows.num_tiles, "kernel_share": rows.share}
    flops = matrix_flops(text, shares=shares, **of_rows)
    yield "hlo_vs_planner_flops", what, abs(executed_flops(workload, layout) / flops - 1)


def bytes_error(measured: collections.Counter, planned: collections.Counter) -> float:
    """The error by kind: too many bytes of one must not make up for too few of another."""
    wrong = sum(abs(measured[kind] - planned[kind]) for kind in measured | planned)
    return wrong / measured.total()


@dataclasses.dataclass(frozen=True)
class SortedRows:
    """Rows of a device's experts if the data determines how many each of them has.

    Attributes:
        num_rows: number of rows of the array that they are in, with tokens or without.
        load: rows of one expert if the load is even.
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
        """The share of all rows that have tokens."""
        return Fraction(self.num_experts * self.load) / self.num_rows


def sorted_rows(workload: Workload, layout: Layout) -> SortedRows | None:
    """The rows of a Switch layer; None if all experts have blocks of one size."""
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
    names = sys.argv[1:]
    print_rows(
        lambda devices: (
            row
            for case, sizes in tpu_cases()
            if not names or f"{case.name}, {sizes.compute}" in names
            for row in compared(case, devices, sizes)
        )
    )
