# SPDX-License-Identifier: Apache-2.0
import fcntl
import resource
import socket
import time

import pytest

from switchx.hosts.channel import Channel, Lost


@pytest.fixture
def pair():
    here, there = socket.create_server(("localhost", 0)), None
    there = socket.create_connection(here.getsockname())
    accepted, _ = here.accept()
    here.close()
    yield Channel(accepted), there
    accepted.close()
    there.close()


def test_messages_come_whole_and_in_order(pair):
    channel, there = pair
    there.sendall(b'{"a": 1}\n{"b"')
    assert channel.receive(1.0) == {"a": 1}
    there.sendall(b": [2]}\n")
    assert channel.receive(1.0) == {"b": [2]}


def test_silence_is_bounded(pair):
    channel, there = pair
    began = time.monotonic()
    there.sendall(b"half a message")
    with pytest.raises(Lost, match="silent for 0 s"):
        channel.receive(0.2)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("words", [b"hello\n", b"[1]\n", b"\xff\xfe\n"])
def test_what_is_no_message(pair, words):
    channel, there = pair
    there.sendall(words)
    with pytest.raises(Lost, match="does not speak as switchx does"):
        channel.receive(1.0)


def test_the_other_end_is_gone(pair):
    channel, there = pair
    there.close()
    with pytest.raises(Lost, match="its connection ended"):
        channel.receive(1.0)
    with pytest.raises(Lost):
        for _ in range(100):
            channel.send({"a": "b" * 10000})


def test_more_files_are_open_than_select_can_take():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("needs more open files than a process may have here")
    here = socket.create_server(("localhost", 0))
    with here, socket.create_connection(here.getsockname()) as there:
        accepted, _ = here.accept()
        high = fcntl.fcntl(accepted.fileno(), fcntl.F_DUPFD, 1050)
        accepted.close()
        channel = Channel(socket.socket(fileno=high))
        there.sendall(b'{"a": 1}\n')
        assert channel.receive(1.0) == {"a": 1}
        with pytest.raises(Lost, match="silent for 0 s"):
            channel.receive(0.05)
        channel.close()
