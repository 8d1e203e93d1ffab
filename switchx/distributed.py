# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one model: checking that they agree, and noticing a loss.

It uses `jax.distributed`: its key-value store to compare what they are about to do, and its
coordination service to notice a lost process. Its tasks are recoverable: otherwise JAX ends all
processes from C++, without naming the lost one. It still does if process 0, which has the
service, is lost.
"""

import collections
import contextlib
import ipaddress
import json
import os
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from errno import EADDRNOTAVAIL
from typing import Any

import jax
from jax._src import distributed as runtime  # its client is not exported; Orbax uses it, too

FAILURE = "failure"  # in place of a process' statement: the reason why it cannot take part
WARN_AFTER_S = 10.0  # of waiting for process 0
GRACE_S = 2.0  # process 0 stays this long, so that the others can read why it ends
FOREVER_MS = 30 * 24 * 3600 * 1000
MAX_NAMED = 8  # differences named
# Status codes of XLA errors that the loss of another process may have caused.
_CAUSED = re.compile(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED):")


def connect(
    coordinator: str, count: int, index: int, statement: dict, *, start_s: int, silence_s: int
) -> "Peers":
    """Starts `jax.distributed`, and checks that all processes are about to do the same.

    Args:
        coordinator: `HOST:PORT` at which JAX listens in process 0.
        count, index: number of processes, and the index of this one, from 0.
        statement: values that must be equal in all processes, by name; or `{FAILURE: why}` in a
            process that cannot take part.
        start_s: seconds within which the last process must connect.
        silence_s: seconds without a heartbeat after which a process is lost.

    Raises:
        ValueError: process 0 cannot listen, or processes differ; it names them and how.
        TimeoutError: process 0 cannot be reached.
    """
    _reach(coordinator, start_s) if index else _require_own(coordinator, min(start_s, 60))
    # JAX waits longer, as it would end the process without saying what it waited for.
    message = f"not all came to coordinator={coordinator!r} within {start_s} s: start all"
    message += " of them, each of 0 to N - 1 once, or give the number that there is"
    missing = threading.Timer(start_s, leave, [f"of num_processes={count}, {message}"])
    missing.daemon = True
    missing.start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)
    # It would handle SIGTERM itself; here, the training loop agrees on when to stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        cluster_detection_method="deactivate",
        initialization_timeout=start_s + 60,
        heartbeat_timeout_seconds=silence_s,
    )
    missing.cancel()
    peers = Peers(coordinator, count, index, runtime.global_state.client, silence_s)
    if faults := peers.compare(statement):
        peers.disconnect()
        raise ValueError("\n".join(faults))
    if index > 0:
        print(f"switchx: {peers.name}; JAX's leader task is {peers.names[0]}", file=sys.stderr)
    return peers


@contextlib.contextmanager
def distributed(
    peers: "Peers", status_of: Callable[[BaseException], int] = lambda error: 1
) -> Iterator[None]:
    """A context in which an error, or the loss of a process, ends the other processes, too.

    Where another process' loss caused the error, this one ends with that reason. Others end
    with the error's exit status, so that a launcher does not start wrong input again.
    """
    for thread in peers.threads:
        thread.start()
    try:
        yield
        peers.disconnect()
    except BaseException as error:
        if isinstance(error, Exception) and _may_be_caused(error):
            peers.wait_for_loss()
        peers.fail(" ".join(str(error).split()) or type(error).__name__, status_of(error))
        raise


def leave(text: str, status: int = 1) -> None:
    """Says why and ends this process at once; cleaning up would wait for lost processes."""
    os.write(sys.__stderr__.fileno(), f"\nswitchx: {text}\n".encode())
    os._exit(status)


class Peers:
    """The connected processes of a run; `names` are like `process 1 (node002, pid 4711)`.

    `threads`, once started, end this process when another one is lost or has failed.
    """

    def __init__(self, coordinator: str, count: int, index: int, client, silence_s: int):
        self._coordinator = coordinator
        self._index = index
        self._is_first = index == 0
        self._client = client
        self._silence_s = silence_s
        self._all = list(range(count))
        self._is_over = threading.Event()
        watches = (self._watch_heartbeats, self._watch_failures)
        self.threads = [threading.Thread(target=each, daemon=True) for each in watches]
        self.name = f"process {index} ({socket.gethostname()}, pid {os.getpid()})"
        self.names: list[str] = []

    def compare(self, statement: dict[str, Any]) -> list[str]:
        """Lists who cannot take part or differs from process 0, and how; sets `names`."""
        own = [self.name, {"num_processes": len(self._all)} | statement]
        self._client.key_value_set(f"switchx/{self._index}", json.dumps(own))
        if self._is_first:
            keys = [f"switchx/{index}" for index in self._all]
            every = [json.loads(self._client.blocking_key_value_get(k, 60_000)) for k in keys]
            verdict = [[name for name, _ in every], _faults(every)]
            self._client.key_value_set("switchx/verdict", json.dumps(verdict))
        verdict = self._client.blocking_key_value_get("switchx/verdict", 120_000)
        self.names, faults = json.loads(verdict)
        return faults

    def require_equal_devices(self) -> None:
        """Checks that all processes see equally many devices; else JAX' host collectives fail.

        Raises:
            ValueError: some see fewer or more than most; the message names them.
        """
        counts = collections.Counter(device.process_index for device in jax.devices())
        most = statistics.mode(counts.values())
        others = [f"{self.names[i]} has {n}" for i, n in sorted(counts.items()) if n != most]
        if others:
            raise ValueError(
                f"most processes have {most} devices, and {', '.join(others[:MAX_NAMED])}; all "
                "need as many: see which devices are missing there (nvidia-smi, "
                "CUDA_VISIBLE_DEVICES, XLA_FLAGS), or start without that machine"
            )

    def fail(self, reason: str, status: int = 1) -> None:
        """Tells the others that this process ends early, why, and how they are to end."""
        if not self._is_over.is_set():
            self._is_over.set()
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was faster
                text = f"{status} {self.name} failed: {reason}"
                self._client.key_value_set("switchx/failed", text)
            time.sleep(GRACE_S if self._is_first else 0)

    def wait_for_loss(self) -> None:
        """Allows time to notice the loss of another process that made this one fail."""
        if not self._is_first and _refusal(self._coordinator):
            self._end(f"{self.names[0]} is lost: its connection ended")
        if self._is_over.wait(self._silence_s + 5.0):
            time.sleep(2 * GRACE_S)  # a thread is about to end this process

    def disconnect(self) -> None:
        """Returns when all processes have come here, in process 0 when the others have left."""
        self._client.wait_at_barrier("switchx/done", FOREVER_MS)
        self._is_over.set()
        if self._is_first:
            self._client.key_value_set("switchx/failed", "")
        # Python's exit aborts a process with a thread inside a JAX call. A thread that asks who
        # is alive returns when the others have asked or left, process 0 below at the latest.
        for thread in self.threads:
            thread.is_alive() and thread.join()
        if self._is_first:  # if the service ended, JAX would abort the others
            while len(self._client.get_live_nodes(self._all)) > 1:
                time.sleep(0.05)
        jax.distributed.shutdown()

    def _watch_heartbeats(self) -> None:
        first: dict[int, int] = {}
        while not self._is_over.wait(1.0):
            try:
                # Waits until all that are alive ask. One that comes back has another number.
                live = self._client.get_live_nodes(self._all)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                return self._end(f"{self.names[0]} is lost: its connection ended")
            first = first or live
            if lost := [self.names[i] for i in self._all if live.get(i) != first.get(i, -1)]:
                return self._end(f"{', '.join(lost)} is lost: silent for {self._silence_s} s")

    def _watch_failures(self) -> None:
        while not self._is_over.wait(0.1):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # there was none in time
                if failure := self._client.blocking_key_value_get("switchx/failed", 10_000):
                    status, _, text = failure.partition(" ")
                    self._end(text, int(status))

    def _end(self, text: str, status: int = 1) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            time.sleep(GRACE_S if self._is_first else 0)
            way_out = "start all processes again to go on from the last checkpoint"
            leave(f"{text}\n{self.name} ends with it; {way_out}", status)


def _faults(all_said: list) -> list[str]:
    """Who failed, or else who differs, from pairs `[name, statement]`; empty if all is well."""
    if failed := [(name, facts[FAILURE]) for name, facts in all_said if FAILURE in facts]:
        return [f"{name} cannot start: {reason}" for name, reason in failed]
    (_, first), *others = all_said
    faults = []
    for name, facts in others:
        keys = sorted(key for key in first | facts if first.get(key) != facts.get(key))
        what = [f"{k}: {facts.get(k)!r}, not {first.get(k)!r}" for k in keys[:MAX_NAMED]]
        what += [f"and {len(keys) - MAX_NAMED} more"] if len(keys) > MAX_NAMED else []
        way_out = "start all processes with the same command and the same code"
        faults += [f"{name} differs from process 0 ({'; '.join(what)}); {way_out}"] * bool(what)
    return faults


def address_of(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def _require_own(coordinator: str, seconds: float) -> None:
    """Checks that process 0 can listen, as JAX otherwise aborts, or shares the port.

    For some seconds a cluster may not know the name of a machine that has just started, or may
    have its old address.
    """
    end, warn_at = time.monotonic() + seconds, time.monotonic() + WARN_AFTER_S
    host, port = address_of(coordinator)
    while True:
        try:
            family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            socket.create_server((host, port), family=family).close()
            return
        except OSError as error:
            message = (
                f"process 0 cannot listen at coordinator={coordinator!r} ({error}); give an "
                f"address of this machine ({socket.gethostname()}) and a free port, and start "
                "one process with process_id=0"
            )
            is_known = not isinstance(error, socket.gaierror) and error.errno != EADDRNOTAVAIL
            if is_known or _is_number(host) or time.monotonic() > end:
                raise ValueError(message) from error
            if time.monotonic() > warn_at:
                print(f"switchx: {message}. Trying again", file=sys.stderr, flush=True)
                warn_at = end
        time.sleep(0.2)


def _is_number(host: str) -> bool:
    """Whether `host` is itself an address, not the name of one."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _reach(coordinator: str, seconds: int) -> None:
    """Waits until something is listening at the coordinator's address."""
    end, warn_at = time.monotonic() + seconds, time.monotonic() + WARN_AFTER_S
    while error := _refusal(coordinator):
        message = (
            f"coordinator={coordinator!r} does not answer ({error}): start process 0 "
            "there, or give the address and port at which it listens; a firewall has to let "
            f"the port through. Waiting for {seconds} s"
        )
        if time.monotonic() > end:
            raise TimeoutError(message) from error
        if time.monotonic() > warn_at:
            print(f"switchx: {message}", file=sys.stderr, flush=True)
            warn_at = end
        time.sleep(0.2)


def _refusal(coordinator: str) -> OSError | None:
    try:
        socket.create_connection(address_of(coordinator), timeout=5.0).close()
    except OSError as error:
        return error
    return None


def _may_be_caused(error: BaseException | None) -> bool:
    while error is not None and not _CAUSED.match(str(error)):
        error = error.__cause__ or error.__context__
    return error is not None
