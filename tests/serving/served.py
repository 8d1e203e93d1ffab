# SPDX-License-Identifier: Apache-2.0
"""A small model that tests of serving share, what it says, and ways to ask it."""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import socket
import threading
import time

import jax

from switchx.api import Model
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import ByteVocabulary
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import init_params
from switchx.serving.limits import Limits
from switchx.serving.models import Models
from switchx.serving.server import Server, open_socket
from switchx.serving.service import Service

CONFIG = ModelConfig(
    "encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1), init_scale=4.0
)
# One bucket of prompts and one of answers: few programs.
LIMITS = Limits(
    batch_size=4,
    max_waiting=16,
    max_inputs=8,
    max_input_tokens=16,
    max_new_tokens=8,
    max_beam_size=2,
    max_body_bytes=4096,
    max_connections=64,
    body_timeout_s=1.0,
    request_timeout_s=60.0,
    warm_up_tokens=16,
)
TEXTS = ["gate", "an expert", "a slot", "of", "a token or two", "é", "🙂", "x"]


@functools.cache
def model() -> Model:
    params = init_params(CONFIG, jax.random.key(33))
    return Model(CONFIG, params, ByteVocabulary(), 0, TextFormat(True, False, True), "")


def start(limits: Limits = LIMITS, a_model: Model | None = None, **keywords) -> Service:
    """A service that compiles nothing any more without being asked."""
    service = Service(a_model or model(), limits, **keywords)
    while not service.worker.is_warm:
        assert service.worker.error is None, service.worker.error
        time.sleep(0.01)
    return service


def stop(service: Service) -> None:
    """Waits for its threads too: the interpreter aborts if it ends while one compiles."""
    service.close()
    for each in (service.worker, service.worker.compiler):
        each.join(60)


@contextlib.contextmanager
def started(*arguments, **keywords):
    """A service (`start`'s arguments) that is ready, and stopped on leaving."""
    service = start(*arguments, **keywords)
    try:
        yield service
    finally:
        stop(service)


@functools.cache
def said(settings: tuple = (("max_new_tokens", 8),)):
    """What the model itself says to all of TEXTS, by text."""
    answers = model().generate(TEXTS, with_scores=True, pruning="none", **dict(settings))
    return dict(zip(TEXTS, answers, strict=True))


def is_said(result: dict, text: str) -> bool:
    """Whether a greedy answer is the model's own."""
    want = said()[text]
    return (result["text"], result["is_finished"]) == (
        want.output,
        want.is_finished,
    ) and abs(result["score"] - want.score) < 1e-4 * abs(want.score)


@contextlib.contextmanager
def listening(models: Models | Service, *arguments, **keywords):
    """A server (`Server`'s arguments) in a thread; host and port."""
    models = Models([models]) if isinstance(models, Service) else models
    with open_socket("127.0.0.1", 0) as listener:
        server = Server(models, *arguments, **keywords)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield listener.getsockname()[:2]
        server.should_exit = True
        thread.join(10)


def post(address, body, *, path: str = "/v1/generate", timeout_s: float = 60.0, headers=None):
    """Status and JSON of a request on a connection of its own."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    try:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (headers or {})
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@contextlib.contextmanager
def good_clients(address, number: int):
    """Clients that ask all the while; on leaving, each answer was the model's own."""
    is_over, counts = threading.Event(), []

    def ask(first: int) -> int:
        count = 0
        while not is_over.is_set() or not count:
            texts = [TEXTS[(first + count + i) % 8] for i in range(1 + count % 3)]
            status, body = post(address, {"inputs": texts})
            assert status == 200, body
            assert all(map(is_said, body["results"], texts)), (texts, body)
            count += 1
        return count

    said()  # compiled before the clock runs
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        asking = [pool.submit(ask, first) for first in range(number)]
        try:
            yield counts
        finally:
            is_over.set()
        counts += [each.result() for each in asking]


def events(text: str) -> list[tuple[str, dict]]:
    """Names and data of server-sent events."""
    assert text.endswith("\n\n")
    lines = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in lines
    ]


def request_bytes(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A whole `POST /v1/generate`; `length` may lie."""
    lines = [
        "POST /v1/generate HTTP/1.1", "Host: x", "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def exchange(address, data: bytes, *, is_ended: bool = False, timeout_s: float = 20.0) -> bytes:
    """Sends bytes and reads until the server closes.

    Args:
        is_ended: the client says that it sends no more.
        timeout_s: whatever came until then is what came.
    """
    received = b""
    with socket.create_connection(address, timeout=timeout_s) as client:
        try:
            client.sendall(data)
            if is_ended:
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                received += part
        except (ConnectionError, TimeoutError):
            pass
    return received


def status_and_json(received: bytes) -> tuple[int, dict]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def wait_until(condition, seconds=30) -> None:
    """Returns when `condition()` holds; fails after so long."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
