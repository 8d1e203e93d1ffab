# SPDX-License-Identifier: Apache-2.0
"""Bytes and order of training with experts on a disk, against what they should be.

Bytes, where each step uses all E experts of each of N layers, the cache holds one layer and
evicts the least recently used: forward reads all layers; backward begins, and the update too,
with the layer that is there. So a step reads N + (N - 1) + (N - 1) layers, and writes N. Where
a step uses only some experts, bytes are counted by running the trace of the run through its
cache again (`switchx simulate cache` does that).

Order, of a step with S slots: a period's reads begin before the computation that is S - 1
periods ahead of it; forward and backward visit the periods in their order; banks that wait,
with the one that is computed with and the one before it, are no more than S; gradients of a
period are taken once, after the period that follows was started.
Dims: N Switch layers, E experts, S slots
"""

import dataclasses
import functools
import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from switchx.bench.storage import opened, record_bytes
from switchx.checkpoint.run_folder import RunFolder
from switchx.models.config import RouterConfig
from switchx.models.stages import Period
from switchx.storage.cache import BACKWARD, FORWARD, UPDATE, Cache, make_policy
from switchx.storage.simulation import POLICIES
from switchx.storage.snapshot import Snapshot
from switchx.storage.trace import Trace, read_trace
from switchx.training.job import TrainingJob
from switchx.training.offload.disk_periods import Bank
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.disk_step import ExpertBanks, LayeredGradients
from switchx.training.offload.storage_spec import StorageSpec
from tests.promises.storage import (
    EXPERTS,
    LAYERS,
    LENGTH,
    MODEL,
    ROWS,
    make_batch,
    make_job,
    trained,
)

# With fewer than ten updates, the files of all records have one size.
NUM_STEPS = 8
# A token's id chooses: with 64 tokens each of 4 experts has some in every step.
ALL_USED = dataclasses.replace(
    MODEL,
    switch=dataclasses.replace(
        MODEL.switch, num_experts=4, router=RouterConfig("hash", exploration="none")
    ),
)


def bytes_of_files(num_steps: int = NUM_STEPS, policies=POLICIES) -> Iterator[tuple]:
    """Bytes of files that were read and written over those of the formula, by run."""
    per_layer, steps = ALL_USED.switch.num_experts, num_steps * ALL_USED.switch.num_experts

    def closed(trace: Trace) -> tuple[int, int]:
        return steps * (3 * LAYERS - 2), steps * LAYERS

    yield from _traffic(make_job(ALL_USED), "lru", per_layer, num_steps, closed)
    capacity = LAYERS * EXPERTS // 4
    for policy in policies:
        by_trace = functools.partial(simulated, capacity=capacity, policy=policy)
        yield from _traffic(make_job(), policy, capacity, num_steps, by_trace)


def _traffic(
    job: TrainingJob,
    policy: str,
    capacity: int,
    num_steps: int,
    formula: Callable[[Trace], tuple[int, int]],
) -> Iterator[tuple]:
    """Rows of `bytes_of_files`; `formula` has the records read and written, from the trace."""
    storage = StorageSpec("disk", host_bytes=capacity * record_bytes(job), policy=policy)
    with tempfile.TemporaryDirectory() as folder:
        run, job = RunFolder(folder), dataclasses.replace(job, storage=storage)
        program = LayeredProgram(job, run, jax.devices()[:1])
        with program.scope():
            trained(program, num_steps)
            program.experts.save(run.root / "saved")
            found = program.experts.metrics()
        (file_bytes,) = {size for size, _ in Snapshot(run.root / "saved").files.values()}
        records = formula(read_trace(run.storage / "trace.npz"))  # written at the end
    num_records = program.experts.layout.num_keys
    what = f"{num_steps} steps, {policy}, {capacity} of {num_records} cached"
    yield "touched_share", what, found["touched_share"]
    for way, number in zip(("read", "written"), records, strict=True):
        ratio = found[f"{way}_bytes"] / (number * file_bytes)
        yield "bytes_vs_formula", f"{way}, {what}", ratio


def simulated(trace: Trace, capacity: int, policy: str) -> tuple[int, int]:
    """Records that a cache reads and writes on a trace, which ends with a snapshot."""
    layers, E = len(trace.layers), trace.num_experts
    cache = Cache(capacity, make_policy(policy, layers, E, trace.sweeps))
    for keys, moment in trace.requests():
        cache.request(keys, moment)
        if moment.sweep == UPDATE:
            cache.mark_dirty(keys)
    return cache.num_requested - cache.num_hits, cache.num_written_back + len(cache.dirty)


# order_violations


class Event(NamedTuple):
    """Something that a step did, in the order in which it did it.

    Attributes:
        what: `read` begins, `compute` is started, gradients are kept.
        period: its number.
        banks: for `compute`, number of those on the device, including the one in use.
    """

    what: str
    sweep: int
    period: int
    banks: int = 0


