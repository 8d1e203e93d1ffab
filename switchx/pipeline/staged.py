# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline schedule over the stages of a mesh, and returns gradients.

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3; Narayanan et al. 2021
(arXiv:2104.04473), section 2.2. All stages run one program: `jax.shard_map` makes the axis
`pipe` manual and leaves the others to the compiler, a `lax.scan` goes through the ticks, and
the table says what a stage does. A tick skips an op that no stage has in it, by a condition
that is the same on every device, so that collectives over the other axes (also inside of
layers) are safe; a stage without an op, while others have one, computes a result that is not
used. Backward reruns a stage from its kept input and differentiates it, so only inputs are
kept. `ppermute` passes activations on and gradients back at the end of a tick, the former while
the backward ops run. Dims: N layers; P stages, T ticks, S lanes, v chunks of a stage
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from switchx.partitioning.constrain import constrain_named
from switchx.partitioning.mesh import PIPE
from switchx.partitioning.optimizer_slices import is_scattered, scattered_sums
from switchx.partitioning.replicas import on_own_rows
from switchx.partitioning.rules import MeshAxes
from switchx.pipeline.chunks import add_to_chunk, chunk_of
from switchx.pipeline.schedule import NONE, Schedule
from switchx.pipeline.ticks import (
    IF_ACTIVE,
    IF_LAST,
    Lane,
    Op,
    Stage,
    from_parts,
    in_order_of_blocks,
    op_rows,
    own_part,
    run_if,
    shift,
    where,
)


class PipelineResult(NamedTuple):
    """Gradients and sums over all microbatches.

    Attributes:
        blocks: gradients of each lane's blocks, stacked and split as these are.
        shared: gradients of the parameters that every stage has.
        measured: `Objective.measured` of each lane, stacked in the order of the blocks.
        total: `Objective.total` of all lanes together.
    """

    blocks: tuple
    shared: Any
    measured: tuple
    total: Any


def run_pipeline(
    schedule: Schedule,
    lanes: Sequence[Lane],
    link: Callable[[Any], Any] | None,
    blocks: Sequence[Any],
    shared,
    inputs,
    *,
    scale=1.0,
    replicas: MeshAxes = (),
    input_specs=PartitionSpec(),
) -> PipelineResult:
    """Computes gradients of `scale` times the sum of all chunks' values over all microbatches.

    It must be called in the scope of a mesh with an axis `pipe` of `schedule.num_stages`.

    Args:
        link: linear function from the last message of one lane to the first message of the
            next. None if there is one lane.
        blocks: parameters of each lane, stacked over N in their first dimension, which is
            split over `pipe`.
        shared: parameters that every stage has a copy of.
        inputs: other arrays that the lanes read, whole in every stage.
        replicas: axes of `replicas.py`; gradients are summed over them after the last tick, to
            slices if an optimizer has these (`optimizer_slices.py`).
        input_specs: specs of the inputs over `replicas`.

    Raises:
        ValueError: the mesh has another number of stages than the schedule.
    """
    schedule.require_stages(jax.sharding.get_abstract_mesh().shape.get(PIPE, 1))
    gradients = _Gradients(schedule, tuple(lanes), link)
    everywhere, has_slices = (PIPE, *replicas), is_scattered(replicas)

    def body(*arguments):
        with on_own_rows(replicas):
            own = gradients(*arguments)
        blocks, shared = own.blocks, own.shared
        if has_slices:  # summed below
            blocks, shared = jax.tree.map(lambda g: g[None], (blocks, shared))
        else:
            blocks = jax.lax.psum(blocks, replicas)
            shared = jax.lax.psum(shared, everywhere)
        measured = jax.lax.psum(own.measured, replicas)
        return PipelineResult(blocks, shared, measured, jax.lax.psum(own.total, everywhere))

    whole = PartitionSpec()
    split = PartitionSpec(PIPE)
    second = PartitionSpec(None, PIPE)
    gradient_specs = split, whole
    if has_slices:
        gradient_specs = PartitionSpec(replicas, PIPE), PartitionSpec(everywhere)
    sharded = jax.shard_map(
        body,
        in_specs=(split, split, whole, input_specs, whole),
        out_specs=PipelineResult(*gradient_specs, second, whole),
        axis_names={PIPE, *replicas},
        check_vma=False,
    )
    stages = jnp.arange(schedule.num_stages)
    result = sharded(stages, tuple(blocks), shared, inputs, jnp.asarray(scale, jnp.float32))
    if has_slices:
        result = result._replace(
            blocks=scattered_sums(result.blocks, replicas),
            shared=scattered_sums(result.shared, everywhere),
        )
    return result._replace(measured=in_order_of_blocks(result.measured))


