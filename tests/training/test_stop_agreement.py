# SPDX-License-Identifier: Apache-2.0
"""When a signal is heeded; of real processes in tests/integration/test_several_hosts.py."""

import threading

import jax

from switchx.partitioning.mesh import MeshSpec
from switchx.training.stopping import StopAgreement


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
