# SPDX-License-Identifier: Apache-2.0
"""Checks that texts consist of Unicode characters, which half a surrogate pair is not."""

import re

_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


class CharacterError(ValueError):
    """A text has half a surrogate pair, which is no character and has no UTF-8 encoding.

    JSON and Python can express it.

    Attributes:
        field: field that holds the text.
    """

    def __init__(self, field: str, found: re.Match):
        super().__init__(
            f"{field} has half a surrogate pair, U+{ord(found[0]):04X}, at character "
            f"{found.start()}; give both halves as one character, or leave it out"
        )
        self.field = field


def require_characters(value, name: str) -> None:
    """Raises CharacterError for half a surrogate pair in any text of a value, at any depth."""
    if isinstance(value, str):
        if found := _HALF_OF_A_PAIR.search(value):
            raise CharacterError(name, found)
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            require_characters(each, f"{name}[{i}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            require_characters(key, f"a name in {name}")
            require_characters(each, f"{name}.{key}")