class _Carry(NamedTuple):
    """The state from tick to tick; all but the last two are tuples with an item for each lane.

    `activations` and `gradients` have just arrived from the neighbouring stages.
    """

    activations: tuple
    gradients: tuple
    slots: tuple
    blocks: tuple
    measured: tuple
    shared: Any
    total: Any


class _Gradients(Stage):
    """The forward and backward passes of one stage, added up over its ticks."""

    def __call__(self, stage_P, blocks, shared, inputs, scale) -> PipelineResult:
        schedule = self.schedule
        blocks = jax.tree.map(self.into_chunks, blocks)
        rows = {
            "forward": op_rows(schedule, schedule.forward),
            "backward": op_rows(schedule, schedule.backward),
        }

        def tick(carry: _Carry, row):
            op = {name: self.ops(row[name], stage_P[0]) for name in row}
            received = self.received(carry.activations, op["forward"])
            sent = tuple(
                self._forward(lane, blocks[s], shared, inputs, received[s], op["forward"][s])
                for s, lane in enumerate(self.lanes)
            )
            slots = tuple(
                _store(slots, message, op["forward"][s])
                for s, (slots, message) in enumerate(zip(carry.slots, received, strict=True))
            )
            carry = carry._replace(slots=slots, activations=shift(sent, schedule, 1))
            carry = self._backward(carry, op["backward"], blocks, shared, inputs, scale)
            return carry, None

        carry, _ = jax.lax.scan(tick, self._zeros(blocks, shared, inputs), rows)
        of_blocks = jax.tree.map(self.out_of_chunks, carry.blocks)
        return PipelineResult(of_blocks, carry.shared, carry.measured, carry.total)

    def _zeros(self, blocks, shared, inputs) -> _Carry:
        """The carry before the first tick."""
        messages = self.no_messages()
        slots = tuple(
            constrain_named(
                jax.tree.map(lambda x, n=n: jnp.zeros((n, *x.shape), x.dtype), lane.message)
            )
            for lane, n in zip(self.lanes, self.schedule.num_slots, strict=True)
        )
        of_blocks, of_shared = jax.tree.map(jnp.zeros_like, (blocks, shared))
        measured, total = self.no_sums(blocks, shared, inputs, messages)
        return _Carry(messages, messages, slots, of_blocks, measured, of_shared, total)

    def _forward(self, lane, blocks, shared, inputs, message, op: Op):
        return run_if(
            IF_ACTIVE,
            op.any_active,
            lambda blocks, shared, message: lane.forward(
                chunk_of(blocks, op.chunk), shared, inputs, message, op
            ),
            message,
            blocks,
            shared,
            message,
        )

    def _backward(self, carry: _Carry, ops: list[Op], blocks, shared, inputs, scale) -> _Carry:
        """Adds the gradients of a tick's ops, and sends those of their inputs back."""
        sent = []
        state = carry.blocks, carry.measured, carry.shared, carry.total
        for s, (lane, op) in enumerate(zip(self.lanes, ops, strict=True)):
            d_message = self._returned(carry.gradients, s, op)

            def run(state, d_message, s=s, lane=lane, op=op):
                kept = chunk_of(carry.slots[s], op.slot)
                chunk = chunk_of(blocks[s], op.chunk)
                (d_blocks, d_shared, d_kept), result, of_head = differentiate(
                    lane,
                    chunk,
                    shared,
                    inputs,
                    kept,
                    op,
                    d_message,
                    scale,
                    self.schedule.num_stages,
                )

                def add_in_lane(items, new):
                    added = add_to_chunk(items[s], new, op.chunk, op.is_active)
                    return (*items[:s], added, *items[s + 1 :])

                def add(total, new):
                    return jax.tree.map(
                        lambda old, x: old + jnp.where(op.is_active, x, 0), total, new
                    )

                of_blocks, measured, of_shared, total = state
                sums = add(of_shared, d_shared), add(total, result.total)
                if of_head is not None:  # of all stages, whether they have an op or not
                    sums = jax.tree.map(jnp.add, sums, of_head)
                state = (
                    add_in_lane(of_blocks, d_blocks),
                    add_in_lane(measured, result.measured),
                    *sums,
                )
                return state, d_kept

            with jax.named_scope(IF_ACTIVE):
                state, d_received = jax.lax.cond(
                    op.any_active, run, lambda *unchanged: unchanged, state, d_message
                )
            sent.append(d_received)
        of_blocks, measured, of_shared, total = state
        return carry._replace(
            gradients=shift(tuple(sent), self.schedule, -1),
            blocks=of_blocks,
            measured=measured,
            shared=of_shared,
            total=total,
        )

    def _returned(self, gradients, s: int, op: Op):
        """The gradient of an op's message: at the last chunk, from the next lane."""
        if s + 1 == len(self.lanes):
            behind = jax.tree.map(jnp.zeros_like, gradients[s])
        else:
            _, transpose = jax.vjp(self.link, gradients[s])
            (behind,) = transpose(gradients[s + 1])
        return where(op.is_last, behind, gradients[s])


