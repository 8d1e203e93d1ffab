# SPDX-License-Identifier: Apache-2.0
"""Bodies arrive in pieces, too slowly, without end, or not at all."""

import asyncio
import dataclasses

import pytest
from starlette.requests import ClientDisconnect, Request

from switchx.serving.requests import Refusal, read_body, until_gone
from tests.serving.served import LIMITS

JSON = ("content-type", "application/json; charset=utf-8")


def request_of(parts, *headers, pause_s=0.0):
    """A request whose body is `parts`; then the client leaves."""
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]

    async def receive():
        await asyncio.sleep(pause_s)
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    raw = [(name.encode(), value.encode()) for name, value in headers or (JSON,)]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def refused(request, **changes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        asyncio.run(read_body(request, dataclasses.replace(LIMITS, **changes)))
    return caught.value


def test_pieces_are_put_together():
    request = request_of([b"ab", b"", b"c"])
    assert asyncio.run(read_body(request, LIMITS)) == b"abc"
    asyncio.run(until_gone(request))


@pytest.mark.parametrize("parts", [[b"x" * 4097], [b"x" * 2048] * 3])
def test_too_big(parts):
    assert refused(request_of(parts)).status == 413
    assert refused(request_of(parts, JSON, ("content-length", "9" * 30))).status == 413


def test_too_slow():
    error = refused(request_of([b"a", b"b"], pause_s=0.1), body_timeout_s=0.05)
    assert (error.status, error.message) == (
        408, "the body did not arrive within 0.05 s; send it at once",
    )  # fmt: skip


def test_a_client_that_leaves():
    with pytest.raises(ClientDisconnect):
        asyncio.run(read_body(request_of([]), LIMITS))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("content-type", "text/plain")], 415),
        ([("x", "y")], 415),
        ([JSON, ("content-encoding", "br")], 415),
        ([JSON, ("content-length", "-3")], 400),
    ],
)
def test_wrong_heads(headers, status):
    assert refused(request_of([b"{}"], *headers)).status == status
