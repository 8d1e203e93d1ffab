# SPDX-License-Identifier: Apache-2.0
"""What a device holds of a pipelined model, read off compiled programs.

Activations by schedule and number of microbatches; and whether a program of a pipelined run,
of training, evaluation or initialization, has more of the model than its own stage.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from switchx import tree
from switchx.bench.small_job import small_job
from switchx.compiled.training_step import batch_shapes
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import abstract_params
from switchx.models.stages import split_blocks
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec, batch_axes, batch_parts
from switchx.partitioning.rules import param_shardings
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.losses import LossConfig
from switchx.training.pipelined import build_schedule, pipelined_gradients
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig

# The model is narrow and its microbatches are many, so that activations dominate.
NARROW = ModelConfig(
    "decoder_only", 256, 64, 128, 2, 32, 8, activation="relu", scan_layers=True, remat="full"
)
MESH = MeshSpec(pipe=4, data=2)
MICROBATCH_ROWS, LENGTH = 4, 64
SCHEDULES = (ScheduleSpec("gpipe"), ScheduleSpec("1f1b"), ScheduleSpec("interleaved", 2))
MICROBATCHES = (8, 32, 128)


def memory_by_microbatches(
    model=NARROW, mesh=MESH, schedules=SCHEDULES, microbatches=MICROBATCHES
) -> Iterator[tuple]:
    """Bytes with the most microbatches over those with the fewest, by schedule; beside them the
    numbers that go into this."""
    for spec in schedules:
        found = {number: memory(spec, number, model, mesh) for number in microbatches}
        for number, row in found.items():
            for what, value in row.items():
                yield what, f"{spec.kind}, {number} microbatches", value
        few, *_, many = (row["temporary_bytes"] for row in found.values())
        yield f"memory_{spec.kind}_m128_vs_m8", f"{model.num_decoder_layers} blocks", many / few


def memory_of_two_blocks() -> Iterator[tuple]:
    """The same for 1F1B in a model of two blocks on two stages."""
    model = dataclasses.replace(NARROW, num_decoder_layers=2)
    return memory_by_microbatches(
        model, MeshSpec(pipe=2, data=4), (ScheduleSpec("1f1b"),), (8, 128)
    )


def memory(
    spec: ScheduleSpec, num_microbatches: int, model: ModelConfig, mesh: MeshSpec
) -> dict[str, float]:
    """Bytes of the compiled gradients of a pipelined step.

    `temporary_bytes` and `argument_bytes` (parameters and batch) are the compiler's.
    `stage_bytes` is what the largest stage, an end one, needs: its share of the blocks, all
    that is in no block, and its rows.
    """
    schedule = build_schedule(model, spec, mesh.pipe, num_microbatches)
    params, built = abstract_params(model), mesh.build()
    rows = NamedSharding(built, PartitionSpec(batch_axes(built, mesh.rules)))
    shape = (MICROBATCH_ROWS * num_microbatches, LENGTH)
    names = ("input_tokens", "segment_ids", "positions", "target_tokens", "prefix_mask")
    dtypes = dict.fromkeys(names, np.int32) | {"loss_weights": np.float32}
    batch = {
        f"decoder_{name}": jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
        for name, dtype in dtypes.items()
    }
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params,
        param_shardings(mesh.rules, built, params),
    )
    loss = LossConfig(layer_reduction="mean")
    compute = jax.jit(functools.partial(pipelined_gradients, model, loss, schedule))
    with use_mesh(built, mesh.rules):
        lowered = compute.lower(placed, batch, key=jax.random.key(0))
    found = lowered.compile().memory_analysis()
    blocks, shared = map(tree.num_bytes, split_blocks(model, params))
    batch_bytes = tree.num_bytes(batch) // batch_parts(built, mesh.rules)
    return {
        "temporary_bytes": found.temp_size_in_bytes,
        "argument_bytes": found.argument_size_in_bytes,
        "stage_bytes": blocks // mesh.pipe + shared + batch_bytes,
        "kept_inputs": sum(schedule.num_slots),
        "bubble": schedule.bubble(),
    }


# Parameters dominate: a stage has an eighth of them, and a batch is a few tokens.
STAGES, FEW_ROWS, FEW_TOKENS = 8, 16, 16
SIZES = dict(
    vocab_size=256, d_model=64, d_ff=256, num_heads=4, d_head=16, num_decoder_layers=16,
    activation="relu", scan_layers=True, remat="full",
    switch=SwitchConfig(8, every=2, group_size=FEW_TOKENS),
)  # fmt: skip
DEEP = {
    "decoder-only": ModelConfig("decoder_only", **SIZES),
    "encoder-decoder": ModelConfig("encoder_decoder", num_encoder_layers=16, **SIZES),
}


def programs_of_stages(models=DEEP) -> Iterator[tuple]:
    """Whether temporaries of a pipelined run's programs are as large as all of its blocks."""
    for name, model in models.items():
        step = StepConfig(num_microbatches=STAGES)
        job = small_job(model, MeshSpec(pipe=STAGES), FEW_ROWS, FEW_TOKENS, step=step)
        program = compiled_program(job, jax.devices()[:STAGES])
        with program.scope():
            batch = batch_shapes(program)
            programs = {
                "training": program.trace_step(batch),
                "evaluation": program.eval_step.trace(program.abstract_state.params, batch),
                "initialization": program.trace_init(),
            }
            blocks = tree.num_bytes(split_blocks(model, program.abstract_state.params)[0])
            for kind, traced in programs.items():
                what, size = f"{kind}, {name}", temporary_bytes(traced)
                yield "temporaries_vs_blocks", what, size / blocks
                yield "pipeline_program_holds_whole_model", what, size >= blocks


def temporary_bytes(traced: jax.stages.Traced) -> int:
    """Those of one device, whatever LLVM makes of the program, which takes long."""
    options = {"xla_backend_optimization_level": "0"}
    compiled = traced.lower().compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes
