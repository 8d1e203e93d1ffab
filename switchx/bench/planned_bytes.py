# SPDX-License-Identifier: Apache-2.0
"""`switchx check planned_bytes`: what compiled training steps communicate, and the planner's.

A small model's whole training step (forward, backward, optimizer) is compiled for eight
simulated devices on several meshes; the bytes of its collectives are read off the compiled
program and compared with `planner.step_comm`, as the CPU compiler would have them.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from switchx.bench.report import Check, Report
from switchx.data.corpora.python_stdlib import PythonStdlib
from switchx.data.mixtures import Mixture
from switchx.data.objectives import CausalLM
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.optim.adamw import AdamW
from switchx.optim.schedules import Constant
from switchx.partitioning.hlo_collectives import collectives
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.planner.layout import OPTIMIZER_SLICES, SLICED_RULES, SPREAD_RULES, Layout
from switchx.planner.step_comm import compiled_on_cpu, step_collectives
from switchx.training.aot import batch_shapes
from switchx.training.job import TrainingJob
from switchx.training.losses import LossConfig
from switchx.training.program import TrainingProgram
from switchx.training.workload import workload_of

NUM_DEVICES = 8
ROWS, LENGTH = 16, 8
BOUND = 0.05
TASK = Task("small", PythonStdlib(), ByteVocabulary(), CausalLM())
ZERO1 = Rules(optimizer_slices=OPTIMIZER_SLICES)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh, whose experts are divided among tasks where `task_rows` has some;
    `left_over` says where the compiler differs from the planner."""

    name: str
    mesh: MeshSpec
    dispatcher: str | None = None
    remat: str = "none"
    is_encoder_decoder: bool = False
    group_size: int = 16
    num_replicas: int = 0
    task_rows: tuple[int, ...] = ()
    left_over: str = ""


CASES = (
    Case("dense data=8", MeshSpec()),
    Case("dense model=8", MeshSpec(data=1, model=8)),
    Case("dense data=4 model=2", MeshSpec(model=2)),
    Case("dense fsdp=8", MeshSpec(data=1, fsdp=8)),
    Case("dense model=8 full remat", MeshSpec(data=1, model=8), remat="full"),
    Case("T5 model=8", MeshSpec(data=1, model=8), is_encoder_decoder=True),
    Case("gather data=4 model=2", MeshSpec(model=2), "gather"),
    Case("all_to_all data=2 expert=4", MeshSpec(expert=4), "all_to_all"),
    Case("all_to_all expert=4 full remat", MeshSpec(expert=4), "all_to_all", "full"),
    Case("all_to_all data=2 expert=2 model=2", MeshSpec(expert=2, model=2), "all_to_all"),
    Case("T5 all_to_all expert=4", MeshSpec(expert=4), "all_to_all", is_encoder_decoder=True),
    Case("hierarchical node=2 expert=4", MeshSpec(data=1, node=2, expert=4), "hierarchical"),
    Case("ragged_all_to_all expert=4", MeshSpec(expert=4), "ragged_all_to_all"),
    Case("all_to_all fsdp=2 expert=4", MeshSpec(data=1, fsdp=2, expert=4), "all_to_all"),
    Case("all_to_all of shared groups", MeshSpec(expert=4), "all_to_all", group_size=64),
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
        num_replicas=2,
    ),
    Case("tasks expert=4", MeshSpec(expert=4), "all_to_all", task_rows=(12, 4)),
    Case("zero1 data=8", MeshSpec(rules=ZERO1)),
    Case("zero1 data=4 fsdp=2", MeshSpec(data=4, fsdp=2, rules=ZERO1)),
    Case("zero1 all_to_all data=2 expert=4", MeshSpec(expert=4, rules=ZERO1), "all_to_all"),
    Case("sliced data=2 model=4", MeshSpec(model=4, rules=SLICED_RULES), "sliced"),
    Case("spread fsdp=8", MeshSpec(data=1, fsdp=8, rules=SPREAD_RULES), "all_to_all"),
    Case(
        "spread fsdp=2 node=4 of shared groups",
        MeshSpec(data=1, fsdp=2, node=4, rules=SPREAD_RULES),
        "all_to_all",
        group_size=64,
    ),
)
# The compiler goes from slices of D to slices of the batch by gathering over all devices
# where `fsdp` is between others ("involuntary full rematerialization"): not modelled.
LEFT_OVER = (
    Case(
        "dense data=2 fsdp=2 model=2",
        MeshSpec(data=2, fsdp=2, model=2),
        left_over="weights gathered over data too, and turned by collective-permutes",
    ),
)


