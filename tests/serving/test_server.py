# SPDX-License-Identifier: Apache-2.0
"""Sockets: heads that are slow or no HTTP, connections, the end in two steps."""

import copy
import socket
import threading
import time

import pytest

from switchx.serving.app import is_loopback
from switchx.serving.models import Models
from switchx.serving.server import Server, open_socket
from tests.serving import served
from tests.serving.served import exchange, request_bytes, status_and_json, wait_until

GOOD = request_bytes(b'{"inputs": "gate"}', "Connection: close")


def test_a_request_in_single_bytes_is_a_request(address):
    with socket.create_connection(address, timeout=60) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(len(GOOD)):
            client.sendall(GOOD[i : i + 1])
        received = b""
        while part := client.recv(65536):
            received += part
    status, body = status_and_json(received)
    assert status == 200 and served.is_said(body["results"][0], "gate")


def test_a_head_that_does_not_end_in_time_be_it_the_second(address):
    start_s = time.monotonic()
    for begin in (b"", b"POST /v1/gen", GOOD[:60]):
        status, body = status_and_json(exchange(address, begin))
        assert status == 408 and "head did not arrive" in body["error"]["message"]
    assert 3 * 0.9 < time.monotonic() - start_s < 30
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(request_bytes(b'{"inputs": "gate"}'))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"POST /v1/gen")
        received = b""
        while part := client.recv(65536):
            received += part
    assert b"HTTP/1.1 408" in received and b"head did not arrive" in received


