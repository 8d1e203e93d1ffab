# SPDX-License-Identifier: Apache-2.0
"""Signals end training after a step that all processes agree on."""

import os
import signal
import threading

import jax
import pytest

from switchx.partitioning.mesh import MeshSpec
from switchx.training.stopping import StopAgreement, stop_signals


@pytest.fixture(autouse=True)
def default_handlers():
    """Python's own: what a shell starts in the background ignores SIGINT instead."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number):
    """Sends this process a signal; Python has handled it when this returns."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event_and_interrupts_nothing(number):
    with stop_signals() as stop:
        assert not stop.is_set()
        send(number)
        assert stop.is_set()


def test_a_signal_is_answered_once(caplog):
    caplog.set_level("INFO", logger="switchx")
    with stop_signals() as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # it still waits for the state to be saved
        assert stop.is_set()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join(timeout=10)
    assert caplog.messages == [
        "SIGTERM: stopping after this step; Ctrl-C, once more, waits for a save alone"
    ]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_ctrl_c_interrupts_at_once(first):
    with stop_signals() as stop, pytest.raises(KeyboardInterrupt):
        send(first)
        assert stop.is_set()
        send(signal.SIGINT)


def test_the_handlers_of_before_are_put_back_even_after_an_error():
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(ZeroDivisionError), stop_signals():
        assert [signal.getsignal(number) for number in numbers] != before
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in numbers] == before


def test_in_another_thread_there_is_an_event_and_no_handler():
    before, events = signal.getsignal(signal.SIGTERM), []

    def work():
        with stop_signals() as stop:
            events.append((stop.is_set(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert events == [(False, before)]


def test_a_process_alone_stops_at_once():
    stop = threading.Event()
    is_stopping = StopAgreement(stop, MeshSpec(node=2, expert=2).build())
    assert not is_stopping()
    stop.set()
    assert is_stopping()


def test_several_stop_one_step_after_they_agreed(monkeypatch):
    """All devices vote, here those of one process; the answer is of the step before."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    stop = threading.Event()
    is_stopping = StopAgreement(stop, MeshSpec(node=2, expert=2).build())
    assert [is_stopping(), is_stopping()] == [False, False]
    stop.set()
    assert [is_stopping(), is_stopping(), is_stopping()] == [False, True, True]
