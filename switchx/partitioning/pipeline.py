# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline schedule over the stages of a mesh, and returns gradients.

Chen et al. 2023 (Pipeline MoE, arXiv:2304.11414), section 3.3; Narayanan et al. 2021
(arXiv:2104.04473), section 2.2. All stages run one program: `jax.shard_map` makes the axis
`pipe` manual and leaves the others to the compiler, a `lax.scan` goes through the ticks, and
the table says what a stage does. A tick skips an op that no stage has in it, by a condition
that is the same on every device, so that collectives over the other axes (also inside of
layers) are safe; a stage without an op, while others have one, computes a result that is not
used. Backward runs a stage again from its kept input and differentiates it, so only inputs are
kept. `ppermute` passes activations on and gradients back at the end of a tick, the former while
the backward ops run. Dims: N layers; P stages, T ticks, S lanes, v chunks of a stage
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from switchx.partitioning.chunks import add_to_chunk, chunk_of, move_chunks
from switchx.partitioning.constrain import constrain_named
from switchx.partitioning.schedule import NONE, Ops, Schedule

PIPE = "pipe"


class Op(NamedTuple):
    """One stage's part of a tick in one lane and direction.

    Attributes:
        microbatch, place: its number, and that of its chunk in the stack, in the order of the
            blocks. Any valid numbers where `is_active` is false.
        chunk, slot: the number of the stage's own chunk, and the slot that keeps its input.
        is_active, any_active: whether this stage has an op, and whether any stage has one.
        is_first, is_last: whether it is the stack's first chunk, or its last.
        any_first, any_last: whether that holds on any stage, the same on all: what only end
            stages compute is skipped where this is false, and not used where theirs is.
    """

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    place: jax.Array
    is_active: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    any_active: jax.Array
    any_first: jax.Array
    any_last: jax.Array


class Objective(NamedTuple):
    """What a chunk makes of a microbatch.

    Attributes:
        message: the input of the next chunk.
        value: the chunk's own term of what is differentiated.
        measured: sums over microbatches, for each chunk apart.
        total: sums over microbatches and chunks.
    """

    message: Any
    value: jax.Array
    measured: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class Lane:
    """How a chunk of a stack's blocks computes.

    Both functions take (blocks, shared, inputs, message, op). The very first chunk has no
    message: where `op.is_first`, the first lane must not read it.

    Attributes:
        forward: computes the message for the next chunk.
        objective: computes the same and the rest of an `Objective`.
        message: shapes of one microbatch's message; names end in dimensions.
    """

    forward: Callable[..., Any]
    objective: Callable[..., Objective]
    message: Any


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
) -> PipelineResult:
    """Computes gradients of `scale` times the sum of all chunks' values over all microbatches.

    To be called in the scope of a mesh with an axis `pipe` of `schedule.num_stages`.

    Args:
        link: makes the first message of a lane of the last one of the lane before; linear.
            None where there is one lane.
        blocks: parameters of each lane, stacked over N in their first dimension, which is
            split over `pipe`.
        shared: parameters that every stage has a copy of.
        inputs: what else the lanes read, whole in every stage.

    Raises:
        ValueError: the mesh has other stages than the schedule.
    """
    there = jax.sharding.get_abstract_mesh().shape.get(PIPE, 1)
    if there != (planned := schedule.num_stages):
        raise ValueError(f"a schedule of {planned} stages needs {PIPE}={planned}, not {there}")
    body = _Body(schedule, tuple(lanes), link)
    whole, split, second = PartitionSpec(), PartitionSpec(PIPE), PartitionSpec(None, PIPE)
    sharded = jax.shard_map(
        body,
        in_specs=(split, split, whole, whole, whole),
        out_specs=PipelineResult(split, whole, second, whole),
        axis_names={PIPE},
        check_vma=False,
    )
    stages = jnp.arange(schedule.num_stages)
    result = sharded(stages, tuple(blocks), shared, inputs, jnp.asarray(scale, jnp.float32))
    # [v, P * n, ...]: chunk by chunk, and in each of them stage by stage.
    return result._replace(
        measured=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), result.measured)
    )


