# SPDX-License-Identifier: Apache-2.0
"""Goodput: the share of a run's wall time in training steps, what took the rest, slow steps.

Goodput and its causes as in Google's ml-goodput-measurement, which MaxText reports: all time
outside of steps is badput. `goodput.json` in the run folder adds up the seconds of all
processes that trained there one after another, by the clock of process 0; time in which
nothing ran is not counted. Every second has one cause. None of this waits for a device: a
thread notes when each step has ended.
"""

import collections
import contextlib
import json
import logging
import math
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.experimental import multihost_utils

from switchx.fields import json_text
from switchx.files import write_atomically

logger = logging.getLogger(__name__)

# What a cause counts, and in brackets what ml-goodput-measurement calls it: `step` is from the
# first step to the last, minus the others; `start` from the command to the first step
# (accelerator initialization, training preparation); `restart` the same for a process that
# resumes, and the steps that it takes again (checkpoint restore, wasted progress from
# disruption); `compile` also reading from the cache (program startup); `data` when the devices
# had no step because the host had no batch (data loading); `checkpoint` saves for as long as
# training waits (checkpoint save).
Cause = Literal[
    "step", "start", "restart", "compile", "data", "evaluation", "checkpoint", "profile"
]
# Tracing, lowering, and compiling or reading from the persistent cache.
COMPILE_EVENTS = "/jax/core/compile/"
# A step is slow if it takes longer than SLOW times the median of the last LAST_STEPS.
SLOW, LAST_STEPS = 2.0, 100

Clock = Callable[[], float]


class CompileTime:
    """Seconds in which the thread that made it compiled, while it is entered.

    JAX reports how long each trace, lowering and compilation took. One may contain others;
    their union is counted.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        """Counts nothing before it is entered."""
        self.seconds = 0.0
        self._clock = clock
        self._thread = threading.get_ident()
        self._counted: list[tuple[float, float]] = []  # apart, in order

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **labels) -> None:
        if not event.startswith(COMPILE_EVENTS) or threading.get_ident() != self._thread:
            return
        end = self._clock()
        start = end - duration
        # An outer one is reported after those inside of it.
        while self._counted and self._counted[-1][1] > start:
            earlier = self._counted.pop()
            self.seconds -= earlier[1] - earlier[0]
            start = min(start, earlier[0])
        self._counted.append((start, end))
        self.seconds += end - start


class Goodput:
    """Seconds by cause, of this process and those before it in the same run folder.

    Attributes:
        seconds: seconds by cause. `start`: until the first step of a run. `restart`: until the
            first step of a process that resumes, and steps that were lost with an earlier
            process. `data`: the devices had no step because the host had no batch. `compile`:
            wherever it happens. `step`: everything else between the first step and the last.
        restarts: number of processes that resumed.
        lost_steps: steps that were taken again because they came after the last checkpoint.
    """

    def __init__(
        self,
        path: pathlib.Path,
        compiled: CompileTime,
        started_s: float,
        clock: Clock = time.perf_counter,
    ):
        """Reads what was counted before; nothing is added before `begin`.

        Args:
            path: the path of `goodput.json`.
            compiled: the compile time of this process, entered by the caller.
            started_s: time at which the work of this process began, by `clock`.
        """
        self._path, self._compiled, self._clock = path, compiled, clock
        self._is_writer = jax.process_index() == 0
        self._since, self._compiled_before = started_s, 0.0
        self._cause: Cause = "start"
        self.seconds: dict[Cause, float] = dict.fromkeys(get_args(Cause), 0.0)
        self.restarts = self.lost_steps = 0
        self._step = 0  # the last that is known to have been taken
        self._has_begun = False
        self._at_checkpoints = {0: 0.0}  # seconds of steps when each was saved

    def begin(self, step: int) -> None:
        """Adds to what earlier processes counted; this one resumes after `step`."""
        self._has_begun = True
        earlier = _read(self._path) if self._is_writer else None
        if earlier is None:
            return
        self._cause = "restart"
        self.seconds |= earlier["seconds"]
        self.restarts = earlier["restarts"] + 1
        self.lost_steps = earlier["lost_steps"] + max(earlier["step"] - step, 0)
        saved = {int(s): each for s, each in earlier["at_checkpoints"].items()}
        self._at_checkpoints |= {s: each for s, each in saved.items() if s <= step}
        # If a checkpoint that was not saved here is resumed, what was lost is not known.
        lost_s = self.seconds["step"] - self._at_checkpoints.get(step, self.seconds["step"])
        self.seconds["step"] -= lost_s
        self.seconds["restart"] += lost_s
        self._step = step

    @property
    def compiled_s(self) -> float:
        """Seconds in which this process compiled."""
        return self._compiled.seconds

    def goes_on_with(self, cause: Cause) -> None:
        """Counts the time until now for the previous cause, and from now on for `cause`."""
        now, compiled = self._clock(), self._compiled.seconds
        compiled_s = compiled - self._compiled_before
        self.seconds["compile"] += compiled_s
        self.seconds[self._cause] += now - self._since - compiled_s
        self._since, self._compiled_before, self._cause = now, compiled, cause

    @contextlib.contextmanager
    def during(self, cause: Cause) -> Iterator[None]:
        """Counts the time in the context for `cause`, and then for the previous cause again."""
        outer = self._cause
        self.goes_on_with(cause)
        try:
            yield
        finally:
            self.goes_on_with(outer)

    def waited_for_data(self, seconds: float) -> None:
        """Counts seconds of steps as seconds of data: no step ran, for lack of a batch."""
        self.seconds["step"] -= seconds
        self.seconds["data"] += seconds

    def metrics(self) -> dict[str, Any]:
        """All until now: `share` of `step` in all seconds, which are under `seconds`."""
        self.goes_on_with(self._cause)
        total_s = sum(self.seconds.values())
        return {
            "share": self.seconds["step"] / max(total_s, 1e-9),
            "seconds": {cause: round(each, 3) for cause, each in self.seconds.items()},
            "restarts": self.restarts,
            "lost_steps": self.lost_steps,
        }

    def saved(self, step: int, kept: Collection[int]) -> None:
        """Notes that there is a checkpoint of `step`; those not in `kept` are gone."""
        self.goes_on_with(self._cause)
        at = {s: each for s, each in self._at_checkpoints.items() if s in kept or s == 0}
        self._at_checkpoints = at | {step: self.seconds["step"]}
        self.write(step)

    def write(self, step: int) -> None:
        """Writes the file: `metrics()`, the last step, and what a resumed process needs.

        A process that has not begun, because there was no step to take, leaves it as it was.
        """
        if self._is_writer and self._has_begun:
            self._step = max(self._step, step)
            text = self.metrics() | {"step": self._step, "at_checkpoints": self._at_checkpoints}
            write_atomically(self._path, (json_text(text, indent=2) + "\n").encode())


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    """The counts of earlier processes; None without any."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("%s cannot be read (%s); goodput is counted anew", path, error)
        return None


