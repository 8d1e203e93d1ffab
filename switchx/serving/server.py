# SPDX-License-Identifier: Apache-2.0
"""The process: a socket, uvicorn, and an end that loses no answer.

SIGTERM (or Ctrl-C) stops new requests, which get 503, and waits for those that run; a second
one does not wait.
"""

import ipaddress
import logging
import socket
import time

import uvicorn

from switchx.serving.app import make_app
from switchx.serving.patient_protocol import PatientProtocol
from switchx.serving.service import Service

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
        raise OSError(f"cannot listen on {host}:{port}: {error}; use another --port") from error


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
        class Protocol(PatientProtocol):
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
        # What broken clients do is their affair; failures of ours are logged by the routes.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._service, self._drain_until_s = service, None
        self._was_ready = self.is_cut_short = False

    def handle_exit(self, sig, frame) -> None:
        """Of SIGTERM and SIGINT, the first and later ones."""
        if self._drain_until_s is not None:
            self.is_cut_short = self.should_exit = self.force_exit = True
            return
        self.drain()

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
