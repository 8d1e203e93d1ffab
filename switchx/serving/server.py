# SPDX-License-Identifier: Apache-2.0
"""The process: a socket, uvicorn with a time limit for heads, and an end that loses no answer.

SIGTERM (or Ctrl-C) stops new requests, which get 503, and waits for those that run; a second
one does not wait.
"""

import asyncio
import ipaddress
import json
import logging
import socket
import time

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from switchx.serving.app import make_app
from switchx.serving.requests import Refusal
from switchx.serving.scheduler import Service

LOG = logging.getLogger(__name__)


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free.

    Raises:
        OSError: the address is another's, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        option = "--host" if isinstance(error, socket.gaierror) else "--port"
        raise OSError(
            f"cannot listen on {host}:{port}: {error}; use another {option}"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """Uvicorn, with an end in two steps: drain, then stop.

    Attributes:
        is_cut_short: it stopped before all was answered.
    """

    def __init__(self, service: Service, token: str | None = None):
        class Protocol(HeadTimeoutProtocol):
            head_timeout_s = service.limits.body_timeout_s

        config = uvicorn.Config(
            make_app(service, token),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=service.limits.max_connections,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        # Faults of clients are not logged; failures of ours are, by the routes.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._service, self._drain_until_s = service, None
        self._was_ready = self.is_cut_short = False

    def handle_exit(self, sig, frame) -> None:
        """Of SIGTERM and SIGINT, the first and later ones."""
        if self._drain_until_s is None:
            self.drain()
        else:
            self.is_cut_short = self.should_exit = self.force_exit = True

    def drain(self) -> None:
        """Takes no new requests, and stops when those that run are answered."""
        self._service.is_draining = True
        self._drain_until_s = time.monotonic() + self._service.limits.drain_timeout_s
        LOG.info("stopping: %d requests are still answered", self._service.num_open)

    async def on_tick(self, counter: int) -> bool:
        if not self._was_ready and self._service.is_ready:
            self._was_ready = True
            LOG.info("ready")
        if self._service.worker.error is not None:
            self.is_cut_short = self.should_exit = True
        if self._drain_until_s is not None:
            is_late = time.monotonic() > self._drain_until_s
            self.is_cut_short |= is_late and self._service.num_open > 0
            self.should_exit |= is_late or not self._service.num_open
        return await super().on_tick(counter)

    def run_until_stopped(self, listener: socket.socket) -> bool:
        """Serves; returns whether all that was taken was answered."""
        try:
            self.run(sockets=[listener])
        finally:
            self._service.close()
        return not self.is_cut_short


class HeadTimeoutProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1, which closes connections whose next head has not arrived in time.

    Uvicorn itself has no time limit for a head: clients that send a byte now and then would
    hold all connections.

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
            self._say_and_close(408, "the request head did not arrive in time; send it at once")

    def send_400_response(self, msg: str) -> None:
        self._say_and_close(400, "this is no HTTP request, or its head is too long")

    def _say_and_close(self, status: int, message: str) -> None:
        body = json.dumps(Refusal(status, message).as_json()).encode() + b"\n"
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        # A response may be on its way already: then the connection just ends.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = h11.Response(status_code=status, headers=headers)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()
