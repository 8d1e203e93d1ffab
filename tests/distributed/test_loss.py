# SPDX-License-Identifier: Apache-2.0
"""What becomes of two and four processes when one of them is lost, fails, is late, or ends."""

import re
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import child_environment, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SILENCE_S = 5


@pytest.fixture
def run(tmp_path):
    """Runs processes of `worker.py`: their statuses, what they said, and how long it took.

    The seconds are those from the event until the last of the others had ended.
    """
    started = []

    def run(count: int, event: str):
        port = str(free_port())
        for index in range(count):
            words = [port, str(count), str(index), str(SILENCE_S), event]
            with (tmp_path / f"{index}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.distributed.worker", *words],
                        env=child_environment(tmp_path / "cache", devices=1),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        victim = started[0 if event.startswith("first_") else -1]
        others = [process for process in started if process is not victim]
        if event.endswith("frozen"):
            while b"T (stopped)" not in _status(victim):
                time.sleep(0.1)
        else:
            victim.wait(300)
        began = time.monotonic()
        for process in others:
            process.wait(120)
        took_s = time.monotonic() - began
        if event.endswith("frozen"):
            victim.kill()
        return [each.wait(60) for each in started], logs(), took_s

    def logs():
        return [
            (tmp_path / f"{index}.log").read_text(errors="replace")
            for index in range(len(started))
        ]

    yield run
    for process in started:
        process.kill()


def _status(process: subprocess.Popen) -> bytes:
    with open(f"/proc/{process.pid}/status", "rb") as file:
        return file.read()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("event", ["killed", "frozen"])
def test_a_lost_process_ends_the_others_by_name(count, event, run):
    statuses, logs, took_s = run(count, event)
    assert statuses == [1] * (count - 1) + [-signal.SIGKILL]
    assert took_s < SILENCE_S + 20  # on a busy machine
    for index, log in enumerate(logs[:-1]):
        assert re.search(
            rf"switchx: process {count - 1} \(\S+, pid \d+\) is lost: silent for 5 s\n"
            rf"process {index} \(\S+, pid \d+\) ends with it; start all processes again",
            log,
        ), log
        assert "raised" not in log


@pytest.mark.parametrize(("count", "event"), [(2, "fails"), (4, "fails"), (4, "first_fails")])
def test_a_failure_ends_the_others_with_its_text_at_once(count, event, run):
    statuses, logs, took_s = run(count, event)
    victim = 0 if event == "first_fails" else count - 1
    assert statuses.pop(victim) == 3 and statuses == [1] * (count - 1)
    assert took_s < 20
    assert "raised: no space left on device" in logs.pop(victim)
    for log in logs:
        assert re.search(
            rf"switchx: process {victim} \(\S+, pid \d+\) failed: no space left on device\n",
            log,
        ), log


def test_the_loss_of_process_0_is_told_by_jax(run):
    """Where this process does not notice it first, by its own collective."""
    statuses, logs, took_s = run(2, "first_killed")
    assert statuses[0] == -signal.SIGKILL and statuses[1] in (1, -signal.SIGABRT)
    assert took_s < SILENCE_S + 20
    assert re.search(r"JAX's leader task is process 0 \(\S+, pid \d+\)", logs[1])
    assert "process 0 (" in logs[1] and ("is lost" in logs[1] or "leader task was" in logs[1])


def test_processes_that_compile_a_minute_apart_do_not_fail(run):
    statuses, logs, _ = run(2, "late")
    assert statuses == [0, 0], logs


def test_an_orderly_end_waits_for_all(run):
    statuses, logs, _ = run(4, "finish")
    assert statuses == [0] * 4, logs
    assert all(log.rstrip().endswith("finished") for log in logs), logs
