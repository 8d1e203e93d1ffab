# SPDX-License-Identifier: Apache-2.0
"""Runs the forward ops of a pipeline schedule, and returns sums, for evaluation.

As in `staged.py`, all stages run one program, only `pipe` is manual, and a tick skips what no
stage has in it. Nothing is kept from tick to tick except the messages to the next stages, and a
stage has only its own blocks. Microbatches take v M + P - 1 ticks.
Dims: P stages, v chunks of a stage, M microbatches
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from switchx.partitioning.mesh import PIPE
from switchx.pipeline.chunks import add_to_chunk, chunk_of
from switchx.pipeline.schedule import Schedule
from switchx.pipeline.ticks import (
    IF_ACTIVE,
    IF_LAST,
    Lane,
    Op,
    Stage,
    in_order_of_blocks,
    op_rows,
    own_part,
    run_if,
    shift,
)


class ForwardResult(NamedTuple):
    """Sums over all microbatches.

    Attributes:
        measured: `Objective.measured` of each lane, stacked in the order of the blocks.
        total: `Objective.total` of all lanes together.
    """

    measured: tuple
    total: Any


def run_forward(
    schedule: Schedule,
    lanes: Sequence[Lane],
    link: Callable[[Any], Any] | None,
    blocks: Sequence[Any],
    shared,
    inputs,
) -> ForwardResult:
    """Adds up the results of all chunks for all microbatches; arguments as in `run_pipeline`.

    Raises:
        ValueError: the mesh has another number of stages than the schedule.
    """
    schedule.require_stages(jax.sharding.get_abstract_mesh().shape.get(PIPE, 1))
    whole = PartitionSpec()
    split = PartitionSpec(PIPE)
    second = PartitionSpec(None, PIPE)
    sharded = jax.shard_map(
        _Forward(schedule, tuple(lanes), link),
        in_specs=(split, split, whole, whole),
        out_specs=ForwardResult(second, whole),
        axis_names={PIPE},
        check_vma=False,
    )
    result = sharded(jnp.arange(schedule.num_stages), tuple(blocks), shared, inputs)
    return result._replace(measured=in_order_of_blocks(result.measured))


class _Forward(Stage):
    """The forward pass of one stage."""

    def __call__(self, stage_P, blocks, shared, inputs) -> ForwardResult:
        blocks = jax.tree.map(self.into_chunks, blocks)
        ticks = np.flatnonzero(np.any(self.schedule.forward.is_active_TPS, axis=(1, 2)))
        rows = op_rows(self.schedule, self.schedule.forward, ticks)

        def tick(carry, row):
            activations, result = carry
            ops = self.ops(row, stage_P[0])
            received = self.received(activations, ops)
            sent = []
            for s, op in enumerate(ops):
                message, result = self._forward(s, blocks, shared, inputs, received, op, result)
                sent.append(message)
            return (shift(tuple(sent), self.schedule, 1), result), None

        messages = self.no_messages()
        no_sums = ForwardResult(*self.no_sums(blocks, shared, inputs, messages))
        (_, result), _ = jax.lax.scan(tick, (messages, no_sums), rows)
        return result._replace(total=jax.lax.psum(result.total, PIPE))

    def _forward(self, s: int, blocks, shared, inputs, received, op: Op, result):
        """A lane's message for the next chunk, and the sums with this one's."""

        def head(shared, x_BLD, total):
            own_BLD, first = own_part(x_BLD, op, self.schedule.num_stages)
            _, new = self.lanes[s].head(shared, own_BLD, inputs, op, first)
            return jax.tree.map(jnp.add, total, new)

        def run(blocks, shared, message, result):
            chunk = chunk_of(blocks, op.chunk)
            new = self.lanes[s].objective(chunk, shared, inputs, message, op)
            mine = add_to_chunk(result.measured[s], new.measured, op.chunk, op.is_active)
            total = jax.tree.map(
                lambda old, x: old + jnp.where(op.is_active, x, 0), result.total, new.total
            )
            if self.lanes[s].head is not None:
                total = run_if(
                    IF_LAST, op.any_last, head, total, shared, new.message["x_BLD"], total
                )
            measured = (*result.measured[:s], mine, *result.measured[s + 1 :])
            return new.message, ForwardResult(measured, total)

        kept = received[s], result
        return run_if(IF_ACTIVE, op.any_active, run, kept, blocks[s], shared, *kept)