def test_responses_that_no_route_gives_are_counted(service, address):
    counts = service.metrics.server.responses.labels("400")._value
    before = counts.get()
    assert exchange(address, b"GET\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert counts.get() == before + 1


def test_what_is_no_http_or_only_has_bare_line_feeds_in_its_body(address):
    tls, long, nul = b"\x16\x03\x01\x02\n\r\n\r\n", b"a" * 70_000, b"\x00\r\n\r\n"
    for data in (tls, b"GET\r\n\r\n", long, GOOD[:40] + nul):
        status, body = status_and_json(exchange(address, data))
        assert status == 400 and "no HTTP request" in body["error"]["message"]
    data = request_bytes(b'{\n"inputs":\n"gate"}\n\n', "Connection: close")
    assert status_and_json(exchange(address, data * 2))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        GOOD.replace(b"\r\n", b"\n"),
        GOOD.replace(b"Host: x\r\n", b"Host: x\n"),
        GOOD.replace(b"close\r\n\r\n", b"close\n\r\n"),
        request_bytes(b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        b"POST /v1/generate HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_heads_that_can_be_read_in_two_ways(address, data):
    """h11 reads them; another program before this one may read another request in them."""
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    status, body = status_and_json(exchange(address, data + smuggled))
    assert status == 400 and "can be read in two ways" in body["error"]["message"]


def test_a_refused_head_is_told_so_though_more_is_sent(address):
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(GOOD.replace(b"\r\n", b"\n"))
        time.sleep(0.2)
        client.sendall(b"x" * 1_000_000)
        received = b""
        while part := client.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 400")


def test_only_names_of_this_machine_are_answered(service):
    """A page whose name was made to lead here (DNS rebinding) has another Host."""
    request = b"GET /metrics HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
    with served.listening(service, None, ["gpu.example"]) as address:
        for host, status in (
            (b"localhost", 200), (b"127.0.0.1:8000", 200), (b"[::1]:80", 200),
            (b"gpu.example:1", 200), (b"evil.example", 403), (b"", 403), (b"[", 403),
            (b"localhost.evil.example", 403), (b"10.0.0.1", 403),
        ):  # fmt: skip
            received = exchange(address, request % host)
            assert received.startswith(b"HTTP/1.1 %d" % status), host
        assert b"--allowed_hosts" in received
        health = request.replace(b"metrics", b"healthz") % b"10.0.0.1"
        assert exchange(address, health).startswith(b"HTTP/1.1 200")


def test_requests_in_a_row_are_answered_in_order(address):
    texts = served.TEXTS[:3]
    bodies = [f'{{"inputs": "{text}"}}'.encode() for text in texts]
    data = b"".join(
        request_bytes(body, *(["Connection: close"] if body == bodies[-1] else []))
        for body in bodies
    )
    parts = exchange(address, data, timeout_s=60).split(b"HTTP/1.1 200")[1:]
    assert len(parts) == 3
    for part, text in zip(parts, texts, strict=True):
        assert served.is_said(status_and_json(b"HTTP/1.1 200" + part)[1]["results"][0], text)


def test_addresses_that_are_taken_or_of_this_machine():
    with open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*--port"):
            open_socket("127.0.0.1", port)
    for host in ("192.0.2.1", "not a host"):
        with pytest.raises(OSError, match=f"cannot listen on {host}:0: .*use another --host"):
            open_socket(host, 0)
    hosts = ("127.0.0.1", "127.3.3.3", "::1", "localhost", "0.0.0.0", "::", "example.org")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 3


def begun(service, listener, ask):
    """A server that serves, a thread that asks it, what waits for both, and what they end
    with."""
    server, ends, answers = Server(Models([service])), [], []
    serving = threading.Thread(target=lambda: ends.append(server.run_until_stopped(listener)))
    asking = threading.Thread(target=lambda: answers.append(ask(listener.getsockname())))
    serving.start()
    asking.start()

    def join():
        asking.join(30)
        serving.join(30)

    return server, join, ends, answers


def gate(address):
    return served.post(address, {"inputs": "gate"})


def test_draining_answers_the_old_and_refuses_the_new(service, limited, monkeypatch):
    limited(batch_wait_ms=700)
    monkeypatch.setattr(service, "close", lambda: None)  # others need its worker
    with open_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        server, join, ends, answers = begun(service, listener, gate)
        wait_until(lambda: service.num_open == 1)
        server.handle_exit(15, None)
        status, body = served.post(address, {"inputs": "of"})
        assert status == 503 and "is stopping" in body["error"]["message"]
        join()
    ((status, body),) = answers
    assert status == 200 and served.is_said(body["results"][0], "gate")
    assert ends == [True]
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=5)


def test_a_drain_refuses_what_is_on_its_way(service, monkeypatch):
    """Where nothing is open: a request that came with the signal was reset."""
    monkeypatch.setattr(service, "close", lambda: None)
    monkeypatch.setattr("switchx.serving.server.LEAST_DRAIN_S", 3.0)
    with open_socket("127.0.0.1", 0) as listener:
        server, join, ends, answers = begun(service, listener, gate)
        wait_until(lambda: answers and not service.num_open)
        server.handle_exit(15, None)
        time.sleep(0.5)  # some ticks
        status, body = gate(listener.getsockname())
        join()
    assert status == 503 and "is stopping" in body["error"]["message"] and ends == [True]


def test_a_drain_that_is_too_long_refuses_what_is_left(service, limited, monkeypatch):
    limited(batch_wait_ms=20_000, drain_timeout_s=0.5)
    monkeypatch.setattr(service, "close", lambda: None)
    with open_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        server, join, ends, answers = begun(service, listener, gate)
        wait_until(lambda: service.num_open == 1)
        start_s = time.monotonic()
        server.handle_exit(15, None)
        request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        received = exchange(address, request)  # the connection closes with the response
        assert b'"ready": false, "draining": true' in received
        join()
        # The half second, one for what is sent, and what a busy machine takes.
        assert time.monotonic() - start_s < 10
    ((status, body),) = answers
    assert status == 503 and "stopped before the answer" in body["error"]["message"]
    assert ends == [False]
    wait_until(lambda: service.num_open == 0 and len(service._queue) == 0)


def test_a_server_whose_worker_dies_refuses_what_is_open(service, limited, monkeypatch):
    limited(batch_wait_ms=20_000)
    service = copy.copy(service)  # other tests' server answers on
    service.worker = copy.copy(service.worker)
    monkeypatch.setattr(service, "close", lambda: None)
    with open_socket("127.0.0.1", 0) as listener:
        server, join, ends, received = begun(
            service, listener, lambda address: exchange(address, GOOD)
        )
        wait_until(lambda: len(service._queue) == 1)
        monkeypatch.setattr(service.worker, "error", MemoryError("say"))
        join()
    status, body = status_and_json(received[0])
    assert status == 503 and "stopped before the answer" in body["error"]["message"]
    assert b"retry-after: 10" in received[0].lower()
    assert ends == [False]


def test_a_second_signal_does_not_wait(service, limited, monkeypatch):
    limited(batch_wait_ms=1500)
    monkeypatch.setattr(service, "close", lambda: None)
    with open_socket("127.0.0.1", 0) as listener:
        address, ends = listener.getsockname(), []
        server = Server(Models([service]))
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
