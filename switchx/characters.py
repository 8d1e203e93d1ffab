# SPDX-License-Identifier: Apache-2.0
"""Texts that are characters of Unicode, which half a surrogate pair is not."""

import re

_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


class CharacterError(ValueError):
    """A text has half a surrogate pair, which is no character and has no bytes in UTF-8.

    JSON and Python can spell it.

    Attributes:
        field: field that has the text.
    """

    def __init__(self, field: str, found: re.Match):
        super().__init__(
            f"{field} has half a surrogate pair, U+{ord(found[0]):04X}, at character "
            f"{found.start()}; give both halves as one character, or leave it out"
        )
        self.field = field


def require_characters(value, name: str) -> None:
    """Raises CharacterError for half a surrogate pair in a text, or in any of a list."""
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
