# SPDX-License-Identifier: Apache-2.0
"""Which processes are told of the end of one, how soon, and that an orderly end is none."""

import queue
import threading
import time

import pytest

from switchx.hosts.heartbeat import Heartbeat
from tests.hosts.peers import close, rendezvous_of


@pytest.fixture
def four():
    """The peers of four processes, the queue of each for what ends it, and their start."""
    all_peers = rendezvous_of([{}] * 4)
    ends = [queue.Queue() for _ in all_peers]

    def start(*indices, seconds=30.0):
        return [Heartbeat(all_peers[i], seconds, ends[i].put) for i in indices]

    yield all_peers, ends, start
    close(all_peers)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_connection_that_ends_is_a_process_that_is_lost(four, lost):
    all_peers, ends, start = four
    others = [i for i in range(4) if i != lost]
    start(*others)
    close([all_peers[lost]])  # what the system does to a process that is killed
    for i in others:
        text = ends[i].get(timeout=5)
        assert text.startswith(f"{all_peers[0].names[lost]} is lost: its connection ended\n")
        assert f"{all_peers[0].names[i]} ends with it; start all processes again" in text
        assert ends[i].empty()


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_silent_process_is_lost_after_a_while(four, frozen):
    all_peers, ends, start = four
    others = [i for i in range(4) if i != frozen]
    start(*others, seconds=1.0)  # the frozen one has a connection and sends no heartbeat
    began = time.monotonic()
    texts = [ends[i].get(timeout=10) for i in others]
    assert all(f"{all_peers[0].names[frozen]} is lost: silent for" in each for each in texts)
    assert 0.9 < time.monotonic() - began < 5


def test_heartbeats_keep_it_alive(four):
    _, ends, start = four
    start(0, 1, 2, 3, seconds=0.8)
    time.sleep(2.5)
    assert all(each.empty() for each in ends)


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_is_told_with_its_reason(four, failing):
    all_peers, ends, start = four
    heartbeats = start(0, 1, 2, 3)
    heartbeats[failing].fail("no space left on device")
    for i in range(4):
        if i != failing:
            text = ends[i].get(timeout=5)
            assert f"{all_peers[0].names[failing]} failed: no space left on device\n" in text
    assert ends[failing].empty()


def test_an_orderly_end_waits_for_all_and_is_no_loss(four):
    all_peers, ends, start = four
    heartbeats = start(0, 1, 2, 3)
    threads = [threading.Thread(target=each.finish) for each in heartbeats[:3]]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in threads)
    heartbeats[3].finish()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    close(all_peers)
    time.sleep(0.2)
    assert all(each.empty() for each in ends)


def test_waiting_for_a_cause_is_short_where_no_other_process_is_lost(four):
    _, ends, start = four
    heartbeats = start(0, 1, 2, 3)
    began = time.monotonic()
    heartbeats[1].wait_for_end(0.3)
    assert time.monotonic() - began < 3
    assert all(each.empty() for each in ends)
