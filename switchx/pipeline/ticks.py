# SPDX-License-Identifier: Apache-2.0
"""A tick of a pipeline's schedule on one stage: its ops, what arrives and what is sent on.

`staged.py` computes gradients with them, and `staged_forward.py` sums of forward passes.
Dims: T ticks, P stages, S lanes, v chunks of a stage
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from switchx.partitioning.constrain import constrain_named
from switchx.partitioning.mesh import PIPE
from switchx.pipeline.chunks import chunk_of, move_chunks
from switchx.pipeline.schedule import Ops, Schedule

# Conditions of a tick, as name scopes: `compiled` counts conditionals by them.
IF_ACTIVE, IF_FIRST, IF_LAST = "if_any_active", "if_any_first", "if_any_last"


class Op(NamedTuple):
    """One stage's part of a tick in one lane and direction.

    Attributes:
        microbatch, chunk_in_stack: number of the microbatch, and number of the chunk in its
            stack, in the order of the blocks. Both are any valid numbers where `is_active` is
            false.
        chunk, slot: the number of the stage's own chunk, and the slot that keeps its input.
        is_active, any_active: whether this stage has an op, and whether any stage has one.
        is_first, is_last: whether it is the stack's first chunk, or its last.
        any_first, any_last: whether that holds on any stage, the same on all: what only end
            stages compute is skipped if this is false, and not used where theirs is.
        last_microbatch: microbatch of the stage with the last chunk, the same on all stages.
    """

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    chunk_in_stack: jax.Array
    is_active: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    any_active: jax.Array
    any_first: jax.Array
    any_last: jax.Array
    last_microbatch: jax.Array


# The fields that are the same on all stages.
_OF_ALL = ("any_active", "any_first", "any_last", "last_microbatch")


class Objective(NamedTuple):
    """The results of a chunk for a microbatch.

    Attributes:
        message: the input of the next chunk.
        value: the chunk's own term of the objective that is differentiated.
        measured: sums over microbatches, for each chunk apart.
        total: sums over microbatches and chunks.
    """

    message: Any
    value: jax.Array
    measured: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class Lane:
    """The functions that compute a chunk of a stack's blocks.

    Both functions take (blocks, shared, inputs, message, op). The very first chunk has no
    message: where `op.is_first`, the first lane must not read it.

    Attributes:
        forward: function that returns the message for the next chunk.
        objective: function that returns the message and the rest of an `Objective`.
        message: shapes of one microbatch's message; names end in dimensions.
        head: function that all stages compute for the last chunk's message, each for a part of
            its `x_BLD` along L: (shared, x_BLD, inputs, op, first) -> (its term of the
            objective, its `Objective.total`), for `op.last_microbatch` and the part that begins
            at `first`. Parts beyond the end are zeros. None if the lane has none.
    """

    forward: Callable[..., Any]
    objective: Callable[..., Objective]
    message: Any
    head: Callable[..., tuple[jax.Array, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage's part of a schedule; in its methods the axis `pipe` is manual.

    Attributes:
        link: linear function from the last message of one lane to the first message of the
            next. None if there is one lane.
    """

    schedule: Schedule
    lanes: tuple[Lane, ...]
    link: Callable[[Any], Any] | None

    def ops(self, row: dict, stage) -> list[Op]:
        """This stage's ops of a tick, lane by lane."""
        mine = {name: x if name in _OF_ALL else x[stage] for name, x in row.items()}
        return [Op(**{name: x[s] for name, x in mine.items()}) for s in range(len(self.lanes))]

    def no_messages(self) -> tuple:
        """Zeros in place of messages, lane by lane."""
        return tuple(
            constrain_named(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), lane.message))
            for lane in self.lanes
        )

    def no_sums(self, blocks, shared, inputs, messages) -> tuple[tuple, Any]:
        """Zeros of each lane's `Objective.measured`, by chunk, and of all `Objective.total`."""
        v = self.schedule.num_chunks
        measured = []
        totals = []
        op = self.ops(op_rows(self.schedule, self.schedule.forward, 0), 0)[0]
        for lane, lane_blocks, message in zip(self.lanes, blocks, messages, strict=True):
            result = jax.eval_shape(
                lane.objective, chunk_of(lane_blocks, 0), shared, inputs, message, op
            )
            measured.append(
                jax.tree.map(lambda x: jnp.zeros((v, *x.shape), x.dtype), result.measured)
            )
            totals.append(result.total)
        return tuple(measured), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), totals[0])

    def received(self, activations, ops: list[Op]):
        """The message for each lane: at its first chunk, from the lane before."""
        received = list(activations)
        for s in range(1, len(self.lanes)):
            linked = self.link(activations[s - 1])
            received[s] = where(ops[s].is_first, linked, activations[s])
        return tuple(received)

    def into_chunks(self, x):
        """`[N / P, ...]` -> `[v, n, ...]`: stage p gets the chunks p, P + p, ... of a stack."""
        P, v = self.schedule.num_stages, self.schedule.num_chunks
        return move_chunks(x.reshape(v, -1, *x.shape[1:]), P, v, PIPE)

    def out_of_chunks(self, x):
        P, v = self.schedule.num_stages, self.schedule.num_chunks
        return move_chunks(x, P, v, PIPE, is_back=True).reshape(-1, *x.shape[2:])


