# SPDX-License-Identifier: Apache-2.0
"""The server's end and its beginnings; as a process of its own: tests/cli/test_serve.py."""

import contextlib
import socket
import threading
import time

import pytest

from switchx.serving.server import Server, is_loopback, open_socket
from tests.serving import served
from tests.serving.raw_socket import exchange, request_bytes


def wait_until(condition, seconds=30):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_an_address_that_is_taken():
    with open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*--port"):
            open_socket("127.0.0.1", port)


def test_what_only_this_machine_reaches():
    hosts = ("127.0.0.1", "127.3.3.3", "::1", "localhost", "0.0.0.0", "::", "example.org")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 3


def test_who_holds_all_connections_holds_them_not_for_long(service, address):
    request = request_bytes(b'{"inputs": "gate"}', "Connection: close")
    with contextlib.ExitStack() as stack:
        for _ in range(service.limits.max_connections):
            stack.enter_context(socket.create_connection(address))
        assert exchange(address, request).startswith(b"HTTP/1.1 503")
        # They are still open on this side; the server has had enough of them.
        wait_until(lambda: exchange(address, request).startswith(b"HTTP/1.1 200"))


def test_draining_answers_the_old_and_refuses_the_new(service, monkeypatch):
    monkeypatch.setattr(service._room, "_batch_wait_s", 0.7)
    monkeypatch.setattr(service, "close", lambda: None)  # others need its worker
    monkeypatch.setattr(service, "is_draining", False)
    with open_socket("127.0.0.1", 0) as listener:
        address, ends, answers = listener.getsockname(), [], []
        server = Server(service)
        serving = threading.Thread(
            target=lambda: ends.append(server.run_until_stopped(listener))
        )
        asking = threading.Thread(
            target=lambda: answers.append(served.post(address, {"inputs": "gate"}))
        )
        serving.start()
        asking.start()
        wait_until(lambda: service.num_open == 1)
        server.handle_exit(15, None)
        status, body = served.post(address, {"inputs": "of"})
        assert status == 503 and "is stopping" in body["error"]["message"]
        asking.join(30)
        serving.join(30)
    ((status, body),) = answers
    assert status == 200 and served.is_said(body["results"][0], "gate")
    assert ends == [True]
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=5)


def test_a_second_signal_does_not_wait(service, monkeypatch):
    monkeypatch.setattr(service._room, "_batch_wait_s", 1.5)
    monkeypatch.setattr(service, "close", lambda: None)
    monkeypatch.setattr(service, "is_draining", False)
    with open_socket("127.0.0.1", 0) as listener:
        address, ends = listener.getsockname(), []
        server = Server(service)
        serving = threading.Thread(
            target=lambda: ends.append(server.run_until_stopped(listener))
        )
        serving.start()
        with socket.create_connection(address) as client:
            client.sendall(request_bytes(b'{"inputs": "gate"}'))
            wait_until(lambda: service.num_open == 1)
            server.handle_exit(15, None)
            server.handle_exit(15, None)
            serving.join(30)
    assert ends == [False]
    wait_until(lambda: service.num_open == 0)
