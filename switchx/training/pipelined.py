# SPDX-License-Identifier: Apache-2.0
"""The gradients of a training step whose blocks are split over the stages of a pipeline.

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3. The loss, the microbatches
and the keys are the same as in `training/step.py`, and so are the gradients.

Dims: B batch, L length, D model, V vocabulary
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from switchx.models.config import ModelConfig, require_our_blocks
from switchx.models.stages import (
    Chunk,
    join_blocks,
    link_stacks,
    message_shapes,
    split_blocks,
    stack_names,
)
from switchx.moe.stats import join_stacks
from switchx.pipeline.schedule import Schedule, ScheduleSpec
from switchx.pipeline.staged import run_pipeline
from switchx.pipeline.ticks import Lane, Objective, Op
from switchx.training.losses import (
    LossConfig,
    TokenSums,
    cross_entropy_of,
    loss_denominators,
    loss_terms,
)
from switchx.training.microbatches import into_microbatches, own_rows_axes


def build_schedule(
    config: ModelConfig, spec: ScheduleSpec, num_stages: int, num_microbatches: int
) -> Schedule:
    """The schedule by which a model's stacks go through `num_stages` stages.

    Raises:
        ValueError: the blocks of a stack, or the microbatches, do not divide; the model's
            blocks are not stacked.
    """
    require_our_blocks(config, f"a pipeline of {num_stages} stages")
    if config.switch is not None and config.switch.has_named_layers:
        raise ValueError(
            f"mesh axis 'pipe' of size {num_stages} with sparse blocks that are named: stages "
            "are to be alike; use pipe=1, and expert or fsdp for the devices"
        )
    if not config.scan_layers:
        raise ValueError(
            f"mesh axis 'pipe' of size {num_stages} with ModelConfig.scan_layers=False: a "
            "stage holds a part of the stacked blocks; use scan_layers=True, or pipe=1"
        )
    names = stack_names(config)
    for name in names:
        repeats = getattr(config, f"num_{name}_layers") // config.period
        spec.check_blocks(num_stages, repeats, config.period, name)
    return spec.build(num_stages, num_microbatches, len(names))


def pipelined_gradients(
    config: ModelConfig,
    loss: LossConfig,
    schedule: Schedule,
    params,
    batch: dict,
    *,
    key,
    loss_scale=1.0,
):
    """The results of `training.step.gradients`, computed by `schedule`.

    It must be called in the scope of a mesh whose axis `pipe` has the schedule's stages.
    """
    M = schedule.num_microbatches
    keys = key[None] if M == 1 else jax.random.split(key, M)
    rows = into_microbatches(config, batch, M)
    axes = own_rows_axes(rows, config)
    denominators = loss_denominators(config, batch, M)
    inputs = {"rows": rows, "keys": keys, "denominators": denominators}
    blocks, shared = split_blocks(config, params)
    whole, own = PartitionSpec(), PartitionSpec(axes)
    parts = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
    rows_here = jax.tree.map(lambda x: x[: x.shape[0] // parts], rows)
    lane = functools.partial(stack_lane, config, loss)
    lanes = stack_lanes(config, schedule, blocks, rows_here, lane)
    result = run_pipeline(
        schedule,
        lanes,
        link_stacks(lanes[-1].message) if len(lanes) > 1 else None,
        blocks,
        shared,
        inputs,
        scale=loss_scale,
        replicas=axes,
        input_specs={"rows": own, "keys": whole, "denominators": whole},
    )
    stats = join_stacks(result.measured[0] if len(lanes) > 1 else None, result.measured[-1])
    value, sums = result.total
    return join_blocks(config, result.blocks, result.shared), value, sums, stats


def stack_lanes(config: ModelConfig, schedule: Schedule, blocks, rows, lane) -> list[Lane]:
    """A lane for each stack: `lane(stack, periods in a chunk, shapes of a message)`."""
    example = jax.tree.map(lambda x: x[:, 0], rows)
    num_chunks = schedule.num_stages * schedule.num_chunks
    return [
        lane(
            name,
            jax.tree.leaves(stack)[0].shape[0] // num_chunks,
            message_shapes(config, name, example),
        )
        for name, stack in zip(stack_names(config), blocks, strict=True)
    ]


def stack_lane(config: ModelConfig, loss: LossConfig, name: str, num_periods: int, message):
    """A stack's chunks with their part of the loss.

    Their `inputs` are a batch from `into_microbatches` as `rows`, a key for each microbatch as
    `keys`, and the `denominators` of the loss.

    Args:
        num_periods: periods in a chunk.
        message: see `Lane`.
    """
    chunk = Chunk(config, name, num_periods)

    def run(blocks, shared, inputs, message, op: Op):
        batch, key = microbatch_of(inputs, op)
        return chunk(blocks, shared, batch, message, op, key=key)

    def objective(blocks, shared, inputs, message, op: Op):
        message, stats = run(blocks, shared, inputs, message, op)
        value = loss_terms(loss, config, inputs["denominators"], None, stats, stack=name)
        measured = None if stats is None else stats.summed
        return Objective(message, value, measured, (value, no_sums()))

    def head(shared, x_BLD, inputs, op: Op, first):
        sums = sums_of_part(chunk, loss, shared, x_BLD, inputs, op, first)
        value = loss_terms(loss, config, inputs["denominators"], sums, None, stack=name)
        return value, (value, sums)

    has_head = head if name == "decoder" else None
    return Lane(lambda *arguments: run(*arguments)[0], objective, message, has_head)


def no_sums() -> TokenSums:
    return TokenSums(*[jnp.zeros((), jnp.float32)] * 4)


def sums_of_part(
    chunk: Chunk, loss: LossConfig, shared, x_BLD, inputs, op: Op, first
) -> TokenSums:
    """Sums over the target tokens of a part along L of the decoder's last message.

    Args:
        first: index along L at which the part begins.
    """
    batch, _ = microbatch_of(inputs, op._replace(microbatch=op.last_microbatch))

    def part(x_BL):
        length = x_BLD.shape[1]
        x_BL = jnp.pad(x_BL, ((0, 0), (0, length)))  # past the end: no targets
        return jax.lax.dynamic_slice_in_dim(x_BL, first, length, axis=1)

    names = ("decoder_target_tokens", "decoder_loss_weights")
    of_tokens = (part(batch[name]) for name in names)
    return cross_entropy_of(chunk.embedding(shared), x_BLD, *of_tokens, loss)


def microbatch_of(inputs: dict, op: Op):
    """The op's rows and key (None without keys, as in evaluation)."""
    batch = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, op.microbatch, axis=1, keepdims=False),
        inputs["rows"],
    )
    keys = inputs["keys"]
    return batch, None if keys is None else keys[op.microbatch]
