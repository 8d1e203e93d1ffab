# SPDX-License-Identifier: Apache-2.0
"""Whatever is sent to a server, it lives, and others get their own answers all the while."""

import concurrent.futures
import json
import socket
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from switchx.inference.running_batch import RunningBatch
from switchx.serving import completions
from switchx.serving.requests import FIELDS
from tests.serving import served
from tests.serving.served import exchange, good_clients, request_bytes

# Values near the right ones, so that some requests pass, but no program is compiled for them.
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=9),
    st.lists(st.integers(-1, 400) | st.text(max_size=9), max_size=9),
    st.sampled_from(served.TEXTS),
)  # fmt: skip
# No sampling and no search: their programs take a while.
OWN = ("temperature", "beam_size")
NAMES = [name for name in FIELDS if name not in OWN]
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4).map(
    lambda value: json.dumps(value).encode()
)
GOOD = request_bytes(b'{"inputs": ["gate", "of"], "stream": true}', "Connection: close")


@st.composite
def broken(draw):
    """A good request with some of its bytes lost, doubled or changed."""
    data, place = bytearray(GOOD), draw(st.integers(0, len(GOOD) - 1))
    how = draw(st.sampled_from(["cut", "change", "insert", "lose"]))
    if how == "cut":
        return bytes(data[:place])
    if how == "change":
        data[place] = draw(st.integers(0, 255))
    if how == "insert":
        data[place:place] = draw(st.binary(min_size=1, max_size=20))
    if how == "lose":
        del data[place : place + draw(st.integers(1, 20))]
    return bytes(data)


COMPLETIONS = st.dictionaries(
    st.sampled_from([name for name in completions.FIELDS if name not in OWN]),
    VALUES,
    max_size=4,
).map(lambda value: json.dumps({"temperature": 0} | value).encode())
HEADERS = st.sampled_from(
    ["Transfer-Encoding: chunked", "Content-Length: 2", "Expect: 100-continue", "Host: y",
     "Upgrade: websocket", "Connection: upgrade", "X: " + "y" * 20_000, "X-Request-Id: \x01"]
)  # fmt: skip
DATA = st.one_of(
    COMPLETIONS.map(
        lambda body: request_bytes(body, "Connection: close").replace(
            b"generate", b"completions"
        )
    ),
    st.tuples(OBJECTS, HEADERS).map(lambda pair: request_bytes(*pair)),
    st.integers(1, 3).map(lambda number: GOOD.replace(b"\r\n", b"\n", number)),
    OBJECTS.map(lambda body: request_bytes(body, "Connection: close")),
    st.binary(max_size=50).map(lambda body: request_bytes(body, "Connection: close")),
    st.integers(0, 10**6).map(lambda length: request_bytes(b"{}", length=length)),
    broken(),
    st.binary(max_size=100),
)


def attack(address, examples: int, timeout_s: float):
    @hypothesis.settings(max_examples=examples, database=None)
    @hypothesis.given(DATA, st.booleans())
    def send(data, is_ended):
        received = exchange(address, data, is_ended=is_ended, timeout_s=timeout_s)
        for line in received.split(b"\r\n"):
            if line.startswith(b"HTTP/1.1 "):
                assert int(line.split()[1]) in (100, 200, 400, 404, 405, 408, 413, 415, 429), (
                    line
                )

    send()


def assert_unharmed(service):
    assert service.worker.is_ready and service.worker.error is None
    assert len(service._queue) == 0


@pytest.mark.parametrize(
    "examples",
    [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_broken_requests_beside_good_ones(service, address, examples):
    with good_clients(address, 2) as counts:
        attack(address, examples, timeout_s=0.3 if examples < 100 else 0.05)
    assert sum(counts) >= 4
    assert_unharmed(service)


def test_a_flood_is_refused_and_the_rest_is_answered(service, address, limited):
    """More requests than the queue holds: each gets its own answer, or 429."""

    limited(max_waiting=4)

    def ask(number):
        texts = [served.TEXTS[number % 8]] * 4
        return texts, *served.post(address, {"inputs": texts})

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        results = list(pool.map(ask, range(48)))
    statuses = [status for _, status, _ in results]
    assert set(statuses) == {200, 429}
    for texts, status, body in results:
        if status == 200:
            assert all(map(served.is_said, body["results"], texts))
    assert_unharmed(service)


def test_clients_that_disconnect_are_not_answered(service, address, limited):
    """Nothing is decoded for inputs that wait, of whole answers and streams."""
    limited(batch_wait_ms=500)
    metrics = service.metrics
    before = (metrics.abandoned._value.get(), metrics.batch_size._sum.get())
    whole = request_bytes(b'{"inputs": ["gate"]}')
    stream = request_bytes(b'{"inputs": ["of"], "stream": true}')
    with socket.create_connection(address) as one, socket.create_connection(address) as other:
        one.sendall(whole)
        other.sendall(stream)
        while len(service._queue) < 2:
            time.sleep(0.001)
    while service.num_open:
        time.sleep(0.001)
    after = (metrics.abandoned._value.get(), metrics.batch_size._sum.get())
    assert after == (before[0] + 2, before[1])
    assert served.post(address, {"inputs": "gate"})[0] == 200
    assert_unharmed(service)


def test_clients_that_disconnect_leave_a_batch(service, address, limited, monkeypatch):
    """Of two inputs in one batch, the other one is answered as if it were alone."""
    left, advance = threading.Event(), RunningBatch.advance

    def advance_later(batch, most_steps, **options):
        assert left.wait(20)
        return advance(batch, 1, **options)

    limited(batch_wait_ms=200)
    monkeypatch.setattr(RunningBatch, "advance", advance_later)
    before = service.metrics.abandoned._value.get()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with socket.create_connection(address) as client:
            client.sendall(request_bytes(b'{"inputs": ["gate"]}'))
            staying = pool.submit(served.post, address, {"inputs": "of"})
            while len(service.worker.running) < 2:
                time.sleep(0.001)
        while service.num_open > 1:
            time.sleep(0.001)
        left.set()
        status, body = staying.result()
    assert status == 200 and served.is_said(body["results"][0], "of")
    assert service.metrics.abandoned._value.get() == before + 1
