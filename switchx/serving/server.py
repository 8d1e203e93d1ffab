# SPDX-License-Identifier: Apache-2.0
"""The process: a socket, uvicorn, and an end that loses no answer.

SIGTERM (or Ctrl-C) stops new requests, which get 503 (also those on their way), and waits for
running ones; a second signal does not wait. SIGHUP reloads the models (models.py).
"""

import contextlib
import errno
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Sequence

import uvicorn

from switchx.serving.app import make_app
from switchx.serving.http_connection import RESERVED_CONNECTIONS, BoundedProtocol, num_staying
from switchx.serving.models import Models, Reloader

LOG = logging.getLogger(__name__)
SEND_BUFFER_BYTES = 256 << 10
# Open files besides connections: of the model, the log, libraries.
OTHER_FILES = 256
# Closing at once would reset connections with requests that were sent but not yet read.
LEAST_DRAIN_S = 0.5
STOPPED = "the server stopped before the answer; ask another one"


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        option = "--port" if is_port else "--host"
        raise OSError(
            f"cannot listen on {host}:{port}: {error}; use another {option}"
        ) from error
    # Connections inherit it from their listener. The system's default is up to megabytes, which
    # a client that reads nothing would hold.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


class Server(uvicorn.Server):
    """Uvicorn, with an end in two steps: drain, then stop.

    Attributes:
        is_cut_short: whether it stopped before everything was answered.
    """

    def __init__(
        self,
        models: Models,
        token: str | None = None,
        hosts: Sequence[str] | None = None,
        reloader: Reloader | None = None,
    ):
        """A server of some models.

        Args:
            token, hosts: see `make_app`.
            reloader: the models' reloader, started by SIGHUP; None leaves that signal alone.
        """

        class Protocol(BoundedProtocol):
            limits = models.limits

            def count(self, status: int) -> None:
                models.metrics.responses.labels(str(status)).inc()

        config = uvicorn.Config(
            make_app(models, token, hosts, self._num_connections),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        # Clients' faults are not logged; our own failures are, by the routes.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._models, self._reloader, self._drain_begin_s = models, reloader, None
        self._was_ready = self.is_cut_short = False

    def handle_exit(self, sig, frame) -> None:
        """Handles SIGTERM and SIGINT: the first signal drains, later ones stop at once."""
        if self._drain_begin_s is None:
            self.drain()
        else:
            self.is_cut_short = self.should_exit = self.force_exit = True

    def drain(self) -> None:
        """Takes no new requests, and stops when running ones are answered."""
        self._models.is_draining = True
        self._drain_begin_s = time.monotonic()
        LOG.info("stopping: %d requests are still answered", self._models.num_open)

    async def on_tick(self, counter: int) -> bool:
        now_s = time.monotonic()
        self._models.look()
        for connection in list(self.server_state.connections):
            connection.check(now_s)
        if not self._was_ready and self._models.is_ready:
            self._was_ready = True
            LOG.info("ready")
        if self._models.error is not None:
            self.is_cut_short = self.should_exit = True
            self._models.refuse_open(STOPPED)
        if self._drain_begin_s is not None:
            drain_s, is_open = now_s - self._drain_begin_s, bool(self._models.num_open)
            is_late = drain_s > self._models.limits.drain_timeout_s
            if is_late and is_open:
                self.is_cut_short = True
                self._models.refuse_open(STOPPED)
            self.should_exit |= is_late or (drain_s > LEAST_DRAIN_S and not is_open)
        return await super().on_tick(counter)

    def _num_connections(self) -> int:
        return num_staying(self.server_state.connections)

    def run_until_stopped(self, listener: socket.socket) -> bool:
        """Serves; returns whether all requests that were taken were answered."""
        allow_open_files(self._models.limits.max_connections + RESERVED_CONNECTIONS)
        try:
            with self._reloading():
                self.run(sockets=[listener])
        finally:
            self._models.close()
        return not self.is_cut_short

    @contextlib.contextmanager
    def _reloading(self):
        """A context in which SIGHUP reloads the models."""
        if self._reloader is None:
            yield
            return
        self._reloader.start()
        # Python runs signal handlers only in the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        ask = self._reloader.ask
        previous = is_main and signal.signal(signal.SIGHUP, lambda *_: ask())
        try:
            yield
        finally:
            if is_main:
                signal.signal(signal.SIGHUP, previous)
            self._reloader.close()


def allow_open_files(number: int) -> None:
    """Raises the process's soft limit of open files so that `number` connections fit.

    If the hard limit is lower, connections beyond it wait to be accepted.
    """
    needed = number + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < needed:
            LOG.warning("%d files may be open; %d connections need %d", most, number, needed)
