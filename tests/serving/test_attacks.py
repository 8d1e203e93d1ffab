# SPDX-License-Identifier: Apache-2.0
"""Clients that hold connections, beside good ones: each is let go, and health is answered."""

import concurrent.futures
import contextlib
import socket
import struct
import threading
import time

import pytest

from switchx.serving.http_connection import BoundedProtocol
from tests.serving import served
from tests.serving.served import exchange, request_bytes, status_and_json

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
# Heads of bodies that do not come, for routes that read none and one that does.
UNREAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
UNKNOWN = UNREAD.replace(b"GET /healthz", b"POST /x")
SLOW = request_bytes(b'{"inputs": ', length=400)
WAIT_S = 20.0


@pytest.fixture
def address(service, limited):
    """Of a server that few clients can fill, and that waits a second at most."""
    limited(max_connections=8, body_timeout_s=1.0, send_timeout_s=1.0)
    with served.listening(service) as address:
        yield address


def connected(address, data: bytes = b"", *, buffer_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.settimeout(WAIT_S)
    client.connect(tuple(address))
    client.sendall(data)
    return client


def received(client: socket.socket, seconds: float) -> tuple[bytes, bool]:
    """What comes within a time, and whether the server ended the connection in it."""
    data, end_s = b"", time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        client.settimeout(left_s)
        try:
            part = client.recv(1 << 20)
        except TimeoutError:
            break
        except ConnectionError:
            return data, True
        if not part:
            return data, True
        data += part
    return data, False


def health(address) -> int:
    return status_and_json(exchange(address, HEALTH))[0]


@pytest.mark.parametrize("head", [UNREAD, UNKNOWN])
def test_a_connection_whose_body_is_unread_closes_with_its_response(address, head):
    """A byte of the body after the response kept it open for ever."""
    with connected(address, head) as client:
        data, is_over = received(client, 0.5)
        with contextlib.suppress(ConnectionError):
            client.sendall(b"x")
        more, is_over_later = received(client, 4.0)
    assert data.startswith(b"HTTP/1.1 ") and b"connection: close" in data.lower()
    assert is_over or is_over_later


def test_a_response_is_read_though_the_body_is_still_sent(address):
    """No reset overtakes it: what is still sent is received and dropped."""
    with connected(address, UNKNOWN.replace(b"1000", b"8000000")) as client:
        client.sendall(b"x" * 8_000_000)
        status, body = status_and_json(received(client, WAIT_S)[0])
    assert status == 404 and "use POST /v1/generate" in body["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"GET /", SLOW, UNREAD, UNKNOWN])
def test_health_is_answered_at_the_limit_of_connections(service, address, data):
    number = service.limits.max_connections
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(connected(address, data))
        assert health(address) == 200
        time.sleep(0.1)
        assert health(address) == 200


def test_others_are_refused_at_the_limit_and_taken_after_it(service, address):
    request = request_bytes(b'{"inputs": "gate"}', "Connection: close")
    with contextlib.ExitStack() as stack:
        for _ in range(service.limits.max_connections):
            stack.enter_context(connected(address, SLOW))
        time.sleep(0.2)
        status, body = status_and_json(exchange(address, request))
        assert status == 503 and "connections" in body["error"]["message"]
    assert status_and_json(exchange(address, request))[0] == 200


def test_connections_that_wait_make_place_for_new_ones(service, address):
    """The one that waits longest leaves: idle clients keep no good one out."""
    request = request_bytes(b'{"inputs": "gate"}', "Connection: close")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(address)) for _ in range(32)]
        assert status_and_json(exchange(address, request))[0] == 200
        assert received(idle[0], 0.1) == (b"", True)
        # Several that come at once: a place for each of them.
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: exchange(address, request), range(24)))
        assert {status_and_json(answer)[0] for answer in answers} == {200}


@pytest.mark.parametrize(
    "request_of",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        request_bytes(b'{"inputs": ["gate"], "stream": true}'),
    ],
)
def test_who_sends_many_requests_and_reads_nothing_is_cut_off(
    service, limited, monkeypatch, request_of
):
    """Without a deadline for what is sent, it kept the connection as long as it liked."""
    limited(send_timeout_s=0.5)
    monkeypatch.setattr("switchx.serving.server.SEND_BUFFER_BYTES", 4096)
    lost, number = threading.Event(), 1200
    connection_lost = BoundedProtocol.connection_lost

    def lose(protocol, error):
        connection_lost(protocol, error)
        lost.set()

    monkeypatch.setattr(BoundedProtocol, "connection_lost", lose)
    with served.listening(service) as address:
        with connected(address, buffer_bytes=4096) as client:
            sending = threading.Thread(target=send_all, args=(client, request_of * number))
            sending.start()
            assert lost.wait(60)
            data, is_over = received(client, WAIT_S)
            sending.join(WAIT_S)
        assert is_over and data.count(b"HTTP/1.1 200") < number
        assert served.post(address, {"inputs": "gate"})[0] == 200
    assert service.num_open == 0


def send_all(client: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        client.sendall(data)


def test_good_clients_get_their_answers_beside_attackers(service, limited):
    """Slow heads and bodies, unread bodies, pipelines that are not read, and resets."""
    limited(max_connections=32, body_timeout_s=0.5, send_timeout_s=0.5)
    page = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    attacks = (b"", b"GET /", SLOW, UNREAD, UNKNOWN, page * 200)
    with (
        served.listening(service) as address,
        served.good_clients(address, 2) as counts,
        contextlib.ExitStack() as stack,
    ):
        for number in range(48):
            client = stack.enter_context(
                connected(address, attacks[number % len(attacks)], buffer_bytes=4096)
            )
            if number % 3 == 0:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            assert health(address) == 200
        assert served.post(address, {"inputs": "gate"})[0] == 200
    assert sum(counts) >= 2 and service.num_open == 0


CHUNKED = (
    b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n12\r\n" + b'{"inputs": "gate"}' + b"\r\n"
)


@pytest.mark.parametrize(
    "end",
    [b"0\r\n\n", b"0\r\nX: 1\n\r\n", b"0\r\nX: 1\r\n\n", b"0\r\nX: 1\n\n", b"0\n\r\n"],
)
def test_no_request_hides_behind_a_bare_lf_of_a_trailer(address, end):
    answer = exchange(address, CHUNKED + end + HEALTH)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1, answer


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\nX: 1\r\n\r\n"])
def test_a_trailer_with_crlf_is_read_and_the_next_request_is_one(address, end):
    single = [end[i : i + 1] for i in range(len(end))]
    for parts in ([CHUNKED + end + HEALTH], [CHUNKED, *single]):
        with connected(address) as client:
            for part in parts:
                client.sendall(part)
                time.sleep(0.01)
            if len(parts) > 1:
                client.sendall(HEALTH)
            answer, is_over = received(client, WAIT_S)
        assert is_over and answer.count(b"HTTP/1.1 200 ") == 2, answer
