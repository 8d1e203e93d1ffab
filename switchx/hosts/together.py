# SPDX-License-Identifier: Apache-2.0
"""Runs one process' part of a program of several: roll call, `jax.distributed`, lifeline."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from switchx.hosts.lifeline import Lifeline
from switchx.hosts.processes import Processes
from switchx.hosts.roll_call import FAILURE, Company, call_roll

# An error that another process' end is the reason of waits so long for that to be known.
BLAME_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long processes wait for each other, in seconds.

    Attributes:
        start: for the last one to come.
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
    patience: Patience,
    prepare: Callable[[], Any],
    statement: Callable[[Any], dict[str, Any]],
) -> tuple[Any, Company]:
    """What `prepare` returns, when all processes have prepared what states the same.

    Args:
        prepare: must not use a device: `jax.distributed` starts only after it.

    Raises:
        ValueError: see `call_roll`; and whatever `prepare` raises, which all are told.
    """
    try:
        prepared = prepare()
    except (ValueError, OSError) as error:
        with contextlib.suppress(ValueError):  # the others' faults; this one's matters more
            call_roll(processes, {FAILURE: str(error)}, patience.start)
        raise
    return prepared, call_roll(processes, statement(prepared), patience.start)


@contextlib.contextmanager
def lifeline(company: Company, patience: Patience) -> Iterator[None]:
    """Within it, JAX sees the devices of all processes, and none outlives another's loss.

    An error within it ends the other processes; where it is one of another process' end,
    this process ends with that reason and nothing is raised.
    """
    line = Lifeline(company, patience.silence)
    try:
        _initialize_jax(company, patience)
        yield
        line.finish()
    except BaseException as error:
        if isinstance(error, Exception):
            line.wait_for_end(BLAME_SECONDS)
        line.fail(" ".join(str(error).split()) or type(error).__name__)
        raise


def _initialize_jax(company: Company, patience: Patience) -> None:
    processes = company.processes
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself; the training loop agrees on when to stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        processes.jax_coordinator,
        processes.count,
        processes.index,
        cluster_detection_method="deactivate",
        # Aborts without a word of which process it was: the lifeline is to come first.
        heartbeat_timeout_seconds=round(3 * patience.silence) + 30,
    )
