# SPDX-License-Identifier: Apache-2.0
"""The clients of `switchx bench soak`: good ones, whose answers are compared, and bad ones.

A good client makes requests with random settings, for whole answers or streams, and every
answer is compared with that of `model.generate` in another process. A bad one keeps doing
things from `BAD`: each is client behaviour that a server has to survive.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from switchx.client import Answer, Client

WORDS = ("gate", "an expert", "a slot", "of", "a token or two", "é", "🙂", "x")
MOST_NEW_TOKENS, MOST_INPUT_TOKENS, MOST_INPUTS = 16, 15, 4
# Largest difference between an answer's score and the model's own.
SCORE_TOLERANCE = 1e-3
# A good client's deadline; the server's own is longer.
DEADLINE_S = 600.0
# The server closes a connection that a bad client leaves open within this time.
CLOSE_TIMEOUT_S = 120.0
# Read timeout of a bad client that waits for an answer.
READ_TIMEOUT_S = 30.0


@dataclasses.dataclass
class Tally:
    """Counts of what happened to the clients so far.

    Attributes:
        answers: number of inputs that were answered, right or wrong.
        faults: descriptions of the first 20 wrong and lost answers, and connections that stayed
            open.
        bad: how often each kind of bad request was made.
        latencies_s: pairs of the time at which a whole answer came, by `time.monotonic`, and
            its latency in seconds.
    """

    answers: int = 0
    wrong: int = 0
    lost: int = 0
    held: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    bad: dict[str, int] = dataclasses.field(default_factory=dict)
    latencies_s: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def note(self, fault: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(fault)


def random_request(rng: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    """A request: inputs (texts or token ids) and settings, with a seed if it samples."""
    number = int(rng.integers(1, MOST_INPUTS + 1))
    if rng.random() < 0.3:
        inputs = [str(rng.choice(WORDS)) for _ in range(number)]
    else:
        sizes = rng.integers(1, MOST_INPUT_TOKENS + 1, number)
        inputs = [rng.integers(3, vocab_size, size).tolist() for size in sizes]
    settings = {
        "max_new_tokens": int(rng.integers(1, MOST_NEW_TOKENS + 1)),
        "length_penalty": float(rng.uniform(-1, 2)),
    }
    way = rng.integers(3)
    if way == 0:
        settings["beam_size"] = 2
    elif way == 1:
        settings["seed"] = int(rng.integers(1 << 31))
        settings["temperature"] = float(rng.uniform(0.1, 2))
        if rng.random() < 0.5:
            settings["top_k"] = int(rng.integers(1, 60))
        if rng.random() < 0.5:
            settings["top_p"] = float(rng.uniform(0.01, 1))
    return {"inputs": inputs, **settings}


async def good_client(
    client: Client,
    rng: np.random.Generator,
    vocab_size: int,
    expect: Callable,
    tally: Tally,
    is_over: asyncio.Event,
) -> None:
    """Sends requests until the end; while one answer is compared, the next is requested.

    Args:
        expect: awaitable function that returns the answer of `model.generate` to a request.
    """
    comparing = None
    while not is_over.is_set():
        request = random_request(rng, vocab_size)
        try:
            answers = await _answers(client, request, rng.random() < 0.5, tally)
        except Exception as error:  # whatever the error is, there is no answer
            tally.lost += len(request["inputs"])
            tally.note(f"lost: {error!r:.200}, {json.dumps(request):.200}")
            continue
        tally.answers += len(answers)
        if comparing is not None:
            await comparing
        comparing = asyncio.create_task(_compare(expect, request, answers, tally))
    if comparing is not None:
        await comparing


async def _answers(client: Client, request, is_streaming: bool, tally: Tally) -> list[Answer]:
    start_s = time.monotonic()
    if not is_streaming:
        answers = await client.generate(deadline_s=DEADLINE_S, **request)
        now_s = time.monotonic()
        tally.latencies_s.append((now_s, now_s - start_s))
        return answers
    answers, texts = {}, [""] * len(request["inputs"])
    async for event in client.stream(deadline_s=DEADLINE_S, **request):
        if isinstance(event, Answer):
            answers[event.input] = event
        else:
            texts[event.input] += event.text
    if request.get("beam_size", 1) == 1:
        for number, text in enumerate(texts):
            if text != answers[number].text:
                raise ValueError(
                    f"the pieces are {text!r}, the answer {answers[number].text!r}"
                )
    return [answers[number] for number in range(len(answers))]


async def _compare(expect, request, answers: list[Answer], tally: Tally) -> None:
    for answer, want in zip(answers, await expect(request), strict=True):
        got = answer.text if isinstance(want.output, str) else answer.tokens
        is_near = abs(answer.score - want.score) <= SCORE_TOLERANCE * max(1, abs(want.score))
        if (got, answer.is_finished, is_near) != (want.output, want.is_finished, True):
            tally.wrong += 1
            tally.note(f"wrong: {answer}, expected {want}, {json.dumps(request):.200}"[:600])


async def bad_client(
    address: tuple[str, int], rng: np.random.Generator, vocab_size: int, tally: Tally
) -> None:
    """Does one bad thing after another until it is cancelled."""
    while True:
        name = list(BAD)[rng.integers(len(BAD))]
        tally.bad[name] = tally.bad.get(name, 0) + 1
        request = random_request(rng, vocab_size) | {"stream": bool(rng.integers(2))}
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    async with _connected(address) as (reader, writer):
                        await BAD[name](reader, writer, request, rng)
        except TimeoutError:
            tally.held += 1
            tally.note(f"a connection stayed open for {CLOSE_TIMEOUT_S:g} s: {name}")


@contextlib.asynccontextmanager
async def _connected(address):
    """A connection with a small receive buffer; half of the time it ends in a reset."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address)
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield reader, writer
    finally:
        if time.monotonic_ns() % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def _bytes(request: dict[str, Any], length: int | None = None) -> bytes:
    body = json.dumps(request).encode()
    head = (
        "POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def _until_closed(reader) -> None:
    while await reader.read(1 << 16):
        pass


async def _break_off(reader, writer, request, rng) -> None:
    writer.write(_bytes(request))
    await asyncio.sleep(rng.exponential(0.1))


async def _break_off_while_reading(reader, writer, request, rng) -> None:
    writer.write(_bytes(request | {"stream": True}))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READ_TIMEOUT_S):
            await reader.read(int(rng.integers(1, 600)))


