# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as tables: what every stage runs in every tick, and where it keeps inputs.

GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B (Narayanan et al. 2019, PipeDream; Chen et
al. 2023, Pipeline MoE, arXiv:2304.11414, section 3.2) and interleaved 1F1B (Narayanan et al.
2021, arXiv:2104.04473, section 2.2), in lock step: in one tick a stage runs one microbatch
forward and another backward. The forward ticks of a lane are then one window of
v M + P - 1 ticks, and so are its backward ticks, and a program that skips what no stage does
in a tick takes (v M + P - 1) / v of a microbatch's work: exactly the bubble of the papers,
(P - 1) / (v M + P - 1), without any stage ever doing what the others do not.

The blocks of a stack are v * P chunks, and stage p holds the chunks p, P + p, ... A lane is a
stack: an encoder-decoder has two, and every stage holds blocks of both. Pure NumPy.
Dims: T ticks, P stages, S lanes; M microbatches, v chunks of a stage
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

from switchx.fields import check_choices, require

# In the tables: no microbatch, no slot.
NONE = -1
# Backward costs twice forward, and once more if the stage's activations are recomputed.
FORWARD_WORK, BACKWARD_WORK = 1.0, 2.0


@dataclasses.dataclass(frozen=True)
class ScheduleSpec:
    """The schedule that a pipelined step follows.

    Attributes:
        kind: `gpipe` keeps the inputs of all microbatches; `1f1b` keeps the inputs of at most 2
            P - 3 of them (4 P - 3 in an encoder, 2 P - 1 in its decoder); `interleaved` gives
            each stage several chunks of blocks, for a smaller bubble and more messages.
        num_chunks: chunks of each stack in a stage; 1 except with `interleaved`.
    """

    kind: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    num_chunks: int = 1

    def __post_init__(self):
        check_choices(self)
        require(
            self.kind != "interleaved" or self.num_chunks >= 2,
            f"ScheduleSpec.kind='interleaved' with num_chunks={self.num_chunks}; use 2 "
            "chunks or more, or kind='1f1b'",
        )
        require(
            self.kind == "interleaved" or self.num_chunks == 1,
            f"ScheduleSpec.kind={self.kind!r} with num_chunks={self.num_chunks}; use 1, or "
            "kind='interleaved'",
        )

    def build(self, num_stages: int, num_microbatches: int, num_lanes: int = 1) -> "Schedule":
        """Builds the table for these numbers of stages, microbatches and stacks.

        Raises:
            ValueError: a number is below 1, or the microbatches of an interleaved schedule
                are not a multiple of the stages.
        """
        sizes = {"stages": num_stages, "microbatches": num_microbatches, "lanes": num_lanes}
        for name, size in sizes.items():
            require(size >= 1, f"num_{name}={size} of a schedule; use at least 1")
        if self.num_chunks > 1 and num_microbatches % num_stages:
            below = num_microbatches - num_microbatches % num_stages
            choices = f"{below} or {below + num_stages}" if below else f"{num_stages}"
            raise ValueError(
                f"num_microbatches={num_microbatches} of an interleaved schedule is not "
                f"divisible by its {num_stages} stages; use {choices} microbatches, or "
                "kind='1f1b'"
            )
        return _build(self, num_stages, num_microbatches, num_lanes)

    def num_ticks(self, num_stages: int, num_microbatches: int, num_lanes: int = 1) -> int:
        """`Schedule.num_ticks` of the table that `build` makes, without making it."""
        P, M, S, v = num_stages, num_microbatches, num_lanes, self.num_chunks
        forward = (S - 1) * v * P + v * M + P - 1
        return 2 * forward if self.kind == "gpipe" else forward + S * v * P - 1

    def check_blocks(self, num_stages: int, repeats: int, period: int, stack: str) -> None:
        """Checks that a stack's blocks divide over the chunks of all stages.

        Args:
            repeats: periods of `period` blocks in the stack; no chunk has a part of one.

        Raises:
            ValueError: the blocks do not divide.
        """
        chunks = num_stages * self.num_chunks
        if repeats % chunks:
            below = repeats - repeats % chunks
            layers = [str(n * period) for n in (below, below + chunks) if n]
            stages = [
                str(n)
                for n in range(1, repeats // self.num_chunks + 1)
                if repeats % (n * self.num_chunks) == 0
            ]
            fewer = f", or {' or '.join(stages)} stages" if stages else ""
            raise ValueError(
                f"{repeats * period} {stack} blocks, {repeats} periods of {period}, do not "
                f"divide over {num_stages} stages of {self.num_chunks} chunk(s); use "
                f"{' or '.join(layers)} blocks{fewer}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Ops:
    """The ops of one direction, by tick, stage and lane; `NONE` if there is none.

    Attributes:
        microbatch_TPS, chunk_TPS: microbatch and chunk of the op.
        slot_TPS: slot that keeps the op's input; `NONE` at the first chunk of the first stack,
            which reads tokens.
    """

    microbatch_TPS: np.ndarray
    chunk_TPS: np.ndarray
    slot_TPS: np.ndarray

    @property
    def is_active_TPS(self) -> np.ndarray:
        return self.microbatch_TPS != NONE


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The schedule's table; `tests/pipeline/test_schedule.py` runs it as the stages would.

    A stage sends at the end of a tick, and its neighbour uses it in the next tick: activations
    in a forward op, which keeps them in its slot until the microbatch has gone backward,
    gradients in a backward op. In a tick forward ops run before backward ones.

    Attributes:
        num_slots: slots of each lane: the most inputs that any stage keeps at once.
    """

    spec: ScheduleSpec
    num_stages: int
    num_microbatches: int
    num_lanes: int
    forward: Ops
    backward: Ops
    num_slots: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        return self.spec.num_chunks

    @property
    def num_ticks(self) -> int:
        return self.forward.slot_TPS.shape[0]

    def require_stages(self, num_stages: int) -> None:
        """Checks that a mesh has as many stages as the schedule.

        Raises:
            ValueError: the mesh has another number of stages.
        """
        planned = self.num_stages
        require(
            num_stages == planned,
            f"a schedule of {planned} stages needs pipe={planned}, not {num_stages}",
        )

    def is_at_end_TPS(self, ops: Ops, *, first: bool) -> np.ndarray:
        """Whether an op is of a stack's very first chunk, or of its very last one."""
        stage = 0 if first else self.num_stages - 1
        chunk = 0 if first else self.num_chunks - 1
        at_TPS = ops.is_active_TPS & (ops.chunk_TPS == chunk)
        is_here_P = np.arange(self.num_stages) == stage
        return at_TPS & is_here_P[None, :, None]

    def time(self, forward: float = FORWARD_WORK, backward: float = BACKWARD_WORK) -> float:
        """The time of a step in lock step, in units of a stage's work on one microbatch.

        A tick takes as long as its ops: `forward`, `backward` or both, each divided by the
        chunks, for each lane in which any stage has such an op.
        """
        ticks = [
            np.any(ops.is_active_TPS, axis=1).sum() for ops in (self.forward, self.backward)
        ]
        return float(forward * ticks[0] + backward * ticks[1]) / self.num_chunks

    def bubble(self, forward: float = FORWARD_WORK, backward: float = BACKWARD_WORK) -> float:
        """The share of `time` in which a stage has no op: (P - 1) / (v M + P - 1)."""
        busy = self.num_microbatches * self.num_lanes * (forward + backward)
        return 1 - busy / self.time(forward, backward)

    def time_without_lock_step(self) -> float:
        """The time of the same ops in the same order, each begun as soon as its input is ready.

        The difference from `time` is what the common ticks cost.
        """
        works = (FORWARD_WORK / self.num_chunks, BACKWARD_WORK / self.num_chunks)
        free_P, done = [0.0] * self.num_stages, {}
        for tick in range(self.num_ticks):
            for direction, ops in enumerate((self.forward, self.backward)):
                for stage, lane in np.argwhere(ops.is_active_TPS[tick]).tolist():
                    m = int(ops.microbatch_TPS[tick, stage, lane])
                    chunk = int(ops.chunk_TPS[tick, stage, lane])
                    place = self.place(lane, chunk, stage)
                    step = 1 if direction == 0 else -1
                    ready = done.get((direction, place - step, m), 0.0)
                    if direction == 1:
                        ready = max(ready, done[0, place, m])
                    begin = max(free_P[stage], ready)
                    free_P[stage] = done[direction, place, m] = begin + works[direction]
        return max(free_P)

    def place(self, lane: int, chunk: int, stage: int) -> int:
        """The number of chunks that a microbatch passes before this one."""
        return (lane * self.num_chunks + chunk) * self.num_stages + stage


@functools.lru_cache(maxsize=64)
def _build(spec: ScheduleSpec, P: int, M: int, num_lanes: int) -> Schedule:
    lane, chunk, m, stage = (
        index.reshape(-1) for index in np.indices((num_lanes, spec.num_chunks, M, P))
    )
    # Microbatches pass in groups of P, each through all chunks before the next begins.
    round_trip = spec.num_chunks * P
    group, place = m // P * round_trip, m % P
    forward = lane * round_trip + stage + group + chunk * P + place
    backward = (num_lanes - 1 - lane) * round_trip + (P - 1 - stage) + group + place
    backward += (spec.num_chunks - 1 - chunk) * P
    # The last chunk goes backward in the tick in which it went forward; in GPipe, after all.
    backward += np.max(forward) + 1 if spec.kind == "gpipe" else num_lanes * round_trip - 1
    # Sent at the end of the previous tick; the very first chunk reads tokens.
    is_received = (lane > 0) | (chunk > 0) | (stage > 0)
    slot, num_slots = _slots(forward, backward, lane, stage, is_received, (P, num_lanes))
    shape = (int(np.max(backward)) + 1, P, num_lanes)

    def table(tick, values):
        out_TPS = np.full(shape, NONE, np.int32)
        out_TPS[tick, stage, lane] = values
        return out_TPS

    def ops(tick):
        return Ops(*(table(tick, values) for values in (m, chunk, slot)))

    return Schedule(spec, P, M, num_lanes, ops(forward), ops(backward), num_slots)


def _slots(forward, backward, lane, stage, is_received, shape):
    """A slot for every received input, the lowest that is free, and the number in each lane."""
    slot, num_slots = np.full(forward.shape, NONE), np.ones(shape, int)
    free, held = {}, {}
    for i in np.lexsort((backward, forward)):
        if not is_received[i]:
            continue
        where = stage[i], lane[i]
        mine, alive = free.setdefault(where, []), held.setdefault(where, [])
        while alive and min(alive)[0] < forward[i]:
            mine.append(alive.pop(alive.index(min(alive)))[1])
        if not mine:
            mine.append(len(alive))
        slot[i] = min(mine)
        mine.remove(slot[i])
        alive.append((backward[i], slot[i]))
        num_slots[where] = max(num_slots[where], slot[i] + 1)
    return slot, tuple(int(n) for n in num_slots.max(axis=0))
