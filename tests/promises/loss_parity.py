# SPDX-License-Identifier: Apache-2.0
"""`mesh_loss_parity`: fifty training steps have one device's losses on every kind of mesh.

One small decoder-only model with experts in every other block, dropout everywhere but in the
experts (explicit dispatchers draw those masks on every device), four microbatches a step; the
same batches again and again, so that the loss falls. Cells differ in where arrays are, on which
device a term is computed, and in which order terms are summed.
Dims: B rows of a batch, L tokens of a row
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from switchx.bench.small_job import small_job
from switchx.data.features import DecoderOnlyFeatures, Example
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.optim.adafactor import Adafactor
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import SLICED_RULES, Rules
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.job import TrainingJob
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.promises.compiled_steps import NUM_DEVICES

NUM_STEPS, NUM_BATCHES = 50, 4
ROWS, LENGTH, MICROBATCHES, EXPERTS = 32, 16, 4, 8
VOCABULARY_ROWS = Rules(params=(("V", ("data",)),), may_stay_whole=())


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, its dispatcher and schedule; not random if devices draw their own masks."""

    name: str
    mesh: MeshSpec
    dispatcher: str = "gather"
    schedule: ScheduleSpec = ScheduleSpec()
    bucket_bytes: int | None = None
    is_random: bool = True


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


def losses_across_meshes(cases=CASES, num_steps: int = NUM_STEPS) -> Iterator[tuple]:
    """The largest relative difference of a loss to one device's, by mesh."""
    expected = {}
    for case in cases:
        if case.is_random not in expected:
            alone = Case("one device", MeshSpec(data=1), is_random=case.is_random)
            expected[case.is_random] = losses(alone, num_steps, jax.devices()[:1])
        found = losses(case, num_steps, jax.devices()[:NUM_DEVICES])
        difference = np.max(np.abs(found / expected[case.is_random] - 1))
        yield "mesh_loss_parity", f"{num_steps} steps, {case.name}", difference


def losses(case: Case, num_steps: int, devices: Sequence) -> np.ndarray:
    """The loss of each of a case's steps, which should fall."""
    program = compiled_program(make_job(case), devices)
    found = []
    with program.scope():
        state = program.init_state()
        batches = [program.place(batch) for batch in make_batches()]
        for step in range(num_steps):
            state, metrics = program.train_step(state, batches[step % NUM_BATCHES])
            # One step at a time: simulated devices share threads, and two steps' collectives
            # could wait for each other.
            found.append(jax.device_get(metrics.loss))
    if found[-1] >= found[0]:
        raise RuntimeError(f"{case.name}: losses {found[0]} to {found[-1]}; expected a fall")
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
