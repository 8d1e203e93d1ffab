# SPDX-License-Identifier: Apache-2.0
"""Errors are tested by their whole text: it has to say what to do."""

import re

import pytest


def refused(message: str):
    """Expects a ValueError that reads `message`; `<any>` in it stands for anything."""
    pattern = ".*".join(re.escape(part) for part in message.split("<any>"))
    return pytest.raises(ValueError, match=f"(?s)^{pattern}$")
