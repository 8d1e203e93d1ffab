# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: a process that is lost, or fails, ends the others, which say why.

A collective waits for all processes for ever. So each process keeps its connection of the
rendezvous to process 0 and sends heartbeats over it. The system closes the connection of a
process that dies, however it does; a machine that is gone or frozen is silent. Either way
process 0 tells the others, and all end: a restart goes on from the checkpoints on disk. Where
process 0 is lost, the others notice it themselves.
"""

import contextlib
import os
import sys
import threading

from switchx.hosts.channel import Channel, Lost
from switchx.hosts.rendezvous import Peers

EXIT_STATUS = 1
WAY_OUT = "start all processes again to go on from the last checkpoint"


def leave(text: str) -> None:
    """Says why, and ends this process: no clean-up waits for processes that are gone."""
    os.write(sys.__stderr__.fileno(), f"\nswitchx: {text}\n".encode())
    os._exit(EXIT_STATUS)


class Heartbeat:
    """Sends heartbeats and receives those of others in threads, until `finish`."""

    def __init__(self, peers: Peers, seconds: float, on_end=leave):
        """Begins.

        Args:
            seconds: of silence after which a process is lost.
            on_end: called with one sentence, in a thread, when the run is over too early.
        """
        self._peers, self._seconds, self._on_end = peers, seconds, on_end
        self._is_first = peers.processes.is_first
        self._name = peers.names[peers.processes.index]
        self._lock = threading.Lock()
        self._working = set(peers.channels)
        self._is_over = threading.Event()
        self._are_all_done = threading.Event()
        if not self._working:
            self._are_all_done.set()
        for index, channel in peers.channels.items():
            threading.Thread(target=self._listen, args=(index, channel), daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def fail(self, reason: str) -> None:
        """Tells the others that this process ends before its time, and why."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._send({"end": f"{self._name} failed: {reason}"})

    def wait_for_end(self, seconds: float) -> None:
        """Gives the loss of another process, which fails this one too, time to be noticed."""
        self._is_over.wait(seconds)
        if self._is_over.is_set():
            threading.Event().wait(seconds)  # `on_end` is about to end this process

    def finish(self) -> None:
        """This process has done its part; returns when all have."""
        if self._is_first:
            self._are_all_done.wait()
            self._send({"done": True})
        else:
            self._send({"done": True})
            self._are_all_done.wait()
        self._is_over.set()

    def _send_heartbeats(self) -> None:
        while not self._is_over.wait(self._seconds / 4):
            self._send({"heartbeat": True})

    def _send(self, message: dict, but: int | None = None) -> None:
        for index, channel in self._peers.channels.items():
            if index != but:
                with contextlib.suppress(Lost):  # the thread that receives from it notices
                    channel.send(message)

    def _listen(self, index: int, channel: Channel) -> None:
        try:
            while not self._is_over.is_set():
                message = self._receive(channel)
                if "end" in message:
                    return self._end(message["end"], but=index)
                if "done" in message:
                    return self._done(index)
        except Lost as error:
            if not self._is_over.is_set():
                self._end(f"{self._peers.names[index]} is lost: {error}", but=index)

    def _receive(self, channel: Channel) -> dict:
        try:
            return channel.receive(self._seconds)
        except Lost as error:
            if "silent" not in str(error):
                raise
            # Where this machine slept, or all of them, what was sent comes now.
            return channel.receive(self._seconds / 4)

    def _done(self, index: int) -> None:
        with self._lock:
            self._working.discard(index)
            if not self._working:
                self._are_all_done.set()

    def _end(self, text: str, but: int) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._is_over.set()
        if self._is_first:
            self._send({"end": text}, but)
        self._on_end(f"{text}\n{self._name} ends with it; {WAY_OUT}")
