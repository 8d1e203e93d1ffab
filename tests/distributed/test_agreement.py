# SPDX-License-Identifier: Apache-2.0
"""What processes say to each other through JAX's key-value store, and what they cannot say.

The service and its clients are JAX's, in one process; processes: `test_loss.py`.
"""

import argparse
import concurrent.futures
import queue
import re
import socket
import time

import jax
import pytest
from jax._src.lib import _jax

from switchx import distributed
from switchx.distributed import FAILURE, Peers, address_of, connect
from tests.processes import free_port

SAME = {"batch_size": 8, "mesh.data": None}


@pytest.fixture(scope="module")
def clients():
    """The clients of four processes; a test uses other keys than those before it."""
    port = free_port()
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", 4, recoverable=True)
    made = [_jax.get_distributed_runtime_client(f"localhost:{port}", i) for i in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda client: client.connect(), made))
    yield made
    for client in made:
        client.shutdown()
    service.shutdown()


class Renamed:
    """A client whose keys are a test's own."""

    def __init__(self, client, test: str):
        self._client, self._test = client, test

    def key_value_set(self, key, value):
        self._client.key_value_set(f"{self._test}/{key}", value)

    def blocking_key_value_get(self, key, timeout_ms):
        return self._client.blocking_key_value_get(f"{self._test}/{key}", timeout_ms)


@pytest.fixture
def peers(clients, request):
    """Makes so many `Peers`."""

    def make(count):
        named = [Renamed(client, request.node.name) for client in clients[:count]]
        made = [Peers("localhost:1", count, i, client, 5) for i, client in enumerate(named)]
        return made

    return make


def compare(all_peers, statements) -> list[list[str]]:
    with concurrent.futures.ThreadPoolExecutor(len(all_peers)) as pool:
        return list(pool.map(Peers.compare, all_peers, statements))


def test_all_know_the_names_of_all(peers):
    three = peers(3)
    assert compare(three, [SAME] * 3) == [[]] * 3
    assert three[1].names == three[0].names == [each.name for each in three]
    assert re.fullmatch(r"process 2 \(.+, pid \d+\)", three[0].names[2])


def test_what_differs_is_named_in_all_of_them(peers):
    other = {"batch_size": 16, "mesh.data": None, "seed": 1}
    said = compare(peers(4), [SAME, SAME, other, SAME])
    assert said == [said[0]] * 4
    assert re.fullmatch(
        r"process 2 \(.+\) differs from process 0 \(batch_size: 16, not 8; seed: 1, not None\);"
        r" start all processes with the same command and the same code",
        "\n".join(said[0]),
    )


def test_much_that_differs_is_cut(peers):
    (fault,), _ = compare(peers(2), [SAME, {str(n): n for n in range(20)}])
    assert fault.count("not None") == 8 and "; and 13 more); start" in fault


def test_one_that_cannot_start_says_why_to_all(peers):
    said = compare(peers(3), [SAME, {FAILURE: "there is no corpus"}, SAME | {"seed": 1}])
    assert said == [said[0]] * 3
    assert re.fullmatch(
        r"process 1 \(.+\) cannot start: there is no corpus", "\n".join(said[0])
    )


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failure_is_told_with_its_reason(failing, peers, monkeypatch):
    monkeypatch.setattr(distributed, "GRACE_S", 0.1)
    ends = queue.Queue()
    monkeypatch.setattr(distributed, "leave", lambda text, status: ends.put((text, status)))
    four = peers(4)
    compare(four, [SAME] * 4)
    for each in four:
        each.threads[1].start()
    four[failing].fail("no space left on device", 3)
    texts, statuses = zip(*(ends.get(timeout=20) for _ in range(3)), strict=True)
    assert statuses == (3, 3, 3)  # a launcher does not start it again because of the others
    for each in four:
        each.threads[1].join(20)
    assert ends.empty()
    assert all(
        text.startswith(f"{four[failing].name} failed: no space left on device\n")
        for text in texts
    )
    others = [each.name for each in four if each is not four[failing]]
    said = "ends with it; start all processes again"
    assert all(any(f"{name} {said}" in text for text in texts) for name in others)


def test_a_process_with_other_devices_is_named(peers, monkeypatch):
    three = peers(3)
    compare(three, [SAME] * 3)
    devices = [argparse.Namespace(process_index=index) for index in (0, 0, 1, 2, 2)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"have 2 devices, and process 1 \(.+\) has 1; all"):
        three[0].require_equal_devices()


def test_which_errors_may_be_of_another_process():
    gloo = "UNKNOWN: Gloo all-reduce failed: Connection reset by peer"
    for error in (ValueError(gloo), jax.errors.JaxRuntimeError(gloo)):
        assert distributed._may_be_caused(error)
    wrapped = RuntimeError("the checkpoint is not written")
    wrapped.__cause__ = ValueError(gloo)
    assert distributed._may_be_caused(wrapped)
    for text in ("there is no corpus", "RESOURCE_EXHAUSTED: Out of memory", "unknown: x"):
        assert not distributed._may_be_caused(ValueError(text))


def test_no_process_at_the_address(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "WARN_AFTER_S", 0.1)
    began, address = time.monotonic(), f"localhost:{free_port()}"
    with pytest.raises(TimeoutError, match="does not answer .*start process 0 there.* 1 s$"):
        connect(address, 2, 1, {}, start_s=1, silence_s=5)
    assert time.monotonic() - began < 15
    said = f"switchx: coordinator='{address}' does not answer"
    assert capsys.readouterr().err.startswith(said)
    with pytest.raises(TimeoutError, match="coordinator='no.such.invalid:80' does not answer"):
        connect("no.such.invalid:80", 2, 1, {}, start_s=1, silence_s=5)


def test_process_0_listens_at_its_own_free_port():
    # 192.0.2.1 is an address of documentation, no machine's.
    for address in ("192.0.2.1:80", "no.such.invalid:80"):
        with pytest.raises(ValueError, match=f"cannot listen at coordinator='{address}'"):
            connect(address, 2, 0, {}, start_s=1, silence_s=5)
    port = free_port()
    said = f"cannot listen at coordinator='localhost:{port}' .* a free port, and start one"
    with socket.create_server(("localhost", port)), pytest.raises(ValueError, match=said):
        connect(f"localhost:{port}", 2, 0, {}, start_s=1, silence_s=5)


def test_process_0_waits_for_its_name_to_be_known(monkeypatch):
    known, asked = socket.getaddrinfo, []

    def late(*arguments, **options):
        asked.append(arguments[0])
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return known("localhost", *arguments[1:], **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    distributed._require_own(f"localhost:{free_port()}", 30)
    assert len(asked) >= 3


def test_the_parts_of_an_address():
    assert address_of("node001:8476") == ("node001", 8476)
    assert address_of("[::1]:1") == ("::1", 1)
