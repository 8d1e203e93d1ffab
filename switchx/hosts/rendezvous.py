# SPDX-License-Identifier: Apache-2.0
"""The rendezvous: processes find each other, and what does not agree is said by name.

`jax.distributed` has the processes wait for each other and aborts them when one is missing,
is there twice or has another configuration, or lets them hang in a collective. So before it
is called, each process tells process 0 its index and what it is about to do; process 0 waits
for all of them and gives all one answer. The connections stay open: see `heartbeat.py`. JAX
takes the next port; that it is free and reached by all is tried here, too.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import threading
import time
from typing import Any

from switchx.hosts.channel import Channel, Lost
from switchx.hosts.processes import Processes

# Of one process' statement, under this name, why it cannot take part.
FAILURE = "failure"
MAX_NAMED = 8  # of what differs
WARN_AFTER_S = 10.0  # of waiting
CONNECT_TIMEOUT_S = 10.0
GRACE_S = 3.0  # where it cannot succeed: processes that connect now are still told

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Peers:
    """The processes of a run, and the connections of one of them.

    Attributes:
        names: of the processes by index, as `process 1 (node002, pid 4711)`.
        channels: by index; of process 0 to all others, of each other one to process 0.
    """

    processes: Processes
    names: tuple[str, ...]
    channels: dict[int, Channel]


def rendezvous(processes: Processes, statement: dict[str, Any], seconds: float) -> Peers:
    """Waits for all processes, and checks that they are about to do the same; their `Peers`.

    Args:
        statement: what has to be equal everywhere, by name; or `{FAILURE: why}` of a
            process that cannot take part, so that the others need not wait for it.
        seconds: how long the last one may take to come.

    Raises:
        ValueError: an address that does not exist or is not this machine's; a process that
            did not come, came twice, or differs, with its name and in what.
    """
    if not processes.is_first:
        return _answer(processes, statement, seconds)
    # JAX's first: a process that reaches the other one may try this one, too.
    with _listen(processes, processes.jax_port), _listen(processes, processes.port) as listener:
        arrived, rejected = _gather(processes, listener, statement, seconds)
        faults = _faults(processes, arrived) + rejected
        names = {index: _name(hellos[0][0]) for index, hellos in arrived.items()}
        answer = {"faults": faults} if faults else {
            "names": [names[index] for index in range(processes.count)],
        }  # fmt: skip
    # Not before JAX's port is free again.
    for hellos in arrived.values():
        for _, channel in hellos:
            if channel is not None:
                _send(channel, answer)
    if faults:
        raise ValueError("\n".join(faults))
    channels = {index: hellos[0][1] for index, hellos in arrived.items() if index > 0}
    return Peers(processes, tuple(answer["names"]), channels)


def _gather(processes, listener, statement, seconds):
    """All hellos by index, with their channels, and what was wrong with the others."""
    arrived = {0: [(_hello(processes, statement), None)]}
    rejected, received, is_over = [], queue.Queue(), False
    deadline, warn_at = time.monotonic() + seconds, time.monotonic() + WARN_AFTER_S

    def receive(connection):
        channel = Channel(connection)
        try:
            received.put((channel.receive(CONNECT_TIMEOUT_S), channel))
        except Lost:
            connection.close()  # a port scanner, or one that is gone again

    while len(arrived) < processes.count and time.monotonic() < deadline:
        listener.settimeout(0.05)
        try:
            connection, _ = listener.accept()
            threading.Thread(target=receive, args=(connection,), daemon=True).start()
        except TimeoutError:
            pass
        while not received.empty():
            hello, channel = received.get()
            if fault := _rejection(processes, hello):
                rejected.append(fault)
                _send(channel, {"faults": [fault]})
            else:
                arrived.setdefault(hello["index"], []).append((hello, channel))
        has_failed = any(
            len(hellos) > 1 or FAILURE in hellos[0][0]["statement"]
            for hellos in arrived.values()
        )
        if (rejected or has_failed) and not is_over:
            is_over, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > warn_at:
            warn_at = deadline
            logger.warning("waiting for process %s", _missing(processes, arrived))
    return arrived, rejected


def _answer(processes: Processes, statement: dict[str, Any], seconds: float) -> Peers:
    deadline, warn_at = time.monotonic() + seconds, time.monotonic() + WARN_AFTER_S
    channel = None
    where = f"coordinator={processes.coordinator!r}"
    while channel is None:
        try:
            address = (processes.host, processes.port)
            channel = Channel(socket.create_connection(address, timeout=CONNECT_TIMEOUT_S))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{where} does not answer within {seconds:.0f} s ({error}): start process "
                    "0 there, or give the address and port at which it listens; a firewall has "
                    "to let the port through"
                ) from error
            if time.monotonic() > warn_at:
                warn_at = deadline
                logger.warning("waiting for process 0 at %s (%s)", processes.coordinator, error)
            time.sleep(0.2)
    if fault := _jax_fault(processes):
        statement = {FAILURE: fault}
    try:
        channel.send(_hello(processes, statement))
        # Process 0 waits as long for the others from when it started, which was later perhaps.
        answer = channel.receive(2 * seconds + 30.0)
    except Lost as error:
        raise ValueError(
            f"process 0 at {where} did not complete the rendezvous: {error}; its own error "
            "says why, if it is a process of switchx"
        ) from error
    if faults := answer.get("faults"):
        raise ValueError("\n".join(faults))
    return Peers(processes, tuple(answer["names"]), {0: channel})


def _jax_fault(processes: Processes) -> str | None:
    """Why `jax.distributed` could not connect: its port is not reached from here."""
    try:
        socket.create_connection(
            (processes.host, processes.jax_port), CONNECT_TIMEOUT_S
        ).close()
    except OSError as error:
        return (
            f"it reaches coordinator={processes.coordinator!r}, but not port "
            f"{processes.jax_port} there, which jax.distributed takes ({error}); let both "
            "ports through the firewall, or give another coordinator port"
        )
    return None


def _hello(processes: Processes, statement: dict[str, Any]) -> dict[str, Any]:
    who = {"index": processes.index, "count": processes.count, "statement": statement}
    return who | {"host": socket.gethostname(), "pid": os.getpid()}


def _name(hello: dict[str, Any]) -> str:
    return f"process {hello['index']} ({hello['host']}, pid {hello['pid']})"


def _rejection(processes: Processes, hello: dict[str, Any]) -> str | None:
    """What is wrong with a process that cannot be counted."""
    known = {"index": int, "count": int, "statement": dict, "host": str, "pid": int}
    if any(not isinstance(hello.get(name), kind) for name, kind in known.items()):
        return "something that is no process of this version of switchx called"
    if hello["count"] != processes.count:
        return (
            f"{_name(hello)} has num_processes={hello['count']}, process 0 has "
            f"{processes.count}; give all of them the same"
        )
    return None


def _faults(processes: Processes, arrived: dict[int, list]) -> list[str]:
    """Who failed, is missing, doubled or different; nothing where all is well."""
    reference = arrived[0][0][0]
    firsts = [hellos[0][0] for _, hellos in sorted(arrived.items())]
    failed = [hello for hello in firsts if FAILURE in hello["statement"]]
    if failed:
        return [f"{_name(each)} cannot start: {each['statement'][FAILURE]}" for each in failed]
    doubled = [
        f"process_id={index} is given to {len(hellos)} processes: "
        f"{', '.join(_name(hello) for hello, _ in hellos)}; give each of 0 to "
        f"{processes.count - 1} to one"
        for index, hellos in sorted(arrived.items())
        if len(hellos) > 1
    ]
    if doubled:
        return doubled
    if missing := _missing(processes, arrived):
        return [
            f"of num_processes={processes.count}, process {missing} did not come; "
            "start all of them, or give the number that there is"
        ]
    return [
        fault
        for hello in firsts[1:]
        if (fault := _difference(reference["statement"], hello))
    ]  # fmt: skip


def _missing(processes: Processes, arrived) -> str:
    return ", ".join(str(i) for i in range(processes.count) if i not in arrived)


def _difference(reference: dict[str, Any], hello: dict[str, Any]) -> str | None:
    here, differing = hello["statement"], []
    for name in sorted(reference.keys() | here.keys()):
        if reference.get(name) != here.get(name):
            differing.append(f"{name}: {here.get(name)!r}, not {reference.get(name)!r}")
    if not differing:
        return None
    more = f", and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
    return (
        f"{_name(hello)} differs from process 0 ({'; '.join(differing[:MAX_NAMED])}{more}); "
        "start all processes with the same command and the same code"
    )


def _listen(processes: Processes, port: int) -> socket.socket:
    """Listens at a port of the coordinator, of all addresses that this machine has."""
    where = f"coordinator={processes.coordinator!r}"
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(processes.host, None)}
        if not any(_is_ours(address) for address in addresses):
            raise ValueError(
                f"{where} is not an address of this machine ({socket.gethostname()}), where "
                "process 0 is; give its own address, or start process 0 there"
            )
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        return socket.create_server(
            ("", port), family=family, backlog=2 * processes.count, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen at {where} ({error}); give a host name that exists and a "
            f"port that is free, as the one after it has to be for jax.distributed, and start "
            "one process with process_id=0"
        ) from error


def _is_ours(address: str) -> bool:
    """Whether this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _send(channel: Channel, message: dict[str, Any]) -> None:
    with contextlib.suppress(Lost):  # it is gone; the heartbeat will say so
        channel.send(message)
