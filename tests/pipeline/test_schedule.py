# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: the papers' bubbles, bounded slots, and a check that finds faults."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.pipeline.schedule import NONE, Ops, Schedule, ScheduleSpec
from switchx.pipeline.ticks import IF_ACTIVE, IF_LAST, branch_shares
from tests.data.refusals import refused

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


def num_places(schedule) -> int:
    """The number of chunks of all stacks, which a microbatch passes one after the other."""
    return schedule.num_lanes * schedule.num_chunks * schedule.num_stages


@given(
    kind=st.sampled_from(KINDS),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 13),
    lanes=st.integers(1, 3),
)
def test_a_table_runs_as_the_stages_would_run_it(kind, stages, microbatches, lanes):
    if kind[0] == "interleaved":
        microbatches *= stages
    run_schedule(ScheduleSpec(*kind).build(stages, microbatches, lanes))


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_bubble_is_that_of_the_papers(kind, chunks, num_lanes):
    """(P - 1) / (M + P - 1), interleaved (P - 1) / (v M + P - 1), at any ratio of B to F."""
    for P in (1, 2, 4, 8):
        for M in (8, 16, 64):
            schedule = ScheduleSpec(kind, chunks).build(P, M, num_lanes)
            want = (P - 1) / (chunks * M + P - 1)
            for backward in (1.0, 2.0, 3.0):
                np.testing.assert_allclose(schedule.bubble(1.0, backward), want, atol=1e-12)


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_common_ticks_cost_one_stack_nothing(kind, chunks):
    """No stage would be done sooner if it went on as soon as its input is there."""
    schedule = ScheduleSpec(kind, chunks).build(4, 16)
    np.testing.assert_allclose(schedule.time_without_lock_step(), schedule.time())


def test_common_ticks_cost_two_stacks_a_wait_between_them():
    """Encoder and decoder are one pipeline of two chunks for stages that need not agree."""
    schedule = ScheduleSpec("1f1b").build(4, 8, 2)
    free = schedule.time_without_lock_step()
    assert 2 * 3 * 8 < free < schedule.time() == 2 * 3 * (8 + 3)


def test_every_stage_does_everything_once_in_order():
    schedule = ScheduleSpec("1f1b").build(4, 6)
    for ops in (schedule.forward, schedule.backward):
        for stage in range(4):
            mine_T = ops.microbatch_TPS[:, stage, 0]
            np.testing.assert_array_equal(mine_T[mine_T != NONE], np.arange(6))
    # Forward down the stages, backward up: 1F1B's first microbatch.
    first = [np.argwhere(ops.microbatch_TPS[..., 0] == 0) for ops in (schedule.forward,)]
    np.testing.assert_array_equal(first[0], [[0, 0], [1, 1], [2, 2], [3, 3]])


def test_slots_are_as_many_as_inputs_are_alive():
    slots = {
        M: {
            name: ScheduleSpec(name, v).build(4, M).num_slots[0]
            for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
        }
        for M in (8, 32, 128)
    }
    assert {row["1f1b"] for row in slots.values()} == {5}  # stage 1; stage 0 reads tokens
    assert {row["interleaved"] for row in slots.values()} == {9}
    assert [row["gpipe"] for row in slots.values()] == [8, 32, 128]
    for P in (2, 3, 8):
        assert ScheduleSpec("1f1b").build(P, 64).num_slots[0] <= 2 * P - 1


def run_schedule(schedule: Schedule) -> None:
    """Runs a table as the stages would.

    Raises:
        ValueError: an op is missing or there twice, its input has not arrived or is that of
            another op, or something that arrived is not used, or is overwritten.
    """
    sent: tuple[dict, dict] = {}, {}
    kept: dict = {}
    ran: tuple[set, set] = set(), set()
    for tick in range(schedule.num_ticks):
        arrived, sent = sent, ({}, {})
        for direction, ops in enumerate((schedule.forward, schedule.backward)):
            for stage, lane in np.argwhere(ops.is_active_TPS[tick]).tolist():
                here = (tick, stage, lane)
                m, chunk, slot = (
                    int(x[here]) for x in (ops.microbatch_TPS, ops.chunk_TPS, ops.slot_TPS)
                )
                op = schedule.place(lane, chunk, stage), m
                check = _check_forward if direction == 0 else _check_backward
                wrong = check(schedule, op, (stage, lane, slot), kept, arrived[direction], ran)
                if wrong:
                    raise ValueError(
                        f"schedule, tick {tick}, stage {stage}, lane {lane}: {wrong}"
                    )
                ran[direction].add(op)
                after = op[0] + (1 if direction == 0 else -1)
                if 0 <= after < num_places(schedule):
                    to_lane, rest = divmod(after, schedule.num_chunks * schedule.num_stages)
                    sent[direction][rest % schedule.num_stages, to_lane] = (after, m)
        for waiting in arrived:
            if waiting:
                raise ValueError(f"schedule, tick {tick}: no op uses what arrived: {waiting}")
    expected = num_places(schedule) * schedule.num_microbatches
    for direction, name in enumerate(("forward", "backward")):
        if len(ran[direction]) != expected:
            raise ValueError(f"schedule: {len(ran[direction])} of {expected} ops run {name}")


