# SPDX-License-Identifier: Apache-2.0
"""What an error has to say: the names and the values that are wrong."""

import re

import pytest


def refused(message: str):
    """Expects a ValueError that says what `message` says.

    `<any>` in it stands for anything; so does whatever comes before and after.
    """
    parts = (re.escape(part) for part in message.split("<any>"))
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))
