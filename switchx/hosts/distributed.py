# SPDX-License-Identifier: Apache-2.0
"""One process of several: rendezvous, `jax.distributed`, heartbeat."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from switchx.hosts.heartbeat import Heartbeat
from switchx.hosts.processes import Processes
from switchx.hosts.rendezvous import FAILURE, Peers, rendezvous

# The loss of another process makes this one fail too, and is noticed within this time.
CAUSE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long processes wait for each other, in seconds.

    Attributes:
        start: for the last one to connect.
        silence: without a sign of one, until it is taken for lost.
    """

    start: float = 300.0
    silence: float = 60.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)} seconds; use more")


def prepared_together(
    processes: Processes,
    timeouts: Timeouts,
    prepare: Callable[[], Any],
    statement: Callable[[Any], dict[str, Any]],
) -> tuple[Any, Peers]:
    """What `prepare` returns, when all processes have prepared what states the same.

    Args:
        prepare: must not use a device: `jax.distributed` starts only after it.

    Raises:
        ValueError: see `rendezvous`; and whatever `prepare` raises, which all are told.
    """
    try:
        prepared = prepare()
    except (ValueError, OSError) as error:
        with contextlib.suppress(ValueError):  # the others' faults; this one's matters more
            rendezvous(processes, {FAILURE: str(error)}, timeouts.start)
        raise
    return prepared, rendezvous(processes, statement(prepared), timeouts.start)


@contextlib.contextmanager
def distributed(peers: Peers, timeouts: Timeouts) -> Iterator[None]:
    """Within it, JAX sees the devices of all processes, and none outlives another's loss.

    An error within it ends the other processes; where it is one of another process' end,
    this process ends with that reason and nothing is raised.
    """
    heartbeat = Heartbeat(peers, timeouts.silence)
    try:
        _initialize_jax(peers, timeouts)
        yield
        heartbeat.finish()
    except BaseException as error:
        if isinstance(error, Exception):
            heartbeat.wait_for_end(CAUSE_SECONDS)
        heartbeat.fail(" ".join(str(error).split()) or type(error).__name__)
        raise


def _initialize_jax(peers: Peers, timeouts: Timeouts) -> None:
    processes = peers.processes
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself; the training loop agrees on when to stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        processes.jax_coordinator,
        processes.count,
        processes.index,
        cluster_detection_method="deactivate",
        # Aborts without a word of which process it was: ours is to come first.
        heartbeat_timeout_seconds=round(3 * timeouts.silence) + 30,
    )