def _check_forward(schedule, op, slot, kept, arrived, ran) -> str | None:
    """What is wrong with an op `(place, microbatch)`; keeps its input in the slot."""
    if op in ran[0]:
        return f"microbatch {op[1]} goes forward twice"
    if (op[0] == 0) != (slot[-1] == NONE) or slot[-1] >= schedule.num_slots[slot[1]]:
        return f"slot {slot[-1]} cannot keep the input of microbatch {op[1]}"
    if op[0] > 0:
        if arrived.pop(slot[:2], None) != op:
            return f"microbatch {op[1]} has not arrived"
        if slot in kept:
            return f"slot {slot[-1]} is not free"
        kept[slot] = op
    return None


def _check_backward(schedule, op, slot, kept, arrived, ran) -> str | None:
    """What is wrong with an op `(place, microbatch)`; frees its slot."""
    if op in ran[1]:
        return f"microbatch {op[1]} goes backward twice"
    if op not in ran[0]:
        return f"microbatch {op[1]} goes backward before forward"
    if op[0] > 0 and kept.pop(slot, None) != op:
        return f"slot {slot[-1]} does not hold microbatch {op[1]}"
    if op[0] < num_places(schedule) - 1 and arrived.pop(slot[:2], None) != op:
        return f"the gradient of microbatch {op[1]} is not there"
    return None


def replaced(schedule, direction: str, field: str, change):
    """The schedule with one of its arrays changed in place."""
    ops = getattr(schedule, direction)
    array = getattr(ops, field).copy()
    change(array)
    fields = {f.name: getattr(ops, f.name) for f in dataclasses.fields(Ops)} | {field: array}
    return dataclasses.replace(schedule, **{direction: Ops(**fields)})


def put(place, value):
    def change(array):
        array[place] = value

    return change


@pytest.mark.parametrize(
    ("direction", "field", "place", "value", "fault"),
    [
        ("forward", "microbatch_TPS", (0, 0, 0), NONE, "has not arrived"),
        ("forward", "microbatch_TPS", (1, 1, 0), 1, "has not arrived"),
        ("forward", "microbatch_TPS", (1, 0, 0), 0, "forward twice"),
        ("forward", "microbatch_TPS", (2, 1, 0), NONE, "no op uses"),
        ("forward", "slot_TPS", (2, 1, 0), 0, "is not free"),
        ("forward", "slot_TPS", (1, 1, 0), NONE, "cannot keep"),
        ("forward", "slot_TPS", (1, 1, 0), 99, "cannot keep"),
        ("backward", "slot_TPS", (3, 3, 0), 1, "does not hold"),
        ("backward", "microbatch_TPS", (4, 2, 0), NONE, "is not there|no op uses"),
        ("backward", "microbatch_TPS", (4, 3, 0), 0, "backward twice"),
        ("backward", "microbatch_TPS", (4, 3, 0), 5, "before forward"),
        ("backward", "microbatch_TPS", (-1, 0, 0), NONE, "no op uses"),
    ],
)
def test_check_finds_a_fault(direction, field, place, value, fault):
    schedule = ScheduleSpec("1f1b").build(4, 6)
    run_schedule(schedule)
    with pytest.raises(ValueError, match=fault):
        run_schedule(replaced(schedule, direction, field, put(place, value)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ScheduleSpec("zero_bubble"), "gpipe, 1f1b, interleaved"),
        (lambda: ScheduleSpec("interleaved"), "use 2 chunks or more, or kind='1f1b'"),
        (lambda: ScheduleSpec("1f1b", 2), "use 1, or kind='interleaved'"),
        (lambda: ScheduleSpec().build(0, 4), "num_stages=0"),
        (lambda: ScheduleSpec().build(4, 0), "num_microbatches=0"),
        (lambda: ScheduleSpec("interleaved", 2).build(4, 6), "use 4 or 8 microbatches"),
        (lambda: ScheduleSpec("interleaved", 2).build(4, 3), "use 4 microbatches"),
        (lambda: ScheduleSpec().check_blocks(4, 6, 2, "encoder"), "use 8 or 16 blocks"),
    ],
)
def test_wrong_numbers_are_refused(make, words):
    with refused(f"<any>{words}"):
        make()


def test_blocks_that_do_not_divide_are_refused_with_what_does():
    with refused(
        "12 decoder blocks, 6 periods of 2, do not divide over 4 stages of 1 chunk(s)"
    ):
        ScheduleSpec().check_blocks(4, 6, 2, "decoder")
    ScheduleSpec("interleaved", 2).check_blocks(4, 16, 2, "decoder")


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "spec", [ScheduleSpec("gpipe"), ScheduleSpec("1f1b"), ScheduleSpec("interleaved", 3)]
)
def test_ticks_are_known_without_the_table(spec, lanes):
    for stages, microbatches in ((2, 4), (4, 4), (3, 9)):
        schedule = spec.build(stages, microbatches, lanes)
        assert spec.num_ticks(stages, microbatches, lanes) == schedule.num_ticks
        # What a conditional of a tick runs: v M + P - 1 times its ops, M times an end's.
        shares, chunks = branch_shares(schedule), spec.num_chunks
        active = chunks * microbatches + stages - 1
        assert shares[IF_ACTIVE] * schedule.num_ticks == active
        assert shares[IF_LAST] * active == microbatches
