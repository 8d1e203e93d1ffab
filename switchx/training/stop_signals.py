# SPDX-License-Identifier: Apache-2.0
"""Signals that end training after the step that is running."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set; a second Ctrl-C interrupts at once.

    Outside of the main thread, where Python takes no signals, nothing sets it.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number, frame):
        stop.set()
        signal.signal(signal.SIGINT, previous[signal.SIGINT])

    previous = {s: signal.signal(s, request) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