class StepTimes:
    """When the devices of this process began and ended each step.

    A thread waits for each step's result, so that the loop does not. A step lasts from the end
    of the previous step to its own, or, after an evaluation, a save or a line of metrics, from
    when that was done. Waiting for data and for other processes is included. Steps that compile
    are left out.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        """Starts the thread; `close` ends it."""
        self._clock = clock
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._ends: queue.SimpleQueue = queue.SimpleQueue()
        self._running: collections.deque[tuple[float, bool]] = collections.deque()
        self._ended_s = -math.inf
        self._asked_s = self._goes_on_s = clock()
        self._last: collections.deque[float] = collections.deque(maxlen=LAST_STEPS)
        self._new: list[float] = []
        self._late_s = 0.0
        self._thread = threading.Thread(target=self._wait, name="step times", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; does not wait for a device that hangs."""
        self._results.put(None)
        self._thread.join(timeout=1.0)

    def _wait(self) -> None:
        while (result := self._results.get()) is not None:
            # An error of the step is raised by the loop, when it reads the same array.
            with contextlib.suppress(Exception):
                jax.block_until_ready(result)
            self._ends.put(self._clock())
            del result  # not held while it waits for the next

    def goes_on(self) -> None:
        """Notes that until now the host was busy with something other than steps."""
        self._goes_on_s = self._clock()

    def begins_wait(self) -> None:
        """Notes that the host asks for the batch of the next step."""
        self._asked_s = self._clock()

    def data_wait_s(self) -> float:
        """Seconds since the host asked in which the devices had no step."""
        return self._idle_since(self._asked_s)

    def _idle_since(self, start_s: float) -> float:
        self._take_ends()
        return 0.0 if self._running else self._clock() - max(start_s, self._ended_s)

    def dispatched(self, result: jax.Array, has_compiled: bool) -> None:
        """Notes a step on its way to the devices; `result` is ready when it has ended."""
        self._late_s += 0.0 if has_compiled else self._idle_since(self._goes_on_s)
        self._running.append((self._goes_on_s, has_compiled))
        self._results.put(result)
        self.goes_on()

    def _take_ends(self) -> None:
        while not self._ends.empty():
            self._take_end()

    def _take_end(self) -> None:
        end, (start, has_compiled) = self._ends.get(), self._running.popleft()
        if not has_compiled:
            self._new.append(end - max(start, self._ended_s))
        self._ended_s = end

    def metrics(self) -> dict[str, float | int]:
        """Metrics of the steps since the last call, over all processes, which call it together.

        It waits for the steps that run.

        Returns:
            `median_s`, of the median process; `max_s`, the longest step, and `max_process`, its
            process; `slow_steps`, the number of steps longer than `SLOW` times the median of
            the last `LAST_STEPS`, in the process that has most; `late_s`, most seconds in which
            the devices of a process waited for their host, `late_process`, that process, and
            `late_median_s`, of the median process. Nothing if every step compiled.
        """
        while self._running:
            self._take_end()
        new, late_s, self._new, self._late_s = self._new, self._late_s, [], 0.0
        self._last.extend(new)
        row = [math.nan, math.nan, 0.0, late_s]
        if new:
            slow_s = SLOW * float(np.median(self._last))
            row[:3] = float(np.median(new)), max(new), sum(each > slow_s for each in new)
        rows_PS = np.array([row], np.float32)  # processes, statistics
        if jax.process_count() > 1:
            rows_PS = np.asarray(multihost_utils.process_allgather(rows_PS[0]))
        return over_processes(rows_PS)


def over_processes(rows_PS: np.ndarray) -> dict[str, float | int]:
    """See `StepTimes.metrics`; a row is [median, longest, number of slow steps, late]."""
    median_P, max_P, slow_P, late_P = rows_PS.T
    if np.all(np.isnan(median_P)):
        return {}
    return {
        "median_s": float(np.nanmedian(median_P)),
        "max_s": float(np.nanmax(max_P)),
        "max_process": int(np.nanargmax(max_P)),
        "slow_steps": int(np.max(slow_P)),
        "late_s": float(np.max(late_P)),
        "late_process": int(np.argmax(late_P)),
        "late_median_s": float(np.median(late_P)),
    }