async def _half_a_body(reader, writer, request, rng) -> None:
    writer.write(_bytes(request, length=10_000))
    await _until_closed(reader)


async def _slow_body(reader, writer, request, rng) -> None:
    for byte in _bytes(request):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.1)
    await _until_closed(reader)


async def _slow_reader(reader, writer, request, rng) -> None:
    writer.write(_bytes(request | {"stream": True, "max_new_tokens": MOST_NEW_TOKENS}))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READ_TIMEOUT_S):
            for _ in range(int(rng.integers(20, 200))):
                if not await reader.read(16):
                    return
                await asyncio.sleep(0.05)


async def _pipeline_without_reading(reader, writer, request, rng) -> None:
    writer.transport.pause_reading()
    for _ in range(8):
        writer.write(_bytes(request))
        await writer.drain()
    # It may be closed by a reset, which goes unnoticed where nothing is read.
    await asyncio.sleep(rng.exponential(10.0))


async def _idle(reader, writer, request, rng) -> None:
    await _until_closed(reader)


async def _no_http(reader, writer, request, rng) -> None:
    writer.write(rng.bytes(int(rng.integers(1, 2000))) + b"\r\n\r\n")
    await _until_closed(reader)


async def _wrong_field(reader, writer, request, rng) -> None:
    writer.write(_bytes(request | {"beam_size": 99}))
    await reader.read(1 << 16)


BAD = {
    each.__name__.strip("_").replace("_", " "): each
    for each in (
        _break_off,
        _break_off_while_reading,
        _half_a_body,
        _slow_body,
        _slow_reader,
        _pipeline_without_reading,
        _idle,
        _no_http,
        _wrong_field,
    )
}