def run(note: Callable[[str], None] = lambda text: None) -> Report:
    """Compiles every case; those left over have their own check, which does not hold."""
    rows, checks = [], []
    for name, cases in (("", CASES), ("_left_over", LEFT_OVER)):
        found = []
        for case in cases:
            note(f"compiling {case.name}")
            found.append(compare(case))
        rows += found
        worst = max(abs(row["relative_error"]) for row in found)
        checks.append(Check(f"hlo_vs_planner_bytes{name}", worst, f"<={BOUND}"))
    return Report("check planned_bytes", rows, checks)


def compare(case: Case) -> dict[str, Any]:
    """A row: bytes of a case compiled and planned, by kind and altogether."""
    job = make_job(case)
    compiled, planned = compiled_bytes(job), planned_bytes(job)
    row = {"case": case.name}
    for kind in sorted(compiled | planned):
        row[f"{kind}_compiled_bytes"] = compiled[kind]
        row[f"{kind}_planned_bytes"] = planned[kind]
    # By kind: one that is too many must not make up for another that is too few.
    wrong = sum(abs(compiled[kind] - planned[kind]) for kind in compiled | planned)
    row["relative_error"] = wrong / compiled.total()
    if case.left_over:
        row["left_over"] = case.left_over
    return row


def make_job(case: Case) -> TrainingJob:
    """The job of a case. Blocks are not scanned: a loop's body is in the program once."""
    switch, changes = None, {}
    router = RouterConfig()
    if case.task_rows:
        tasks = tuple(dataclasses.replace(TASK, name=f"task {i}") for i in range(2))
        changes["source"] = Mixture(tasks, rows=case.task_rows)
        router = RouterConfig("task", num_tasks=len(case.task_rows))
    if case.dispatcher is not None:
        switch = SwitchConfig(
            8, every=2, group_size=case.group_size, capacity_factor=1.0, min_capacity=1,
            dispatcher=case.dispatcher, num_replicas=case.num_replicas,
            router=router,
        )  # fmt: skip
    shared = dict(vocab_size=96, d_model=64, d_ff=128, num_heads=8, d_head=8, remat=case.remat,
                  num_decoder_layers=2, switch=switch)  # fmt: skip
    model = ModelConfig(
        "decoder_only", activation="gelu", norm="layer", positions="learned",
        max_length=2 * LENGTH, scale_attention=True, **shared,
    )  # fmt: skip
    if case.is_encoder_decoder:
        model = ModelConfig("encoder_decoder", num_encoder_layers=2, **shared)
    return small_job(model, case.mesh, ROWS, LENGTH, **changes)


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


def compile_step(job: TrainingJob):
    """Compiles a job's training step for eight devices."""
    program = TrainingProgram(job, jax.devices()[:NUM_DEVICES])
    with program.scope():
        step = program.train_step.lower(
            program.abstract_state, batch_shapes(program), *program.slot_tables
        )
        # What is read off does not depend on LLVM, and its optimizations take long.
        is_cpu = jax.default_backend() == "cpu"
        options = {"xla_backend_optimization_level": "0"} if is_cpu else {}
        return step.compile(compiler_options=options)


def compiled_bytes(job: TrainingJob) -> collections.Counter:
    """Bytes by kind of collective of the job's compiled training step."""
    counted = collections.Counter()
    for each in collectives(compile_step(job).as_text()):
        counted[each.kind] += each.num_bytes
    return counted


def planned_bytes(job: TrainingJob) -> collections.Counter:
    """Bytes by kind of collective as the planner has them."""
    sizes = job.mesh.build(jax.devices()[:NUM_DEVICES]).shape
    switch = job.model.switch
    layout = Layout(
        **sizes,
        dispatcher=switch.dispatcher if switch else None,
        is_spread=job.mesh.rules.params == SPREAD_RULES.params,
        has_optimizer_slices=job.mesh.rules.optimizer_slices == OPTIMIZER_SLICES,
    )
    counted = collections.Counter()
    for each in compiled_on_cpu(step_collectives(workload_of(job), layout), layout):
        counted[each.kind] += round(each.total_bytes)
    return counted
