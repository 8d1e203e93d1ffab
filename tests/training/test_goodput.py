# SPDX-License-Identifier: Apache-2.0
"""Goodput: every second has one cause, over killed processes too; slow steps and hosts."""

import threading
import types

import jax
import numpy as np
import pytest

from switchx.training.telemetry.goodput import (
    COMPILE_EVENTS,
    CompileTime,
    Goodput,
    StepTimes,
    over_processes,
)


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def begun(tmp_path, clock, step=0) -> tuple[Goodput, types.SimpleNamespace]:
    """A process that starts, and what it compiled so far."""
    compiled = types.SimpleNamespace(seconds=0.0)
    goodput = Goodput(tmp_path / "goodput.json", compiled, clock(), clock)
    goodput.begin(step)
    return goodput, compiled


def spent(goodput) -> dict[str, float]:
    return {cause: each for cause, each in goodput.metrics()["seconds"].items() if each}


def test_every_second_has_one_cause(tmp_path, clock):
    goodput, compiled = begun(tmp_path, clock)
    clock.passes(4)
    with goodput.during("evaluation"):
        clock.passes(3)
        compiled.seconds += 2  # of these three
    goodput.goes_on_with("step")
    clock.passes(10)
    goodput.waited_for_data(1.5)
    compiled.seconds += 5
    with goodput.during("checkpoint"):
        clock.passes(0.5)
    want = {"start": 4, "evaluation": 1, "compile": 7, "step": 3.5, "data": 1.5}
    assert spent(goodput) == want | {"checkpoint": 0.5}
    assert sum(spent(goodput).values()) == clock() - 100
    assert goodput.metrics()["share"] == 3.5 / 17.5


def test_steps_after_the_last_checkpoint_are_lost_with_a_killed_process(tmp_path, clock):
    goodput, _ = begun(tmp_path, clock)
    goodput.goes_on_with("step")
    for step in range(1, 8):
        clock.passes(2)
        if step in (2, 4):
            goodput.saved(step, (2, 4))
    goodput.write(7)  # and killed, as its last line of metrics was of step 7
    clock.passes(1000)  # nothing runs
    goodput, compiled = begun(tmp_path, clock, step=4)
    clock.passes(5)
    compiled.seconds += 3
    goodput.goes_on_with("step")
    clock.passes(6)
    got = goodput.metrics()
    assert spent(goodput) == {"step": 8 + 6, "restart": 6 + 2, "compile": 3}
    assert (got["restarts"], got["lost_steps"]) == (1, 3)
    # Killed again before anything was saved: from the same checkpoint, and all of it is lost.
    goodput.write(7)
    goodput, _ = begun(tmp_path, clock, step=4)
    assert spent(goodput) == {"step": 8, "restart": 14, "compile": 3}
    assert goodput.metrics()["lost_steps"] == 6


def test_a_run_that_ended_with_its_checkpoint_loses_nothing(tmp_path, clock):
    goodput, _ = begun(tmp_path, clock)
    goodput.goes_on_with("step")
    clock.passes(2)
    goodput.saved(5, (5,))
    goodput.write(5)
    goodput, _ = begun(tmp_path, clock, step=5)
    assert spent(goodput) == {"step": 2} and goodput.metrics()["lost_steps"] == 0


def test_a_damaged_file_is_named_and_counted_anew(tmp_path, clock, caplog):
    (tmp_path / "goodput.json").write_text("{")
    goodput, _ = begun(tmp_path, clock, step=5)
    assert "goodput.json cannot be read" in caplog.text
    assert goodput.metrics()["restarts"] == 0


def test_compilations_inside_of_others_count_once(clock):
    def reported(event, seconds):
        jax.monitoring.record_event_duration_secs(event, seconds)

    with CompileTime(clock) as compiled:
        clock.passes(1)
        reported(f"{COMPILE_EVENTS}jaxpr_trace_duration", 1.0)  # 100 to 101
        clock.passes(1)
        reported(f"{COMPILE_EVENTS}jaxpr_trace_duration", 0.5)  # within the next
        reported(f"{COMPILE_EVENTS}jaxpr_trace_duration", 2.0)  # 100 to 102
        clock.passes(4)
        reported(f"{COMPILE_EVENTS}backend_compile_duration", 3.0)  # 103 to 106
        reported("/jax/checkpoint/write", 3.0)
        thread = threading.Thread(target=reported, args=(f"{COMPILE_EVENTS}other", 3.0))
        thread.start()
        thread.join()
    assert compiled.seconds == 5
    reported(f"{COMPILE_EVENTS}backend_compile_duration", 3.0)
    assert compiled.seconds == 5


def test_what_jax_compiles_is_counted():
    with CompileTime() as compiled:
        jax.jit(lambda x: x * 3)(1.0)
    assert compiled.seconds > 0


class Result(threading.Event):
    """A step's result, which is there when a test sets it."""

    block_until_ready = threading.Event.wait


@pytest.fixture
def times(clock, monkeypatch):
    monkeypatch.setattr(jax, "block_until_ready", lambda result: result.block_until_ready())
    times = StepTimes(clock)
    yield times
    times.close()


def take_step(times, clock, wait_s, host_s, step_s, has_compiled=False) -> float:
    """A step that ends before the host goes on; returns how long its batch was waited for."""
    times.begins_wait()
    clock.passes(wait_s)
    waited_s = times.data_wait_s()
    clock.passes(host_s)
    result = Result()
    times.dispatched(result, has_compiled)
    clock.passes(step_s)
    result.set()
    while times._ends.empty():
        pass
    return waited_s


def test_slow_steps_and_a_late_host(times, clock):
    assert times.metrics() == {}
    take_step(times, clock, 0, 0, 50, has_compiled=True)
    assert times.metrics() == {}
    waits = [take_step(times, clock, 0.25, 0.25, 0.5) for _ in range(4)]
    assert waits == [0.25] * 4
    take_step(times, clock, 0.0, 0.0, 2.5)
    clock.passes(60)  # an evaluation
    times.goes_on()
    take_step(times, clock, 0.0, 0.5, 0.5)
    got = times.metrics()
    assert got == {
        "median_s": 1.0, "max_s": 2.5, "max_process": 0, "slow_steps": 1,
        "late_s": 2.5, "late_process": 0, "late_median_s": 2.5,
    }  # fmt: skip
    assert times.metrics() == {}


def test_a_batch_that_comes_while_a_step_runs_is_not_waited_for(times, clock):
    first, second = Result(), Result()
    times.begins_wait()
    times.dispatched(first, False)
    clock.passes(1)
    times.begins_wait()
    clock.passes(1)
    assert times.data_wait_s() == 0.0
    times.dispatched(second, False)
    first.set()
    second.set()
    times.close()
    assert times.metrics()["late_s"] == 0.0


def test_the_process_that_is_late_is_named():
    rows_PS = np.array([[0.5, 0.75, 1, 0.25], [0.5, 0.5, 0, 8.0], [0.5, 4.0, 2, 0.0]])
    got = over_processes(rows_PS)
    assert (got["max_s"], got["max_process"], got["slow_steps"]) == (4.0, 2, 2)
    assert (got["late_s"], got["late_process"], got["late_median_s"]) == (8.0, 1, 0.25)
