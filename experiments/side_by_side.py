# SPDX-License-Identifier: Apache-2.0
"""Cells of an experiment side by side: as many at a time as there are cores, one on each."""

import os
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
_CAN_PIN = hasattr(os, "sched_setaffinity")


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0) if _CAN_PIN else range(os.cpu_count() or 1))


def num_cores() -> int:
    """Number of cells that run at a time."""
    return len(_cores())


def pin_to_one_core() -> None:
    """Leaves this process one of its cores, where the system can pin."""
    if _CAN_PIN:
        os.sched_setaffinity(0, {_cores()[0]})


def on_each_core(work: Callable[[Item], Any], items: Iterable[Item]) -> list[Any]:
    """Returns what `work` makes of each item, in the items' order.

    Items also begin in order, each on its own core: processes that `work` starts stay on the
    core of the thread that starts them (where the system can pin, as Linux does). After an
    error, or SystemExit, running items finish and no other begins.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for core in _cores():
        free.put(core)

    def pin() -> None:
        core = free.get()
        if _CAN_PIN:
            os.sched_setaffinity(0, {core})  # of this thread alone

    with ThreadPoolExecutor(free.qsize(), initializer=pin) as threads:
        started = [threads.submit(work, item) for item in items]
        try:
            return [each.result() for each in started]
        finally:
            threads.shutdown(cancel_futures=True)