def run_if(condition, function, otherwise, *args):
    """Returns `function(*args)` where `condition`, equal on all devices, holds, or `otherwise`.

    `otherwise` is passed in and not made in a branch: XLA has to split both results alike.
    """
    return jax.lax.cond(
        condition,
        lambda otherwise, *args: function(*args),
        lambda otherwise, *args: otherwise,
        otherwise,
        *args,
    )


def _where(condition, new, old):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


class _Carry(NamedTuple):
    """What goes from tick to tick; all but the last two are tuples with an entry a lane.

    `activations` and `gradients` have just arrived from the neighbouring stages.
    """

    activations: tuple
    gradients: tuple
    slots: tuple
    blocks: tuple
    measured: tuple
    shared: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class _Body:
    """The program of one stage."""

    schedule: Schedule
    lanes: tuple[Lane, ...]
    link: Callable[[Any], Any] | None

    def __call__(self, stage_P, blocks, shared, inputs, scale) -> PipelineResult:
        schedule = self.schedule
        blocks = jax.tree.map(self._into_chunks, blocks)
        rows = {
            "forward": _rows(schedule, schedule.forward),
            "backward": _rows(schedule, schedule.backward),
        }

        def tick(carry: _Carry, row):
            op = {name: self._ops(row[name], stage_P[0]) for name in row}
            received = self._received(carry.activations, op["forward"])
            sent = tuple(
                self._forward(lane, blocks[s], shared, inputs, received[s], op["forward"][s])
                for s, lane in enumerate(self.lanes)
            )
            slots = tuple(
                _store(slots, message, op["forward"][s])
                for s, (slots, message) in enumerate(zip(carry.slots, received, strict=True))
            )
            carry = carry._replace(slots=slots, activations=_shift(sent, schedule, 1))
            carry = self._backward(carry, op["backward"], blocks, shared, inputs, scale)
            return carry, None

        carry, _ = jax.lax.scan(tick, self._zeros(blocks, shared, inputs), rows)
        return PipelineResult(
            jax.tree.map(self._out_of_chunks, carry.blocks),
            jax.lax.psum(carry.shared, PIPE),
            carry.measured,
            jax.lax.psum(carry.total, PIPE),
        )

    def _zeros(self, blocks, shared, inputs) -> _Carry:
        """The carry before the first tick."""

        def zeros(message, *leading):
            return constrain_named(
                jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), message)
            )

        messages = tuple(zeros(lane.message) for lane in self.lanes)
        slots = tuple(
            zeros(lane.message, num_slots)
            for lane, num_slots in zip(self.lanes, self.schedule.num_slots, strict=True)
        )
        zero = jax.tree.map(jnp.zeros_like, (blocks, shared))
        v, measured, totals = self.schedule.num_chunks, [], []
        for lane, lane_blocks, message in zip(self.lanes, blocks, messages, strict=True):
            op = self._ops(_rows(self.schedule, self.schedule.forward, tick=0), 0)[0]
            result = jax.eval_shape(
                lane.objective, chunk_of(lane_blocks, 0), shared, inputs, message, op
            )
            measured.append(
                jax.tree.map(lambda x: jnp.zeros((v, *x.shape), x.dtype), result.measured)
            )
            totals.append(result.total)
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), totals[0])
        return _Carry(messages, messages, slots, zero[0], tuple(measured), zero[1], total)

    def _ops(self, row: dict, stage) -> list[Op]:
        """This stage's ops of a tick, lane by lane."""
        mine = {name: x if name.startswith("any") else x[stage] for name, x in row.items()}
        return [Op(**{name: x[s] for name, x in mine.items()}) for s in range(len(self.lanes))]

    def _received(self, activations, ops: list[Op]):
        """The message for each lane: at its first chunk, from the lane before."""
        received = list(activations)
        for s in range(1, len(self.lanes)):
            linked = self.link(activations[s - 1])
            received[s] = _where(ops[s].is_first, linked, activations[s])
        return tuple(received)

    def _forward(self, lane, blocks, shared, inputs, message, op: Op):
        return run_if(
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
                (d_blocks, d_shared, d_kept), result = differentiate(
                    lane, chunk, shared, inputs, kept, op, d_message, scale
                )

                def add_in_lane(items, new):
                    added = add_to_chunk(items[s], new, op.chunk, op.is_active)
                    return (*items[:s], added, *items[s + 1 :])

                def add(total, new):
                    return jax.tree.map(
                        lambda old, x: old + jnp.where(op.is_active, x, 0), total, new
                    )

                of_blocks, measured, of_shared, total = state
                state = (
                    add_in_lane(of_blocks, d_blocks),
                    add_in_lane(measured, result.measured),
                    add(of_shared, d_shared),
                    add(total, result.total),
                )
                return state, d_kept

            state, d_received = jax.lax.cond(
                op.any_active, run, lambda *unchanged: unchanged, state, d_message
            )
            sent.append(d_received)
        of_blocks, measured, of_shared, total = state
        return carry._replace(
            gradients=_shift(tuple(sent), self.schedule, -1),
            blocks=of_blocks,
            measured=measured,
            shared=of_shared,
            total=total,
        )

    def _returned(self, gradients, s: int, op: Op):
        """The gradient of an op's message: at the last chunk, from the lane behind."""
        if s + 1 == len(self.lanes):
            behind = jax.tree.map(jnp.zeros_like, gradients[s])
        else:
            _, transpose = jax.vjp(self.link, gradients[s])
            (behind,) = transpose(gradients[s + 1])
        return _where(op.is_last, behind, gradients[s])

    def _into_chunks(self, x):
        """`[N / P, ...]` -> `[v, n, ...]`: stage p gets the chunks p, P + p, ... of a stack."""
        P, v = self.schedule.num_stages, self.schedule.num_chunks
        return move_chunks(x.reshape(v, -1, *x.shape[1:]), P, v, PIPE)

    def _out_of_chunks(self, x):
        P, v = self.schedule.num_stages, self.schedule.num_chunks
        return move_chunks(x, P, v, PIPE, is_back=True).reshape(-1, *x.shape[2:])


def _shift(messages, schedule: Schedule, step: int):
    """Sends every stage's messages to the next stage (step 1), or to the one before (-1)."""
    P = schedule.num_stages
    is_ring = schedule.num_chunks * schedule.num_lanes > 1
    senders = [p for p in range(P) if is_ring or 0 <= p + step < P]
    pairs = [(p, (p + step) % P) for p in senders]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPE, pairs), messages)


