# SPDX-License-Identifier: Apache-2.0
"""Signals that end training after the step that is running."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)


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
        if not stop.is_set():
            # From a thread, as this may have interrupted a write to the same stream.
            text = "%s: stopping after this step; Ctrl-C, once more, does not wait"
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