def run_if(name: str, condition, function, otherwise, *args):
    """Returns `function(*args)` if `condition`, equal on all devices, holds, else `otherwise`.

    `otherwise` is passed in and not made in a branch: XLA has to split both results alike.

    Args:
        name: name of the condition, one of the names above.
    """
    with jax.named_scope(name):
        return jax.lax.cond(
            condition,
            lambda otherwise, *args: function(*args),
            lambda otherwise, *args: otherwise,
            otherwise,
            *args,
        )


def branch_shares(schedule: Schedule) -> dict[str, Fraction]:
    """The share of the executions of a tick's conditional in which it has an op, by its name.

    A compiled program does not reveal these shares, since it reads them from tables.
    """
    active_TS = np.any(schedule.forward.is_active_TPS, axis=1)
    num_active = int(np.sum(active_TS[:, 0]))  # in each lane, and equally many backward
    at_end = Fraction(schedule.num_microbatches, num_active)
    return {
        IF_ACTIVE: Fraction(num_active, schedule.num_ticks),
        IF_FIRST: at_end,
        IF_LAST: at_end,
    }


def where(condition, new, old):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)


def shift(messages, schedule: Schedule, step: int):
    """Sends every stage's messages to the next stage (step 1), or to the one before (-1)."""
    P = schedule.num_stages
    is_ring = schedule.num_chunks * schedule.num_lanes > 1
    senders = [p for p in range(P) if is_ring or 0 <= p + step < P]
    pairs = [(p, (p + step) % P) for p in senders]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPE, pairs), messages)


def op_rows(schedule: Schedule, ops: Ops, ticks=slice(None)) -> dict[str, jax.Array]:
    """The fields of `Op` as tables, for all ticks or for some."""
    first, last = (schedule.is_at_end_TPS(ops, first=first) for first in (True, False))
    chunk_TPS = np.maximum(ops.chunk_TPS, 0)
    stage_P = np.arange(schedule.num_stages)
    rows = dict(
        microbatch=np.maximum(ops.microbatch_TPS, 0),
        chunk=chunk_TPS,
        slot=ops.slot_TPS,
        chunk_in_stack=chunk_TPS * schedule.num_stages + stage_P[None, :, None],
        is_active=ops.is_active_TPS,
        is_first=first,
        is_last=last,
        any_active=np.any(ops.is_active_TPS, axis=1),
        any_first=np.any(first, axis=1),
        any_last=np.any(last, axis=1),
        last_microbatch=np.maximum(ops.microbatch_TPS[:, -1], 0),
    )
    return {name: jnp.asarray(x[ticks]) for name, x in rows.items()}


def in_order_of_blocks(measured):
    """`[v, P * n, ...]`, chunk by chunk and in each of them stage by stage, as `[N, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), measured)


def own_part(x_BLD, op: Op, num_stages: int):
    """This stage's part, along L, of the last chunk's stage's array, and where the part begins.

    L is filled up with zeros to a multiple of the stages.
    """
    if num_stages == 1:
        return x_BLD, 0
    missing = -x_BLD.shape[1] % num_stages
    x_BLD = jnp.pad(jnp.where(op.is_last, x_BLD, 0), ((0, 0), (0, missing), (0, 0)))
    own_BLD = jax.lax.psum_scatter(x_BLD, PIPE, scatter_dimension=1, tiled=True)
    return own_BLD, own_BLD.shape[1] * jax.lax.axis_index(PIPE)


def from_parts(own_BLD, length: int, num_stages: int):
    """The parts of all stages, `[B, length, D]`."""
    if num_stages == 1:
        return own_BLD
    return jax.lax.all_gather(own_BLD, PIPE, axis=1, tiled=True)[:, :length]
