# SPDX-License-Identifier: Apache-2.0
"""Uvicorn's HTTP/1.1, whose patience with a request's head has an end.

Uvicorn waits for ever for the rest of a head: clients that send a byte now and then would
hold all connections.
"""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """Closes connections whose next head has not arrived in time.

    Attributes:
        head_timeout_s: from the connection, or the head's first byte, to its end.
    """

    head_timeout_s = 10.0

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self._say_and_close(
                408, "the request's head did not arrive in time; send it at once"
            )

    def send_400_response(self, msg: str) -> None:
        self._say_and_close(400, "this is no HTTP request, or its head is too long")

    def _say_and_close(self, status: int, message: str) -> None:
        error = {"status": status, "field": None, "message": message}
        body = json.dumps({"error": error}).encode() + b"\n"
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        # A response may be on its way already: then the connection just ends.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        self.transport.close()
