# SPDX-License-Identifier: Apache-2.0
"""The ends of training: signals, in all processes after the same step, and steps that are not
finite.

A signal reaches several processes at different steps, or only one of them (a preempted
machine). If each stopped at its own step, the others would wait in a collective forever.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """Training cannot continue; the state is saved, and the message says what to do.

    Attributes:
        exit_status: status of a process that ends with it: another attempt changes nothing.
    """

    exit_status = 3


def diverged(path, step: int, times: int, skipped: str) -> TrainingStopped:
    """The error of a run whose last `times` steps were not finite.

    Args:
        path: the run folder, whose newest checkpoint is of `step`.
        skipped: the batches of these steps, in words.
    """
    return TrainingStopped(
        f"{times} steps in a row had a loss or gradient that is not finite ({skipped}); the "
        f"state is saved at step {step}. Train with a lower learning rate or clip_norm in a "
        f"new model_dir, with INIT_FROM={str(path)!r} and INIT_STEP={step} or that of an "
        "earlier checkpoint"
    )


class StopRequest(threading.Event):
    """An event that is set when this process is asked to stop."""

    _since: float | None = None

    def set(self) -> None:
        """Sets the event; only the first time counts."""
        if self._since is None:
            self._since = time.monotonic()
        super().set()

    @property
    def seconds(self) -> float | None:
        """Seconds since it was set; None if it was not."""
        return None if self._since is None else time.monotonic() - self._since


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """An event that SIGTERM and the first Ctrl-C set; a second Ctrl-C interrupts at once,
    except while a save is being written.

    Outside of the main thread, where Python receives no signals, nothing sets it.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number, frame):
        if not stop.is_set():
            # From a thread, as this may have interrupted a write to the same stream.
            text = "%s: stopping after this step; Ctrl-C, once more, waits for a save alone"
            name = signal.Signals(number).name
            threading.Thread(target=logger.info, args=(text, name)).start()
        stop.set()
        signal.signal(signal.SIGINT, previous[signal.SIGINT])

    previous = {s: signal.signal(s, request) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_with_stdin() -> None:
    """Sends SIGTERM to this process once its standard input ends.

    A pipe ends with the process that holds its other end, even by SIGKILL.
    """

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class StopAgreement:
    """Called once per step by all processes; true in all of them, or in none.

    With several processes the answer is one step old: none waits for the step that runs.
    """

    def __init__(self, stop: threading.Event, mesh: Mesh):
        """Asks nothing yet.

        Args:
            stop: event that is set when this process is asked to stop.
            mesh: mesh of all processes' devices, which vote.
        """
        self._stop, self._is_requested = stop, False
        self._asked: jax.Array | None = None
        self._size = mesh.size
        self._one_each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._is_any_set = jax.jit(jnp.any, out_shardings=everywhere)

    def request(self) -> None:
        """Ends training after this step, without a signal: nothing will kill this process."""
        self._is_requested = True

    @property
    def _is_asked(self) -> bool:
        return self._is_requested or self._stop.is_set()

    def __call__(self) -> bool:
        if jax.process_count() == 1:
            return self._is_asked
        previous, self._asked = self._asked, self._ask()
        return previous is not None and bool(previous)

    def _ask(self) -> jax.Array:
        vote = np.array([self._is_asked])
        votes = jax.make_array_from_callback((self._size,), self._one_each, lambda _: vote)
        return self._is_any_set(votes)
