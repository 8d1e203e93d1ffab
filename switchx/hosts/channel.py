# SPDX-License-Identifier: Apache-2.0
"""A connection between two of the processes: one JSON object a line, either way."""

import json
import math
import select
import socket
import threading
import time
from typing import Any

# Longer than any description of a job; what is longer is not of our making.
MAX_BYTES = 1 << 22


class Lost(ConnectionError):
    """The other end is gone, or has been silent for too long."""


class Channel:
    """Sends from any thread; one thread receives."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises Lost where the other end is known to be gone."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message.

        Raises:
            Lost: none came in so many seconds, the connection ended, or it is no message.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            # Not the socket's own timeout, which would hold for what is sent, too.
            left = max(deadline - time.monotonic(), 0.0)
            try:
                poll = select.poll()  # unlike select.select, for any number of open files
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(math.ceil(1000 * left)):
                    raise Lost(f"silent for {seconds:.0f} s")
                part = self._socket.recv(1 << 16)
            except Lost:
                raise
            except (OSError, ValueError) as error:  # ValueError: it was closed here
                raise Lost(str(error)) from error
            if not part or len(self._received) > MAX_BYTES:
                raise Lost("its connection ended")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Lost("it does not speak as switchx does")
        return message

    def close(self) -> None:
        self._socket.close()