def _store(slots, message, op: Op):
    """Puts a message into the op's slot, if it has one."""

    def store(kept, x):
        slot = jnp.maximum(op.slot, 0)
        old = jax.lax.dynamic_index_in_dim(kept, slot, keepdims=False)
        new = jnp.where(op.slot != NONE, x, old)
        return jax.lax.dynamic_update_index_in_dim(kept, new, slot, 0)

    return jax.tree.map(store, slots, message)


def differentiate(
    lane: Lane,
    blocks,
    shared,
    inputs,
    message,
    op: Op,
    d_message,
    scale,
    num_stages: int = 1,
):
    """Gradients by (blocks, shared, message) of all that follows, and the `Objective`; and for
    this stage's part of the lane's head the gradient by `shared` and the total, or None.
    """

    def objective(blocks, shared, message):
        result = lane.objective(blocks, shared, inputs, message, op)
        return (result.message, result.value), result

    (_, value), transpose, result = jax.vjp(objective, blocks, shared, message, has_aux=True)
    scale, of_head = scale.astype(value.dtype), None
    if lane.head is not None:
        x_BLD = result.message["x_BLD"]

        def run(shared, x_BLD):
            return _differentiate_head(lane, shared, inputs, x_BLD, op, scale, num_stages)

        shapes = jax.eval_shape(run, shared, x_BLD)
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        of_head, d_x_BLD = run_if(IF_LAST, op.any_last, run, none, shared, x_BLD)
        d_message = d_message | {"x_BLD": d_message["x_BLD"] + d_x_BLD}
    return transpose((d_message, scale)), result, of_head


def _differentiate_head(lane: Lane, shared, inputs, x_BLD, op: Op, scale, num_stages: int):
    """(Gradient by `shared`, total) of a part, and the gradient of the last chunk's output."""
    own_BLD, first = own_part(x_BLD, op, num_stages)

    def head(shared, own_BLD):
        return lane.head(shared, own_BLD, inputs, op, first)

    _, transpose, total = jax.vjp(head, shared, own_BLD, has_aux=True)
    d_shared, d_own_BLD = transpose(scale)
    d_x_BLD = from_parts(d_own_BLD, x_BLD.shape[1], num_stages)
    return (d_shared, total), jnp.where(op.is_last, d_x_BLD, 0)
