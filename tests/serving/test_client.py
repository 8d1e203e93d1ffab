# SPDX-License-Identifier: Apache-2.0
"""The client in Python asks a live server, and others that are busy, slow or no switchx."""

import asyncio
import contextlib
import dataclasses
import http.server
import json
import subprocess
import sys
import threading
import time

import httpx2
import numpy as np
import pytest

from switchx.client import FIRST_WAIT_S, Answer, Client, NewTokens, ServerError, generate
from tests.serving import served


def asked(address, ask, **options):
    """What `ask(client)` gives."""

    async def run():
        async with Client("http://{}:{}".format(*address), **options) as client:
            return await ask(client)

    return asyncio.run(run())


def as_result(answer: Answer) -> dict:
    return {"text": answer.text, "score": answer.score, "is_finished": answer.is_finished}


def test_answers_are_the_models_own(address):
    answers = asked(address, lambda client: client.generate(served.TEXTS, max_new_tokens=8))
    assert [answer.input for answer in answers] == list(range(len(served.TEXTS)))
    assert all(map(served.is_said, map(as_result, answers), served.TEXTS))
    one = generate("http://{}:{}/".format(*address), "gate", max_new_tokens=8)
    # Alone it is another program, which may round its score otherwise.
    assert one.score == pytest.approx(answers[0].score, rel=1e-6)
    assert dataclasses.replace(one, score=answers[0].score) == answers[0] and one.tokens


@pytest.mark.parametrize(
    "settings",
    [{"beam_size": 2}, pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.slow)],
    ids=str,
)
def test_several_answers_to_an_input_are_a_list(address, settings):
    texts, settings = served.TEXTS[:2], settings | {"num_return_sequences": 2}
    want = served.model().generate(texts, max_length=8, pruning="none", **settings)

    async def ask(client):
        lists = await client.generate(texts, max_new_tokens=8, **settings)
        one = await client.generate(texts[0], max_new_tokens=8, **settings)
        events = [e async for e in client.stream(texts, max_new_tokens=8, **settings)]
        return lists, one, events

    lists, one, events = asked(address, ask)
    assert [[answer.text for answer in answers] for answers in lists] == want
    places = [[(answer.input, answer.sample) for answer in answers] for answers in lists]
    assert places == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert [answer.text for answer in one] == want[0]
    answers = {(e.input, e.sample): e for e in events if isinstance(e, Answer)}
    assert [[answers[i, s].text for s in range(2)] for i in range(2)] == want
    assert all("sample" not in each.more for each in answers.values())
    pieces = [e for e in events if isinstance(e, NewTokens)]
    assert bool(pieces) == ("seed" in settings)  # beams are not streamed
    for (number, sample), answer in answers.items() if pieces else ():
        own = [e.tokens for e in pieces if (e.input, e.sample) == (number, sample)]
        assert sum(own, []) == answer.tokens


def test_events_of_a_sample_have_its_number():
    tokens = {"input": 0, "sample": 1, "tokens": [5], "text": "x"}
    both = {"tokens": tokens, "answer": {"input": 0, "sample": 1} | SAID, "done": {}}
    stream = "".join(f"event: {n}\ndata: {json.dumps(x)}\n\n" for n, x in both.items())

    async def ask(client):
        return [event async for event in client.stream("gate", num_return_sequences=2)]

    reply = (200, {"Content-Type": "text/event-stream"}, stream.encode())
    with scripted(reply) as (server, _):
        events = asked(server, ask)
    assert events == [
        NewTokens(0, [5], "x", sample=1),
        Answer(0, "x", [5], -1.0, True, {"experts": [[1]]}, sample=1),
    ]


def test_many_at_a_time_and_one_that_is_left_early(service, address):
    async def ask(client):
        calls = [client.generate(text, max_new_tokens=8) for text in served.TEXTS * 2]
        async with contextlib.aclosing(client.stream("gate", max_new_tokens=8)) as events:
            await anext(events)
        return await asyncio.gather(*calls)

    answers = asked(address, ask, max_connections=4)
    assert all(map(served.is_said, map(as_result, answers), served.TEXTS * 2))
    end_s = time.monotonic() + 10
    while service.num_open and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not service.num_open and not service.worker.running


