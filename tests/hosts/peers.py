# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of threads: the sockets are real, the processes are not."""

import concurrent.futures
import contextlib
import socket

from switchx.hosts.processes import Processes
from switchx.hosts.rendezvous import rendezvous


def free_port() -> int:
    """A port that is free as the next one is, which `jax.distributed` takes."""
    for _ in range(100):
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("", port + 1)):
                return port
    raise OSError("no two ports in a row are free")


def rendezvous_of(statements, *, count=None, indices=None, seconds=10.0):
    """What each of several processes gets from the rendezvous: its Peers, or its error's text.

    Args:
        statements: of the processes.
        count, indices: what they take themselves for; default: as many, in order.
    """
    address = f"localhost:{free_port()}"
    indices = range(len(statements)) if indices is None else indices

    def one(index, statement):
        try:
            processes = Processes(address, count or len(statements), index)
            return rendezvous(processes, statement, seconds)
        except ValueError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(statements)) as pool:
        return list(pool.map(one, indices, statements))


def close(all_peers) -> None:
    for peers in all_peers:
        for channel in peers.channels.values():
            channel.close()
