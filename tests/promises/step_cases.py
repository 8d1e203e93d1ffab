# SPDX-License-Identifier: Apache-2.0
"""Small models on small meshes, whose training steps `hlo_vs_planner_bytes` compiles."""

import dataclasses

from switchx.bench.small_job import TASK, small_job
from switchx.data.mixtures import Mixture
from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import OPTIMIZER_SLICES, SLICED_RULES, SPREAD_RULES, Rules
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.job import TrainingJob
from switchx.training.step import StepConfig

ROWS = 16
ZERO1 = Rules(optimizer_slices=OPTIMIZER_SLICES)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the cases' models, their compute dtype, and L, the tokens of a row."""

    length: int
    d_model: int
    d_ff: int
    num_heads: int
    d_head: int
    vocab_size: int
    compute: str = "float32"


SMALL = Sizes(length=8, d_model=64, d_ff=128, num_heads=8, d_head=8, vocab_size=96)
# The TPU compiler scatters a sum only if slices consist of whole tiles of its memory, and if
# it has not combined it with sums of small arrays, as it does with all but large ones.
LARGE = Sizes(length=64, d_model=1024, d_ff=2048, num_heads=8, d_head=128, vocab_size=2048)
LARGE_BFLOAT16 = Sizes(
    length=64, d_model=2048, d_ff=8192, num_heads=16, d_head=128, vocab_size=8192,
    compute="bfloat16",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh, whose experts are divided among tasks where `task_rows` has some."""

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
    num_kv_heads: int | None = None


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
    Case("grouped heads data=4 model=2", MeshSpec(model=2), num_kv_heads=2),
    Case("whole heads of keys model=8", MeshSpec(data=1, model=8), num_kv_heads=2),
    Case("one head of keys data=2 model=4", MeshSpec(model=4), num_kv_heads=1),
    Case("whole heads of keys data=2 model=4 full remat", MeshSpec(model=4), remat="full",
         num_kv_heads=2),
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
        "copies all_to_all data=2 expert=2 model=2",
        MeshSpec(expert=2, model=2),
        "all_to_all",
        num_replicas=4,
    ),
    Case(
        "copies ragged_all_to_all expert=2 model=2 full remat",
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


# Cases that are also compiled for a TPU; the others compare no more than these do.
ON_TPU = (
    "dense data=4 model=2",
    "dense fsdp=8",
    "dense data=2 fsdp=2 model=2",
    "all_to_all data=2 expert=4",
    "all_to_all data=2 expert=2 model=2",
    "all_to_all fsdp=2 expert=4",
    "dropless data=2 fsdp=4",
    "zero1 all_to_all data=2 expert=4",
    "sliced_scatter data=2 model=4",
    "spread fsdp=8",
    "scanned fsdp=8 full remat",
    "scanned all_to_all expert=4 full remat",
    "microbatches scanned data=2 fsdp=4",
    "microbatches all_to_all expert=4",
    "1f1b pipe=2 data=4",
    "1f1b pipe=2 data=2 model=2 full remat",
    "1f1b pipe=2 fsdp=4",
    "1f1b pipe=2 data=2 expert=2",
)
IN_BFLOAT16 = ("dense fsdp=8", "all_to_all fsdp=2 expert=4", "dense data=4 model=2")


def tpu_cases() -> list[tuple[Case, Sizes]]:
    """What is compiled for a TPU, in float32 and in bfloat16."""
    return [
        (case, sizes)
        for names, sizes in ((ON_TPU, LARGE), (IN_BFLOAT16, LARGE_BFLOAT16))
        for case in CASES
        if case.name in names
    ]


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
            8, every=2, group_size=case.group_rows * sizes.length, capacity_factor=1.0,
            min_capacity=1, dispatcher=case.dispatcher, num_replicas=case.num_replicas,
            router=router,
        )  # fmt: skip
    widths = dataclasses.asdict(sizes)
    length, compute = widths.pop("length"), widths.pop("compute")
    shared = dict(**widths, precision=Precision(compute=compute), remat=case.remat,
                  num_decoder_layers=case.num_layers, scan_layers=case.scan_layers,
                  switch=switch, num_kv_heads=case.num_kv_heads)  # fmt: skip
    model = ModelConfig(
        "decoder_only", activation="gelu", norm="layer", positions="learned",
        max_length=2 * length, scale_attention=True, **shared,
    )  # fmt: skip
    if case.is_encoder_decoder:
        model = ModelConfig("encoder_decoder", num_encoder_layers=case.num_layers, **shared)
    return small_job(model, case.mesh, case.rows, length, **changes)
