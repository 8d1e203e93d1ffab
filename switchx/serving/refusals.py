# SPDX-License-Identifier: Apache-2.0
"""Refusals of requests; for well-formed ones, after how many seconds to try again."""

import dataclasses
import math
from typing import Any

from switchx.serving.limits import Limits

# OpenAI's names of kinds of errors, if neither the request nor the server is at fault.
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclasses.dataclass(eq=False)
class Refusal(Exception):
    """The answer to a request that is wrong, or that cannot be answered now.

    Attributes:
        status: HTTP status.
        message: text of what was expected, what was given, and what to do.
        field: field of the request's JSON that is wrong, or None.
        retry_after_s: seconds after which the client may try again; None if that is unknown.
        code: OpenAI's name of the fault, if it has one.
    """

    status: int
    message: str
    field: str | None = None
    retry_after_s: int | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    def as_json(self) -> dict[str, Any]:
        """The JSON of a refusal, for all routes; OpenAI's clients can read it."""
        is_ours = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "status": self.status,
                "field": self.field,
                "message": self.message,
                "type": _KINDS.get(self.status, is_ours),
                "param": self.field,
                "code": self.code,
            }
        }


def stopping() -> Refusal:
    return Refusal(503, "the server is stopping; ask another one", retry_after_s=10)


def compiling() -> Refusal:
    return Refusal(503, "the server is still compiling; try later", retry_after_s=5)


def too_many_connections(most: int) -> Refusal:
    return Refusal(503, f"{most} connections are open; try later", retry_after_s=1)


def full_queue(waiting: int, more: int, limits: Limits) -> Refusal:
    """Refuses `more` inputs. The time is a guess: all that waits, at one second per batch."""
    return Refusal(
        429,
        f"the queue has {waiting} of {limits.max_waiting} inputs, and {more} more do not "
        "fit; try later",
        retry_after_s=max(1, math.ceil(waiting / limits.batch_size)),
    )
