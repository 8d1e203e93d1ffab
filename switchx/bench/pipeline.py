# SPDX-License-Identifier: Apache-2.0
"""What a pipelined step needs by schedule and number of microbatches, off the compiled program.

Eight devices, simulated or not; nothing is run. `switchx bench scale` prints the rows.
"""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.models.stages import split_blocks
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec, batch_axes, batch_parts
from switchx.partitioning.rules import param_sharding
from switchx.partitioning.schedule import ScheduleSpec
from switchx.training.losses import LossConfig
from switchx.training.pipelined import build_schedule, pipelined_gradients
from switchx.tree import map_named

# Narrow and long, so that activations are what counts.
MODEL = ModelConfig(
    "decoder_only", 256, 64, 128, 2, 32, 8, activation="relu", scan_layers=True, remat="full"
)
MESH = MeshSpec(pipe=4, data=2)
ROWS, LENGTH = 4, 64
SCHEDULES = (ScheduleSpec("gpipe"), ScheduleSpec("1f1b"), ScheduleSpec("interleaved", 2))
MICROBATCHES = (8, 32, 128)


def memory_rows(
    schedules=SCHEDULES, microbatches=MICROBATCHES, *, model=MODEL, mesh=MESH
) -> list[dict]:
    """A row a schedule and number of microbatches of `ROWS` rows: bytes on one device.

    `temporary_bytes` and `argument_bytes` (parameters and rows) are the compiler's;
    `stage_bytes` what the largest stage, an end one, has to have: its share of the blocks, all
    that is no block, and its rows.
    """
    return [
        memory_row(spec, number, model=model, mesh=mesh)
        for spec in schedules
        for number in microbatches
    ]


def memory_row(spec: ScheduleSpec, num_microbatches: int, *, model=MODEL, mesh=MESH) -> dict:
    """One row of `memory_rows`."""
    schedule = build_schedule(model, spec, mesh.pipe, num_microbatches)
    params, built = abstract_params(model), mesh.build()

    def placed(name, leaf):
        sharding = param_sharding(mesh.rules, built, name, leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    loss = LossConfig(layer_reduction="mean")
    compute = functools.partial(pipelined_gradients, model, loss, schedule)
    rows = NamedSharding(built, PartitionSpec(batch_axes(built, mesh.rules)))
    batch = _batch_shapes(model, ROWS * num_microbatches, rows)
    with use_mesh(built, mesh.rules):
        lowered = jax.jit(compute).lower(
            map_named(placed, params), batch, key=jax.random.key(0)
        )
    memory = lowered.compile().memory_analysis()
    blocks, shared = split_blocks(model, params)
    batch_bytes = _bytes(batch) // batch_parts(built, mesh.rules)
    return {
        "schedule": spec.kind,
        "microbatches": num_microbatches,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "stage_bytes": _bytes(blocks) // mesh.pipe + _bytes(shared) + batch_bytes,
        "kept_inputs": sum(schedule.num_slots),
        "bubble": schedule.bubble(),
    }


def _batch_shapes(model: ModelConfig, rows: int, sharding) -> dict:
    names = {"input_tokens", "segment_ids", "positions", "target_tokens"}
    shapes = {f"decoder_{name}": np.int32 for name in names} | {
        "decoder_loss_weights": np.float32
    }
    if model.is_encoder_decoder:
        encoder = ("input_tokens", "segment_ids", "positions")
        shapes |= {f"encoder_{name}": np.int32 for name in encoder}
    else:
        shapes["decoder_prefix_mask"] = np.int32
    return {
        name: jax.ShapeDtypeStruct((rows, LENGTH), dtype, sharding=sharding)
        for name, dtype in shapes.items()
    }


def _bytes(shapes) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