def _rows(schedule: Schedule, ops: Ops, tick: int | None = None) -> dict[str, np.ndarray]:
    """The fields of `Op` as tables, for all ticks or for one."""
    first, last = (schedule.is_at_end_TPS(ops, first=first) for first in (True, False))
    chunk_TPS = np.maximum(ops.chunk_TPS, 0)
    stage_P = np.arange(schedule.num_stages)
    rows = dict(
        microbatch=np.maximum(ops.microbatch_TPS, 0),
        chunk=chunk_TPS,
        slot=ops.slot_TPS,
        place=chunk_TPS * schedule.num_stages + stage_P[None, :, None],
        is_active=ops.is_active_TPS,
        is_first=first,
        is_last=last,
        any_active=np.any(ops.is_active_TPS, axis=1),
        any_first=np.any(first, axis=1),
        any_last=np.any(last, axis=1),
    )
    return {name: jnp.asarray(x if tick is None else x[tick]) for name, x in rows.items()}


def _store(slots, message, op: Op):
    """Puts a message into the op's slot, where it has one."""

    def store(kept, x):
        slot = jnp.maximum(op.slot, 0)
        old = jax.lax.dynamic_index_in_dim(kept, slot, keepdims=False)
        new = jnp.where(op.slot != NONE, x, old)
        return jax.lax.dynamic_update_index_in_dim(kept, new, slot, 0)

    return jax.tree.map(store, slots, message)


def differentiate(lane: Lane, blocks, shared, inputs, message, op: Op, d_message, scale):
    """Gradients by (blocks, shared, message) of all that follows, and the `Objective`."""

    def objective(blocks, shared, message):
        result = lane.objective(blocks, shared, inputs, message, op)
        return (result.message, result.value), result

    (_, value), transpose, result = jax.vjp(objective, blocks, shared, message, has_aux=True)
    return transpose((d_message, scale.astype(value.dtype))), result
