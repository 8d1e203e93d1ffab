# SPDX-License-Identifier: Apache-2.0
"""Which processes a rendezvous joins, and what they are told where something does not agree."""

import concurrent.futures
import re
import socket
import threading
import time

import pytest

from switchx.hosts.processes import Processes
from switchx.hosts.rendezvous import FAILURE, rendezvous
from tests.hosts.peers import close, free_port, rendezvous_of

SAME = {"batch_size": 8, "mesh.data": None}


def test_all_know_all():
    all_peers = rendezvous_of([SAME] * 3)
    names = all_peers[0].names
    assert [peers.names for peers in all_peers] == [names] * 3
    assert re.fullmatch(r"process 2 \(.+, pid \d+\)", names[2])
    assert [sorted(peers.channels) for peers in all_peers] == [[1, 2], [0], [0]]
    close(all_peers)


def test_process_0_may_come_last():
    address, got = f"localhost:{free_port()}", []
    thread = threading.Thread(
        target=lambda: got.append(rendezvous(Processes(address, 2, 1), SAME, 10.0))
    )
    thread.start()
    time.sleep(0.3)
    got.append(rendezvous(Processes(address, 2, 0), SAME, 10.0))
    thread.join()
    assert got[0].names == got[1].names
    close(got)


def test_what_differs_is_named_in_all_of_them():
    errors = rendezvous_of([SAME, SAME, {"batch_size": 16, "mesh.data": None, "seed": 1}])
    assert len(set(errors)) == 1
    assert re.fullmatch(
        r"process 2 \(.+\) differs from process 0 \(batch_size: 16, not 8; seed: 1, not None\);"
        r" start all processes with the same command and the same code",
        errors[0],
    )


def test_much_that_differs_is_cut():
    errors = rendezvous_of([SAME, {str(n): n for n in range(20)}])
    assert errors[0].count("not None") == 8 and ", and 13 more); start" in errors[0]


def test_a_doubled_index_is_told_to_both():
    errors = rendezvous_of([SAME] * 3, indices=[0, 1, 1])
    assert len(set(errors)) == 1
    assert re.fullmatch(
        r"process_id=1 is given to 2 processes: process 1 \(.+\), process 1 \(.+\); give each "
        r"of 0 to 2 to one",
        errors[0],
    )


def test_a_second_process_0_cannot_listen():
    errors = sorted(rendezvous_of([SAME] * 2, indices=[0, 0], seconds=1.0))
    assert "process 0 cannot listen at coordinator='localhost:" in errors[1]
    assert "start one process with process_id=0" in errors[1]
    assert errors[0].startswith("of num_processes=2, process 1 did not come; start all of them")


def test_the_port_of_jax_is_taken():
    port = free_port()
    said = f"process 0 cannot listen at .*{port + 1}.* the one after it has to be"
    with socket.create_server(("", port + 1)), pytest.raises(ValueError, match=said):
        rendezvous(Processes(f"localhost:{port}", 2, 0), SAME, 1.0)


def test_a_port_of_jax_that_is_not_let_through_is_told_to_all(monkeypatch):
    asked, connect = [], socket.create_connection

    def firewall(address, *timeout, **more):
        asked.append(address[1])
        if address[1] != asked[0]:  # the coordinator's port, which is open
            raise TimeoutError("timed out")
        return connect(address, *timeout, **more)

    monkeypatch.setattr(socket, "create_connection", firewall)
    errors = rendezvous_of([SAME] * 2)
    assert len(set(errors)) == 1
    assert re.fullmatch(
        r"process 1 \(.+\) cannot start: it reaches coordinator='localhost:(\d+)', but not "
        r"port (\d+) there, which jax.distributed takes \(timed out\); let both ports "
        r"through the firewall, or give another coordinator port",
        errors[0],
    )


def test_jax_may_listen_as_soon_as_all_have_met():
    address, listened = f"localhost:{free_port()}", []

    def one(index):
        processes = Processes(address, 2, index)
        peers = rendezvous(processes, SAME, 10.0)
        if index == 0:
            with socket.create_server(("", processes.jax_port)):
                listened.append(True)
        return peers

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        close(pool.map(one, range(2)))
    assert listened == [True]


def test_one_that_cannot_start_says_why_to_all():
    errors = rendezvous_of([SAME, {FAILURE: "there is no corpus"}])
    assert len(set(errors)) == 1
    assert re.fullmatch(r"process 1 \(.+\) cannot start: there is no corpus", errors[0])


def test_missing_processes_are_named(caplog, monkeypatch):
    monkeypatch.setattr("switchx.hosts.rendezvous.WARN_AFTER_S", 0.2)
    errors = rendezvous_of([SAME, SAME], count=4, seconds=1.0)
    assert set(errors) == {
        "of num_processes=4, process 2, 3 did not come; start all of them, or give the number "
        "that there is"
    }
    assert "waiting for process 2, 3" in caplog.text


def test_another_number_of_processes():
    address, errors = f"localhost:{free_port()}", []

    def one(count, index):
        try:
            rendezvous(Processes(address, count, index), SAME, 1.0)
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=one, args=each) for each in ((2, 0), (3, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        sum("has num_processes=3, process 0 has 2; give all of them" in e for e in errors) == 2
    )


def test_no_process_at_the_address():
    start = time.monotonic()
    with pytest.raises(ValueError, match="does not answer within 1 s .*start process 0 there"):
        rendezvous(Processes(f"localhost:{free_port()}", 2, 1), SAME, 1.0)
    assert time.monotonic() - start < 15
    with pytest.raises(ValueError, match="coordinator='no.such.invalid:80' does not answer"):
        rendezvous(Processes("no.such.invalid:80", 2, 1), SAME, 0.1)


def test_process_0_is_where_its_address_is():
    # 192.0.2.1 is an address of documentation, no machine's.
    with pytest.raises(ValueError, match=r"'192.0.2.1:80' is not an address of this machine"):
        rendezvous(Processes("192.0.2.1:80", 2, 0), SAME, 1.0)
    with pytest.raises(ValueError, match="cannot listen at coordinator='no.such.invalid:80'"):
        rendezvous(Processes("no.such.invalid:80", 2, 0), SAME, 1.0)


def test_connections_of_others_are_ignored():
    port, got = free_port(), []
    thread = threading.Thread(
        target=lambda: got.append(rendezvous(Processes(f"localhost:{port}", 2, 0), SAME, 10.0))
    )
    thread.start()
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\n"):
        while True:
            try:
                with socket.create_connection(("localhost", port)) as other:
                    other.sendall(words)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    got.append(rendezvous(Processes(f"localhost:{port}", 2, 1), SAME, 10.0))
    thread.join()
    assert got[0].names == got[1].names
    close(got)