def test_refusals_name_the_field_and_it_needs_no_jax(address):
    with pytest.raises(ServerError, match="400: beam_size is a number \\(99\\)") as raised:
        asked(address, lambda client: client.generate("gate", beam_size=99))
    assert (raised.value.status, raised.value.field) == (400, "beam_size")
    program = "import sys, switchx.client; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_takes_too_long_is_a_timeout(limited, address):
    limited(batch_wait_ms=60_000.0)

    async def stream(client):
        return [event async for event in client.stream("gate", deadline_s=0.3)]

    for ask in (lambda client: client.generate("gate", deadline_s=0.3), stream):
        with pytest.raises(TimeoutError, match="deadline_s"):
            asked(address, ask)
    with pytest.raises(ValueError, match="deadline_s=0"):
        Client("http://127.0.0.1", deadline_s=0)
    with pytest.raises(ValueError, match="url='127.0.0.1:8000' has no scheme; use http://"):
        Client("127.0.0.1:8000")


@contextlib.contextmanager
def scripted(*responses: tuple[int, dict, bytes], address=("127.0.0.1", 0)):
    """A server that gives these, one a request; its address, and the requests' times."""
    left, times_s = list(responses), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            times_s.append(time.monotonic())
            self.rfile.read(int(self.headers["content-length"]))
            status, headers, body = left.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(address, Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address, times_s
        server.shutdown()
        thread.join()


SAID = {"text": "x", "tokens": [5], "score": -1.0, "is_finished": True, "experts": [[1]]}
GOOD = (200, {}, json.dumps({"results": [SAID], "usage": {}}).encode())
BUSY = b'{"error": {"message": "the server is still compiling; try later"}}'


def test_a_busy_server_is_asked_again_when_it_says():
    past = {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}
    now, unsaid = (429, {"Retry-After": "0"}, BUSY), (429, {}, BUSY)
    replies = ((503, {"Retry-After": "1"}, BUSY), (429, past, BUSY), now, unsaid, GOOD)
    with scripted(*replies) as (busy, times_s):
        answer = asked(busy, lambda client: client.generate("gate"))
    assert answer == Answer(0, "x", [5], -1.0, True, {"experts": [[1]]})
    assert len(times_s) == 5 and times_s[1] - times_s[0] >= 1
    # It says nothing of a time that is to come: waits double, by chance half as long.
    waits_s = np.diff(times_s[1:])
    assert (waits_s >= 0.5 * FIRST_WAIT_S * 2 ** np.arange(3)).all()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((503, {}, BUSY), "503: the server is still compiling"),  # it does not say when
        ((503, {"Retry-After": "9"}, BUSY), "503: the server is still compiling"),  # too late
        ((502, {"Retry-After": "1"}, b"<h1>Bad gateway"), "no answer of switchx: <h1>Bad gate"),
        ((200, {}, b"[]"), r"no answer of switchx: \[\]"),
        ((200, {}, b'{"results": []}'), r"no answer of switchx: {\"results\": \[\]}"),
        ((200, {}, b'{"results": ["a"]}'), "no answer of switchx: "),
    ],
)
def test_what_is_not_asked_again(reply, message):
    with scripted(reply) as (busy, times_s), pytest.raises(ServerError, match=message):
        asked(busy, lambda client: client.generate("gate", deadline_s=5))
    assert len(times_s) == 1


TIMED_OUT = (
    b'event: error\ndata: {"error": {"status": 504, "message": "no answer within 60 s"}}\n\n'
)


NO_ANSWER = b'event: answer\ndata: {"input": 0}\n\n'


UNSAID = b"event: done\ndata: {}\n\n"
NO_JSON, NO_STATUS = b"event: tokens\ndata: {bad\n\n", b'event: error\ndata: {"error": {}}\n\n'
EVENTS = "text/event-stream"


@pytest.mark.parametrize(
    ("end", "kind"),
    [(each, EVENTS) for each in (b"", TIMED_OUT, NO_ANSWER, UNSAID, NO_JSON, NO_STATUS)]
    + [(b"<h1>Sign in", "text/html")],
)
def test_a_stream_that_ends_without_its_answers_is_an_error(end, kind):
    async def ask(client):
        return [event async for event in client.stream("gate")]

    words = "504|without its end|no answer of switchx|content type 'text/event-stream'"
    with (
        scripted((200, {"Content-Type": kind}, end)) as (broken, _),
        pytest.raises(ServerError, match=words),
    ):
        asked(broken, ask)


def test_it_waits_for_a_server_that_does_not_listen_yet():
    with http.server.HTTPServer(("127.0.0.1", 0), None) as other:
        free = other.server_address
    with pytest.raises(TimeoutError):
        asked(free, lambda client: client.wait_until_ready(deadline_s=0.4))
    with pytest.raises(httpx2.ConnectError):
        asked(free, lambda client: client.generate("gate", deadline_s=0.4))

    async def ask(client):
        begun = asyncio.create_task(client.generate("gate"))
        await asyncio.sleep(0.2)
        with scripted(GOOD, address=free):
            await client.wait_until_ready()
            return await begun

    assert asked(free, ask).text == "x"
