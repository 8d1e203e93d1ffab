# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over one connection: uvicorn's, with a deadline for every state it can be in.

| state | ends after |
|---|---|
| a head is awaited | `body_timeout_s` (408); between requests uvicorn's keep-alive time |
| a request is read and answered | the deadlines of its route, and all of them together |
| the client takes nothing of what was sent | `send_timeout_s` |
| closing: what is left is sent, what still comes is dropped | `CLOSING_S` |

uvicorn arms one timer, for idle connections, and a single byte disarms it. Beyond
`max_connections`, the connection that has awaited a head longest makes room for the new one,
as nginx reuses idle ones. Requests are read strictly (RFC 9112): a line of a head, or of a
trailer of chunks, ends in CRLF (section 2.2), and a body has a length or is chunked, not both
(section 6.1); proxies that read such a request differently would let a second one through.
"""

import json
import re
import time
from collections.abc import Callable, Iterable

import h11
from h11._readers import ChunkedReader
from uvicorn.protocols.http.h11_impl import H11Protocol

from switchx.serving.limits import READING_S, Limits
from switchx.serving.refusals import Refusal

# Time for a client to close a connection on which nothing more is sent.
CLOSING_S = 2.0
# Connections beyond max_connections, for health requests.
RESERVED_CONNECTIONS = 32
_BARE_LF = re.compile(rb"(?<!\r)\n")
MAX_HEAD_BYTES = 16 << 10


class StrictConnection(h11.Connection):
    """h11's state machine, which refuses three kinds of requests that h11 reads."""

    def next_event(self):
        """Returns the next event, as h11 does.

        Raises:
            h11.RemoteProtocolError: also for a bare LF in a head or a trailer, and for a
                length together with chunks, or chunks in HTTP/1.0.
        """
        if self.their_state is h11.IDLE:
            head, _, _ = self.trailing_data[0].partition(b"\r\n\r\n")
            if _BARE_LF.search(head):
                raise h11.RemoteProtocolError("a line of the head ends in LF without CR")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = [name for name, _ in event.headers]
            has_chunks = b"transfer-encoding" in names
            if has_chunks and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("both a length and chunks")
        return event

    def _get_io_object(self, role, event, io_dict):
        """h11's reader or writer of a body; for chunks a strict one."""
        found = super()._get_io_object(role, event, io_dict)
        return StrictChunks() if isinstance(found, ChunkedReader) else found


class StrictChunks(ChunkedReader):
    """h11's reader of chunks, which refuses a bare LF in the trailer or in place of it.

    A proxy that accepts only CRLF as the end would read on, and what follows would be a request
    here and a part of the trailer there (RFC 9112, section 7.1.2).
    """

    def __call__(self, buf):
        # It calls itself for the trailer.
        if self._reading_trailer:
            data = bytes(buf)
            trailer = b"" if data.startswith(b"\r\n") else data.partition(b"\r\n\r\n")[0]
            if _BARE_LF.search(trailer):
                raise h11.LocalProtocolError("a line of the trailer ends in LF without CR")
        return super().__call__(buf)


class CountingTransport:
    """asyncio's transport, which counts what is written, and may close in two steps.

    With unread data, a close would be a reset, which may overtake the response. So it announces
    that it sends no more, and drops what still arrives, until the client closes.

    Attributes:
        num_written: number of bytes written.
        is_lingering: whether the first step is done.
    """

    def __init__(self, transport, has_unread):
        self._transport, self._has_unread = transport, has_unread
        self.num_written, self.is_lingering = 0, False

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    @property
    def num_sent(self) -> int:
        """Number of bytes that the operating system accepted."""
        return self.num_written - self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        self.num_written += len(data)
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._has_unread():
            self._transport.close()
            return
        self.is_lingering = True
        self._transport.resume_reading()
        self._transport.write_eof()


def num_staying(connections: Iterable["BoundedProtocol"]) -> int:
    """Number of connections except those that make room for others."""
    return sum(not each.is_leaving for each in connections)


class BoundedProtocol(H11Protocol):
    """A connection; a subclass for each server sets its attributes.

    Attributes:
        count: function called with the status of each response that no route gives.
        is_leaving: whether it is being closed to make room for another connection.
    """

    limits: Limits
    count: Callable[[int], None]

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.conn = StrictConnection(h11.SERVER, MAX_HEAD_BYTES)
        self._is_refused = self.is_leaving = False
        # What it is doing and since when; bytes sent, and when that number last rose.
        self._state, self._since_s = "", time.monotonic()
        self._num_sent, self._progress_s = 0, self._since_s

    @property
    def is_waiting(self) -> bool:
        """Whether it is between requests, or on its way out."""
        return self.transport.is_closing() or self.conn.their_state is h11.IDLE

    def connection_made(self, transport) -> None:
        super().connection_made(CountingTransport(transport, self._has_unread))
        self._make_place()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn keeps the timer, and with it the request, of connections that were reset.
        self._unset_keepalive_if_required()

    def check(self, now_s: float) -> None:
        """Ends the connection if it is past a deadline; called every tenth of a second."""
        state = self._current_state()
        if state != self._state:
            self._state, self._since_s = state, now_s
        num_sent = self.transport.num_sent
        if num_sent > self._num_sent or num_sent == self.transport.num_written:
            self._num_sent, self._progress_s = num_sent, now_s
        waited_s, limits = now_s - self._since_s, self.limits
        if now_s - self._progress_s > limits.send_timeout_s:
            self.transport.abort()
        elif state == "closing":
            if waited_s > (CLOSING_S if self.transport.is_lingering else READING_S):
                self.transport.abort()
        elif state == "head":
            if waited_s > limits.body_timeout_s:
                self._say_and_close(
                    408, "the request head did not arrive in time; send it at once"
                )
        elif state != "idle":
            all_s = limits.body_timeout_s + limits.request_timeout_s + READING_S
            if waited_s > all_s + limits.send_timeout_s:
                self.transport.abort()

    def _current_state(self) -> str | int:
        if self.transport.is_closing():
            return "closing"
        if self.conn.their_state is not h11.IDLE:
            return id(self.cycle)
        is_idle = self.cycle is not None and not self.conn.trailing_data[0]
        return "idle" if is_idle else "head"

    def _has_unread(self) -> bool:
        return self._is_refused or self.conn.their_state is h11.SEND_BODY

    def _make_place(self) -> None:
        most, number = self.limits.max_connections, num_staying(self.connections)
        if number <= most:
            return
        waiting = [
            each
            for each in self.connections
            if each.is_waiting and not each.is_leaving and each is not self
        ]
        if waiting:
            min(waiting, key=lambda each: each._since_s)._leave()
        elif number > most + RESERVED_CONNECTIONS:
            self._leave()

    def _leave(self) -> None:
        """Ends at once; the event loop reports it a little later."""
        self.is_leaving = True
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._say_and_close(
            400,
            "this is no HTTP request, its head is too long, or it can be read in two ways "
            "(a bare LF, a length beside chunks)",
        )

    def _say_and_close(self, status: int, message: str) -> None:
        body = json.dumps(Refusal(status, message).as_json()).encode() + b"\n"
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        # If a response is already on its way, the connection just ends.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = h11.Response(status_code=status, headers=headers)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self.count(status)
        self._is_refused = True
        self.transport.close()
