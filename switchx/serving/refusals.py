# SPDX-License-Identifier: Apache-2.0
"""Refusals of requests that are well formed, and after how many seconds to try again."""

import math

from switchx.serving.limits import Limits
from switchx.serving.requests import Refusal


def stopping() -> Refusal:
    return Refusal(503, "the server is stopping; ask another one", retry_after_s=10)


def compiling() -> Refusal:
    return Refusal(503, "the server is still compiling; try later", retry_after_s=5)


def too_many_connections(most: int) -> Refusal:
    return Refusal(503, f"{most} connections are open; try later", retry_after_s=1)


def full_queue(waiting: int, more: int, limits: Limits) -> Refusal:
    """Refuses `more` inputs. The time is a guess: all that waits, at a second a batch."""
    return Refusal(
        429,
        f"the queue has {waiting} of {limits.max_waiting} inputs, and {more} more do not "
        "fit; try later",
        retry_after_s=max(1, math.ceil(waiting / limits.batch_size)),
    )
