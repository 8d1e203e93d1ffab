# SPDX-License-Identifier: Apache-2.0
"""Who learns of whose end, how soon, and that an orderly end is none."""

import queue
import threading
import time

import pytest

from switchx.hosts.lifeline import Lifeline
from tests.hosts.companies import call, close


@pytest.fixture
def company():
    """Four lifelines, and the queue of each to which its end is told."""
    companies = call([{}] * 4)
    ends = [queue.Queue() for _ in companies]

    def start(*indices, seconds=30.0):
        return [Lifeline(companies[i], seconds, ends[i].put) for i in indices]

    yield companies, ends, start
    close(companies)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_connection_that_ends_is_a_process_that_is_lost(company, lost):
    companies, ends, start = company
    others = [i for i in range(4) if i != lost]
    start(*others)
    close([companies[lost]])  # what the system does to a process that is killed
    for i in others:
        text = ends[i].get(timeout=5)
        assert text.startswith(f"{companies[0].names[lost]} is lost: its connection ended\n")
        assert f"{companies[0].names[i]} ends with it; start all processes again" in text
        assert ends[i].empty()


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_silent_process_is_lost_after_a_while(company, frozen):
    companies, ends, start = company
    others = [i for i in range(4) if i != frozen]
    start(*others, seconds=1.0)  # the frozen one has a connection and does not beat
    began = time.monotonic()
    texts = [ends[i].get(timeout=10) for i in others]
    assert all(f"{companies[0].names[frozen]} is lost: silent for" in each for each in texts)
    assert 0.9 < time.monotonic() - began < 5


def test_beats_keep_it_alive(company):
    _, ends, start = company
    start(0, 1, 2, 3, seconds=0.8)
    time.sleep(2.5)
    assert all(each.empty() for each in ends)


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_is_told_with_its_reason(company, failing):
    companies, ends, start = company
    lines = start(0, 1, 2, 3)
    lines[failing].fail("no space left on device")
    for i in range(4):
        if i != failing:
            text = ends[i].get(timeout=5)
            assert f"{companies[0].names[failing]} failed: no space left on device\n" in text
    assert ends[failing].empty()


def test_an_orderly_end_waits_for_all_and_is_no_loss(company):
    companies, ends, start = company
    lines = start(0, 1, 2, 3)
    threads = [threading.Thread(target=line.finish) for line in lines[:3]]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in threads)
    lines[3].finish()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    close(companies)
    time.sleep(0.2)
    assert all(each.empty() for each in ends)


def test_waiting_for_blame_is_short_where_nobody_else_is_lost(company):
    _, ends, start = company
    lines = start(0, 1, 2, 3)
    began = time.monotonic()
    lines[1].wait_for_end(0.3)
    assert time.monotonic() - began < 3
    assert all(each.empty() for each in ends)
