# SPDX-License-Identifier: Apache-2.0
"""The body of a request, from a client that may be slow, endless or gone."""

import asyncio
import time

from starlette.requests import ClientDisconnect, Request

from switchx.serving.limits import Limits
from switchx.serving.refusal import Refusal

# What is read of a body that is too big, so that its sender gets to read why.
DISCARDED_BYTES, DISCARDING_S = 1 << 26, 2.0


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole of it.

    Raises:
        Refusal: 408, it took too long; 413, it is too big; 415, it is not said to be JSON;
            400, its length is no number.
        ClientDisconnect: the client is gone.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding"):
        raise Refusal(
            415,
            f"Content-Type is {kind or 'missing'!r:.60}; send plain JSON, with "
            "Content-Type: application/json",
        )
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise Refusal(400, f"Content-Length is {length!r:.40}; expected a number")
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            if int(length[:20]) > limits.max_body_bytes:
                await _refuse_size(request, limits)
            async for part in request.stream():
                size += len(part)
                parts.append(part)
                if size > limits.max_body_bytes:
                    await _refuse_size(request, limits)
    except TimeoutError:
        raise Refusal(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s; send it at once"
        ) from None
    return b"".join(parts)


async def _refuse_size(request: Request, limits: Limits) -> None:
    end_s, left = time.monotonic() + DISCARDING_S, DISCARDED_BYTES
    try:
        async with asyncio.timeout(DISCARDING_S):
            while left > 0 and time.monotonic() < end_s:
                message = await request.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
                left -= len(message["body"])
    except TimeoutError:
        pass
    raise Refusal(413, f"the body is too big; send {limits.max_body_bytes} bytes at most")


async def until_gone(request: Request) -> None:
    """Returns when the client has left; to be awaited when the body is read."""
    try:
        while (await request.receive())["type"] != "http.disconnect":
            pass
    except ClientDisconnect:
        pass
