# SPDX-License-Identifier: Apache-2.0
"""`switchx check planned_bytes`: what compiled training steps communicate and compute.

A small model's whole training step (forward, backward, optimizer) is compiled for eight
simulated devices on several meshes. The bytes of its collectives and the FLOPs of its products
are read off the compiled program, loops by their trips, and compared with
`planner.step_comm`, as the CPU compiler would have them, and `planner.step_time`.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax

from pallas_kernels.grouped_matmul.reference import default_tiling
from switchx.bench.report import Check, Report
from switchx.data.corpora.python_stdlib import PythonStdlib
from switchx.data.mixtures import Mixture
from switchx.data.objectives import CausalLM
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.partitioning.hlo_collectives import HloCollective, executed_collectives
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.partitioning.schedule import ScheduleSpec
from switchx.partitioning.ticks import branch_shares
from switchx.planner.layout import (
    OPTIMIZER_SLICES,
    SLICED_RULES,
    SPREAD_RULES,
    Layout,
    Workload,
)
from switchx.planner.program_cost import matrix_flops
from switchx.planner.step_comm import StepCollective, sparse_layer, step_collectives
from switchx.planner.step_time import executed_flops
from switchx.training.aot import batch_shapes
from switchx.training.job import TrainingJob
from switchx.training.losses import LossConfig
from switchx.training.program import TrainingProgram
from switchx.training.step import StepConfig
from switchx.training.workload import layout_of, workload_of

NUM_DEVICES = 8
ROWS = 16
BOUND = 0.05
TASK = Task("small", PythonStdlib(), ByteVocabulary(), CausalLM())
ZERO1 = Rules(optimizer_slices=OPTIMIZER_SLICES)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the cases' models, and L, the tokens of a row."""

    length: int
    d_model: int
    d_ff: int
    num_heads: int
    d_head: int
    vocab_size: int


