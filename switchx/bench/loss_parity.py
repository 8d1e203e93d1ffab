# SPDX-License-Identifier: Apache-2.0
"""`mesh_loss_parity`: fifty training steps have one device's losses on every kind of mesh.

One small decoder-only model with experts in every other block, dropout everywhere but in the
experts (explicit dispatchers draw those masks on every device), four microbatches a step; the
same batches again and again, so that the loss falls. Cells differ in where arrays are, on which
device a term is computed, and in which order terms are summed.
Dims: B rows of a batch, L tokens of a row
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from switchx.bench.report import Check
from switchx.bench.step_cases import NUM_DEVICES, small_job
from switchx.data.features import DecoderOnlyFeatures, Example
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.optim.adafactor import Adafactor
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.partitioning.schedule import ScheduleSpec
from switchx.planner.layout import SLICED_RULES
from switchx.training.job import TrainingJob
from switchx.training.program import TrainingProgram
from switchx.training.step import StepConfig

NUM_STEPS, NUM_BATCHES = 50, 4
ROWS, LENGTH, MICROBATCHES, EXPERTS = 32, 16, 4, 8
# Of the loss, in float32, where roundings may send a token to another expert.
TOLERANCE = 1e-3
VOCABULARY_ROWS = Rules(params=(("V", ("data",)),), may_stay_whole=())


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, its dispatcher and schedule; not random where devices draw their own masks."""

    name: str
    mesh: MeshSpec
    dispatcher: str = "gather"
    schedule: ScheduleSpec = ScheduleSpec()
    bucket_bytes: int | None = None
    is_random: bool = True


ONE_DEVICE = Case("one device", MeshSpec(data=1))
NOTHING_RANDOM = dataclasses.replace(
    ONE_DEVICE, name="one device, nothing random", is_random=False
)
CASES = (
    Case("data=8", MeshSpec()),
    Case("data=2 model=4", MeshSpec(model=4)),
    Case("fsdp=8", MeshSpec(data=1, fsdp=8)),
    Case(
        "fsdp=8, buckets, nothing random",
        MeshSpec(data=1, fsdp=8),
        bucket_bytes=2**16,
        is_random=False,
    ),
    Case("data=8, vocabulary by rows", MeshSpec(rules=VOCABULARY_ROWS)),
    Case("data=2 expert=4, all-to-all", MeshSpec(expert=4), "all_to_all"),
    Case("node=2 expert=4, hierarchical", MeshSpec(data=1, node=2, expert=4), "hierarchical"),
    Case("data=2 model=4, sliced", MeshSpec(model=4, rules=SLICED_RULES), "sliced"),
    Case("pipe=4 data=2, 1F1B", MeshSpec(pipe=4)),
    Case(
        "pipe=2 data=4, 1F1B, vocabulary by rows",
        MeshSpec(
            pipe=2, rules=Rules(params=(("N", ("pipe",)), ("V", ("data",))), may_stay_whole=())
        ),
    ),
    Case("pipe=4 data=2, GPipe", MeshSpec(pipe=4), schedule=ScheduleSpec("gpipe")),
    Case(
        "pipe=2 data=4, interleaved",
        MeshSpec(pipe=2),
        schedule=ScheduleSpec("interleaved", num_chunks=2),
    ),
    Case("pipe=2 expert=4, 1F1B, all-to-all", MeshSpec(pipe=2, expert=4), "all_to_all"),
    Case(
        "pipe=2 model=4, 1F1B, sliced (PPMoE)",
        MeshSpec(pipe=2, model=4, rules=SLICED_RULES),
        "sliced",
    ),
)


def measured_rows(
    cases: tuple[Case, ...] = CASES,
    num_steps: int = NUM_STEPS,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """A row a mesh: its first and last loss, and the largest relative difference of any."""
    rows, expected = [], {}
    baselines = (ONE_DEVICE, NOTHING_RANDOM)
    for case in (*baselines, *cases):
        if case in baselines and all(each.is_random != case.is_random for each in cases):
            continue
        note(f"training on {case.name}")
        found = losses(case, num_steps)
        rows.append(_row(case, found, expected.setdefault(case.is_random, found)))
    return rows


def check(rows: list[dict[str, Any]]) -> Check:
    """The largest relative difference to one device's loss, over all meshes and steps."""
    # NumPy's maximum: of Python's `max` a NaN is the largest or not by where it stands.
    worst = float(np.max([row["max_relative_difference"] for row in rows]))
    return Check("mesh_loss_parity", worst, f"<={TOLERANCE}")


def losses(case: Case, num_steps: int) -> np.ndarray:
    """The loss of each of a case's steps."""
    devices = jax.devices()[: 1 if case in (ONE_DEVICE, NOTHING_RANDOM) else NUM_DEVICES]
    program = TrainingProgram(make_job(case), devices)
    found = []
    with program.scope():
        state = program.init_state()
        batches = [program.place(batch) for batch in make_batches()]
        for step in range(num_steps):
            state, metrics = program.train_step(state, batches[step % NUM_BATCHES])
            # One step at a time: simulated devices share threads, and two steps' collectives
            # could wait for each other.
            found.append(jax.device_get(metrics.loss))
    return np.array(found)


def make_job(case: Case) -> TrainingJob:
    """The training job of a case."""
    switch = SwitchConfig(
        EXPERTS,
        every=2,
        group_size=LENGTH,
        min_capacity=1,
        dispatcher=case.dispatcher,
        expert_dropout_rate=0.0,  # explicit dispatchers draw theirs on every device
        router=RouterConfig(jitter=0.01 * case.is_random),
    )
    model = ModelConfig(
        "decoder_only", 256, 16, 32, 4, 4, num_decoder_layers=8, switch=switch,
        dropout_rate=0.1 * case.is_random, scan_layers=True, remat="full",
    )  # fmt: skip
    step = StepConfig(
        num_microbatches=MICROBATCHES, clip_norm=1.0, bucket_bytes=case.bucket_bytes
    )
    return small_job(
        model, case.mesh, ROWS, LENGTH, optimizer=Adafactor(), schedule=Constant(0.005),
        step=step, pipeline=case.schedule,
    )  # fmt: skip


def make_batches() -> list[dict[str, np.ndarray]]:
    """Batches of random tokens, without padding."""
    rng, nothing = np.random.default_rng(0), np.zeros(0, np.int32)
    tokens = rng.integers(3, 256, (NUM_BATCHES, ROWS, LENGTH)).astype(np.int32)
    features = DecoderOnlyFeatures(LENGTH)
    return [
        features.batch([[Example(nothing, token_L)] for token_L in token_BL])
        for token_BL in tokens
    ]


def _row(case: Case, found: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    return {
        "case": f"{len(found)} steps, {case.name}",
        "first_loss": float(found[0]),
        "last_loss": float(found[-1]),
        "max_relative_difference": float(np.max(np.abs(found / expected - 1))),
    }
