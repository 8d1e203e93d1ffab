# SPDX-License-Identifier: Apache-2.0
"""Clients that are slow or speak no HTTP, over real sockets, are told so and are gone."""

import socket
import time

from tests.serving import served
from tests.serving.raw_socket import exchange, request_bytes, status_and_json

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


def test_a_head_that_does_not_end_in_time(address):
    start_s = time.monotonic()
    for begin in (b"", b"POST /v1/gen", GOOD[:60]):
        status, body = status_and_json(exchange(address, begin))
        assert status == 408 and "head did not arrive" in body["error"]["message"]
    assert 3 * 0.9 < time.monotonic() - start_s < 30


def test_a_second_head_on_a_connection_has_a_time_too(address):
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(request_bytes(b'{"inputs": "gate"}'))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"POST /v1/gen")
        received = b""
        while part := client.recv(65536):
            received += part
    assert b"HTTP/1.1 408" in received and b"head did not arrive" in received


def test_a_body_that_does_not_end_in_time(address):
    data = request_bytes(b'{"inputs": ', length=40)
    status, body = status_and_json(exchange(address, data))
    assert status == 408 and "the body did not arrive within 1 s" in body["error"]["message"]


def test_what_is_no_http(address):
    tls, long, nul = b"\x16\x03\x01\x02\n\r\n\r\n", b"a" * 70_000, b"\x00\r\n\r\n"
    for data in (tls, b"GET\r\n\r\n", long, GOOD[:40] + nul):
        status, body = status_and_json(exchange(address, data))
        assert status == 400 and "no HTTP request" in body["error"]["message"]


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
