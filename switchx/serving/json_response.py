# SPDX-License-Identifier: Apache-2.0
"""JSON that always can be sent: no infinities, and half of a surrogate pair as its escape."""

import json
from typing import Any

from starlette.responses import Response


def encoded(content: Any) -> bytes:
    """UTF-8.

    Raises:
        ValueError: there is an infinity or a NaN in it.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    # What cannot be encoded occurs in texts alone, where a backslash escapes it.
    return text.encode("utf-8", errors="backslashreplace")


class JSONResponse(Response):
    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None
    ):
        super().__init__(encoded(content) + b"\n", status_code, headers)