SMALL = Sizes(length=8, d_model=64, d_ff=128, num_heads=8, d_head=8, vocab_size=96)
# A slice of each matrix is of whole tiles of a TPU's memory, and most matrices are too large to
# be combined with others: the TPU compiler reduces whole what is smaller.
LARGE = Sizes(
    length=64, d_model=1024, d_ff=2048, num_heads=8, d_head=128, vocab_size=2048
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh, whose experts are divided among tasks where `task_rows` has some;
    `left_over` says where the compiler differs from the planner."""

    name: str
    mesh: MeshSpec
    dispatcher: str | None = None
    remat: str = "none"
    is_encoder_decoder: bool = False
    group_rows: int = 2
    num_replicas: int = 0
    task_rows: tuple[int, ...] = ()
    scan_layers: bool = False
    num_layers: int = 2
    rows: int = ROWS
    num_microbatches: int = 1
    pipeline: ScheduleSpec = ScheduleSpec()


SCANNED = dict(scan_layers=True, num_layers=4)
STAGES = dict(scan_layers=True, num_layers=4, num_microbatches=4)
# Rows for which a tile of `grouped_matmul` is no larger than what an expert gets.
MANY = 512
CASES = (
    Case("dense data=8", MeshSpec()),
    Case("dense model=8", MeshSpec(data=1, model=8)),
    Case("dense data=4 model=2", MeshSpec(model=2)),
    Case("dense fsdp=8", MeshSpec(data=1, fsdp=8)),
    Case("dense data=2 fsdp=2 model=2", MeshSpec(data=2, fsdp=2, model=2)),
    Case("dense model=8 full remat", MeshSpec(data=1, model=8), remat="full"),
    Case("dense model=8 minimal remat", MeshSpec(data=1, model=8), remat="minimal"),
    Case("T5 model=8", MeshSpec(data=1, model=8), is_encoder_decoder=True),
    Case("gather data=4 model=2", MeshSpec(model=2), "gather"),
    Case("all_to_all data=2 expert=4", MeshSpec(expert=4), "all_to_all"),
    Case("all_to_all expert=4 full remat", MeshSpec(expert=4), "all_to_all", "full"),
    Case("all_to_all expert=4 minimal remat", MeshSpec(expert=4), "all_to_all", "minimal"),
    Case("all_to_all data=2 expert=2 model=2", MeshSpec(expert=2, model=2), "all_to_all"),
    Case("T5 all_to_all expert=4", MeshSpec(expert=4), "all_to_all", is_encoder_decoder=True),
    Case("hierarchical node=2 expert=4", MeshSpec(data=1, node=2, expert=4), "hierarchical"),
    Case("ragged_all_to_all expert=4", MeshSpec(expert=4), "ragged_all_to_all"),
    Case("dropless data=8", MeshSpec(), "dropless"),
    Case("dropless data=2 fsdp=4", MeshSpec(fsdp=4), "dropless"),
    Case("all_to_all fsdp=2 expert=4", MeshSpec(data=1, fsdp=2, expert=4), "all_to_all"),
    Case("all_to_all of shared groups", MeshSpec(expert=4), "all_to_all", group_rows=8),
    Case(
        "replicas all_to_all data=2 expert=2 model=2",
        MeshSpec(expert=2, model=2),
        "all_to_all",
        num_replicas=4,
    ),
    Case(
        "replicas ragged_all_to_all expert=2 model=2 full remat",
        MeshSpec(expert=2, model=2),
        "ragged_all_to_all",
        "full",
        num_replicas=8,
        rows=2 * MANY,
    ),
    Case("tasks expert=4", MeshSpec(expert=4), "all_to_all", task_rows=(12, 4)),
    Case("zero1 data=8", MeshSpec(rules=ZERO1)),
    Case("zero1 data=4 fsdp=2", MeshSpec(data=4, fsdp=2, rules=ZERO1)),
    Case("zero1 all_to_all data=2 expert=4", MeshSpec(expert=4, rules=ZERO1), "all_to_all"),
    Case(
        "sliced data=2 model=4", MeshSpec(model=4, rules=SLICED_RULES), "sliced", rows=MANY
    ),
    Case(
        "sliced_scatter data=2 model=4",
        MeshSpec(model=4, rules=SLICED_RULES),
        "sliced_scatter",
        rows=MANY,
    ),
    Case("spread fsdp=8", MeshSpec(data=1, fsdp=8, rules=SPREAD_RULES), "all_to_all"),
    Case(
        "spread fsdp=2 node=4 of shared groups",
        MeshSpec(data=1, fsdp=2, node=4, rules=SPREAD_RULES),
        "all_to_all",
        group_rows=8,
    ),
    Case("scanned data=8", MeshSpec(), **SCANNED),
    Case("scanned fsdp=8", MeshSpec(data=1, fsdp=8), **SCANNED),
    Case("scanned fsdp=8 full remat", MeshSpec(data=1, fsdp=8), remat="full", **SCANNED),
    Case("scanned fsdp=8 minimal remat", MeshSpec(data=1, fsdp=8), remat="minimal", **SCANNED),
    Case("scanned data=2 fsdp=2 model=2", MeshSpec(fsdp=2, model=2), **SCANNED),
    Case("scanned all_to_all expert=4 full remat", MeshSpec(expert=4), "all_to_all", "full",
         **SCANNED),
    Case("microbatches data=8", MeshSpec(), num_microbatches=2),
    Case("microbatches fsdp=8", MeshSpec(data=1, fsdp=8), num_microbatches=2),
    Case("microbatches scanned data=2 fsdp=4", MeshSpec(fsdp=4), num_microbatches=2, **SCANNED),
    Case("microbatches all_to_all expert=4", MeshSpec(expert=4), "all_to_all", rows=32,
         num_microbatches=2),
    Case("1f1b pipe=2 data=4", MeshSpec(pipe=2), **STAGES),
    Case("gpipe pipe=2 data=4", MeshSpec(pipe=2), pipeline=ScheduleSpec("gpipe"), **STAGES),
    Case("interleaved pipe=2 data=4", MeshSpec(pipe=2), **STAGES,
         pipeline=ScheduleSpec("interleaved", 2)),
    Case("1f1b pipe=2 data=2 model=2 full remat", MeshSpec(pipe=2, model=2), remat="full",
         **STAGES),
    Case("1f1b pipe=2 fsdp=4", MeshSpec(pipe=2, data=1, fsdp=4), **STAGES),
    Case("1f1b pipe=2 data=2 expert=2", MeshSpec(pipe=2, expert=2), "all_to_all", rows=32,
         **STAGES),
    Case("1f1b pipe=2 sliced data=2 model=2", MeshSpec(pipe=2, model=2, rules=SLICED_RULES),
         "sliced", rows=4 * MANY, **STAGES),
    Case("T5 1f1b pipe=2 data=4", MeshSpec(pipe=2), is_encoder_decoder=True, **STAGES),
)  # fmt: skip


def run(note: Callable[[str], None] = lambda text: None) -> Report:
    """Compiles every case for simulated devices."""
    rows = []
    for case in CASES:
        note(f"compiling {case.name}")
        rows.append(compare(case, jax.devices()[:NUM_DEVICES]))
    return Report("check planned_bytes", rows, checks(rows))


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The largest errors of all rows."""
    found = []
    for kind in ("bytes", "flops"):
        name = f"relative_error_of_{kind}"
        worst = max(abs(row[name]) for row in rows if name in row)
        found.append(Check(f"hlo_vs_planner_{kind}", worst, f"<={BOUND}"))
    return found


def compare(case: Case, devices: Sequence) -> dict[str, Any]:
    """A row: bytes of a case compiled and planned, by kind and altogether, and FLOPs."""
    is_cpu = devices[0].platform == "cpu"
    job = make_job(case, SMALL if is_cpu else LARGE)
    step, workload = compile_step(job, devices), workload_of(job)
    compiled, planned = step.num_bytes, planned_bytes(workload, step.layout, is_cpu=is_cpu)
    row = {"case": case.name, "devices": f"{len(devices)} {devices[0].device_kind}"}
    for kind in sorted(compiled | planned):
        row[f"{kind}_compiled_bytes"] = compiled[kind]
        row[f"{kind}_planned_bytes"] = planned[kind]
    # By kind: one that is too many must not make up for another that is too few.
    wrong = sum(abs(compiled[kind] - planned[kind]) for kind in compiled | planned)
    row["relative_error_of_bytes"] = wrong / compiled.total()
    tiles = row_tiles(workload, step.layout)
    if is_cpu or tiles is None:  # elsewhere kernels multiply, which the text does not show
        flops, planned_flops = step.flops(tiles), executed_flops(workload, step.layout)
        row |= {"compiled_flops": flops, "planned_flops": round(planned_flops)}
        row["relative_error_of_flops"] = planned_flops / flops - 1
    return row


def row_tiles(workload: Workload, layout: Layout) -> int | None:
    """Tiles of rows that a device's experts multiply in an even load, where the data decides.

    None where every expert has a block of as many rows.
    """
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
    return experts * math.ceil(load / tile)


def make_job(case: Case, sizes: Sizes = SMALL) -> TrainingJob:
    """The job of a case. Blocks are not scanned: a loop's body is in the program once."""
    switch, changes = (
        None,
        dict(step=StepConfig(num_microbatches=case.num_microbatches), pipeline=case.pipeline),
    )
    router = RouterConfig()
    if case.task_rows:
        tasks = tuple(dataclasses.replace(TASK, name=f"task {i}") for i in range(2))
        changes["source"] = Mixture(tasks, rows=case.task_rows)
        router = RouterConfig("task", num_tasks=len(case.task_rows))
    if case.dispatcher is not None:
        switch = SwitchConfig(
            8, every=2, group_size=case.group_rows * sizes.length, capacity_factor=1.0, min_capacity=1,
            dispatcher=case.dispatcher, num_replicas=case.num_replicas,
            router=router,
        )  # fmt: skip
    widths = dataclasses.asdict(sizes)
    length = widths.pop("length")
    shared = dict(**widths, remat=case.remat, num_decoder_layers=case.num_layers, scan_layers=case.scan_layers,
                  switch=switch)  # fmt: skip
    model = ModelConfig(
        "decoder_only", activation="gelu", norm="layer", positions="learned",
        max_length=2 * length, scale_attention=True, **shared,
    )  # fmt: skip
    if case.is_encoder_decoder:
        model = ModelConfig("encoder_decoder", num_encoder_layers=case.num_layers, **shared)
    return small_job(model, case.mesh, case.rows, length, **changes)


def small_job(
    model: ModelConfig, mesh: MeshSpec, rows: int, length: int, **changes
) -> TrainingJob:
    """A training job of rows of `length` tokens, with AdamW; its data is never read.

    Args:
        changes: fields of `TrainingJob`.
    """
    half = length if model.is_encoder_decoder else length // 2
    fields = dict(
        source=TASK,
        optimizer=AdamW(),
        schedule=Constant(1e-3),
        loss=LossConfig(layer_reduction="mean"),
        train_steps=1,
        seed=0,
        log_every=1,
        eval_every=1,
        checkpoint_every=1,
    )
    return TrainingJob(
        model=model, mesh=mesh, batch_size=rows, inputs_length=half, targets_length=half,
        **fields | changes,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled training step, as its text counts it.

    Attributes:
        layout: the same step, for the planner.
    """

    text: str
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

    def flops(self, row_tiles: int | None) -> int:
        """FLOPs of all matrix products of one device."""
        return matrix_flops(self.text, trips=row_tiles, shares=self.shares)


def compile_step(job: TrainingJob, devices: Sequence) -> Compiled:
    """Compiles a job's training step for so many devices."""
    program = TrainingProgram(job, devices)
    with program.scope():
        step = program.train_step.lower(
            program.abstract_state, batch_shapes(program), *program.slot_tables
        )
        # What is read off does not depend on LLVM, and its optimizations take long.
        is_cpu = devices[0].platform == "cpu"
        options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
        text = step.compile(compiler_options=options).as_text()
    layout = layout_of(job, program.mesh.shape)
    shares = branch_shares(program.pipeline) if program.pipeline else {}
    return Compiled(text, layout, shares)


def planned_bytes(workload: Workload, layout: Layout, *, is_cpu: bool) -> collections.Counter:
    """Bytes by kind of collective as the planner has them."""
    counted = collections.Counter()
    planned = step_collectives(workload, layout)
    if is_cpu:
        planned = compiled_on_cpu(planned, layout, is_hoisted=not workload.model.scan_layers)
    for each in planned:
        counted[each.kind] += round(each.total_bytes)
    return counted


def compiled_on_cpu(
    planned: list[StepCollective], layout: Layout, *, is_hoisted: bool = False
) -> list[StepCollective]:
    """The same collectives as XLA's CPU compiler has them.

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