class WatchedGradients(LayeredGradients):
    """The gradients of a step, which note when a period is computed with."""

    def __init__(self, job: TrainingJob, banks: "WatchedBanks"):
        super().__init__(
            job.model, job.loss, job.step.num_microbatches, job.storage.slots
        )  # fmt: skip
        number = {(period.stack, period.number): n for n, period in enumerate(self.periods)}

        def noted(sweep: int, compute):
            def call(kind, *arguments):
                # The period's number is the one NumPy scalar among them.
                (period,) = (each for each in arguments if isinstance(each, np.int32))
                banks.computed(sweep, number[kind.stack, int(period)])
                return compute(kind, *arguments)

            return call

        self._forward = noted(FORWARD, self._forward)
        self._backward = noted(BACKWARD, self._backward)


class WatchedBanks:
    """The banks of a run's records, which note what they are asked for.

    Attributes:
        events: events of all steps.
    """

    def __init__(self, banks: ExpertBanks, periods: Sequence[Period]):
        self.events: list[Event] = []
        self._banks = banks
        self._number = {period: n for n, period in enumerate(periods)}
        # Arrays of every fetched bank: those that are gone are no longer on the device.
        self._arrays: list[list[weakref.ref]] = []

    def expected(self, period: Period) -> np.ndarray:
        return self._banks.expected(period)

    def prefetch(self, period: Period, sweep: int, used_JE: np.ndarray) -> None:
        self.events.append(Event("read", sweep, self._number[period]))
        self._banks.prefetch(period, sweep, used_JE)

    def fetch(self, period: Period, sweep: int, used_JE: np.ndarray) -> Bank:
        bank = self._banks.fetch(period, sweep, used_JE)
        self._arrays.append([weakref.ref(array) for array in bank.values()])
        return bank

    def keep_gradients(self, period: Period, used_JE: np.ndarray, bank: Bank) -> None:
        self.events.append(Event("keep", BACKWARD, self._number[period]))
        self._banks.keep_gradients(period, used_JE, bank)

    def computed(self, sweep: int, number: int) -> None:
        """Takes note that a period is about to be computed with."""
        self._arrays = [each for each in self._arrays if any(ref() is not None for ref in each)]
        self.events.append(Event("compute", sweep, number, len(self._arrays)))


def order_of_steps(slots: Sequence[int] = (2, 3), num_steps: int = 2) -> Iterator[tuple]:
    """How often steps with a quarter of the experts cached broke the order, by slots."""
    capacity = LAYERS * EXPERTS // 4 * record_bytes(make_job())
    for number in slots:
        job = make_job(storage=StorageSpec("disk", number, capacity))
        for step, found in enumerate(_violations_by_step(job, num_steps)):
            what = f"step {step}, {number} slots{f': {found[0]}' if found else ''}"
            yield "order_violations", what, len(found)


def _violations_by_step(job: TrainingJob, num_steps: int) -> Iterator[list[str]]:
    with opened(job) as (program, _):
        state = program.init_state()
        banks = WatchedBanks(program.experts, program.experts.periods)
        layered = WatchedGradients(job, banks)
        for step in range(num_steps):
            program.experts.begin_sweeps(is_training=True)
            batch = program.place(make_batch(job.model, step, ROWS, LENGTH))
            layered.gradients(state.params, batch, banks, key=state.key)
            yield violations(banks.events, len(layered.periods), job.storage.slots)
            banks.events.clear()


def expected(num_periods: int, slots: int) -> list[Event]:
    """What a step does, in this file's order."""
    events = []
    for sweep, periods in ((FORWARD, range(num_periods)), (BACKWARD, range(num_periods)[::-1])):
        ahead = slots - 1 if sweep == FORWARD else 1 - slots
        for period in periods:
            if period + ahead in periods:
                events.append(Event("read", sweep, period + ahead))
            events.append(Event("compute", sweep, period))
            if sweep == BACKWARD and period + 1 < num_periods:
                events.append(Event("keep", sweep, period + 1))
    return [*events, Event("keep", BACKWARD, 0)]


def violations(events: Sequence[Event], num_periods: int, slots: int) -> list[str]:
    """What a step did otherwise, in words. A period whose guess was wrong is computed with
    again, so the first time of each event counts."""
    first = dict.fromkeys(event._replace(banks=0) for event in events)
    pairs = itertools.zip_longest(first, expected(num_periods, slots))
    found = [f"{got}; expected {want}" for got, want in pairs if got != want]
    # The period before may still be computing.
    return found + [f"{e}, beside the one before, of {slots} slots" for e in events
                    if e.banks + 1 > slots]  # fmt: skip
