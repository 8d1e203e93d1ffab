# SPDX-License-Identifier: Apache-2.0
"""Why a request is not answered: an HTTP status and a sentence for who sent it."""

from typing import Any


class Refusal(Exception):
    """What is wrong with a request, or why it cannot be answered now.

    Attributes:
        status: of HTTP.
        message: expected, got, and the way out.
        field: of the request's JSON that is wrong, or None.
        retry_after_s: when to try again; None says nothing.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.retry_after_s = retry_after_s

    def as_json(self) -> dict[str, Any]:
        return {"error": {"status": self.status, "field": self.field, "message": self.message}}
