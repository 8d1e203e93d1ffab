# SPDX-License-Identifier: Apache-2.0
"""Tokens beside a model's pieces, cut out of texts as the tokenizers library does it."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from switchx.fields import require

_MOST_IDS = 1 << 31


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token that replaces its text wherever it occurs, before anything else is encoded.

    Names and meanings are those of the tokenizers library.

    Attributes:
        lstrip, rstrip: whether white space before, or after, belongs to the token.
        single_word: whether the text is no token next to a letter, a digit or an underscore.
        normalized: whether the text is searched for in normalized text.
        special: whether transformers leaves the token out of decoded text when asked to.
    """

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    special: bool = True


def cutter(tokens: Sequence[AddedToken]) -> Callable[[str], list[str | int]]:
    """A function that cuts a text into texts and the ids of tokens; the longest match first."""
    by_text = {token.text: token for token in tokens}
    longest_first = sorted(by_text, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))

    def cut(text: str) -> list[str | int]:
        parts, begin = [], 0
        for match in pattern.finditer(text) if by_text else ():
            token, (first, last) = by_text[match[0]], match.span()
            if first < begin or (token.single_word and _is_in_a_word(text, first, last)):
                continue
            while token.lstrip and first > begin and text[first - 1].isspace():
                first -= 1
            while token.rstrip and last < len(text) and text[last].isspace():
                last += 1
            parts += [text[begin:first], token.id]
            begin = last
        return [part for part in (*parts, text[begin:]) if part != ""]

    return cut


def _is_in_a_word(text: str, first: int, last: int) -> bool:
    return any(re.match(r"\w", each) for each in (text[first - 1 : first], text[last:][:1]))


def added_token(fields: dict[str, Any], where: str) -> AddedToken:
    """The token that a JSON object describes.

    Raises:
        ValueError: the object has no id or text, a non-boolean flag, or other fields.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(AddedToken)}
    is_right = (
        {"id", "text"} <= fields.keys() <= kinds.keys()
        and all(type(value) is kinds[name] for name, value in fields.items())
        and 0 <= fields["id"] < _MOST_IDS
        and bool(fields["text"])
    )
    require(
        is_right,
        f"{where}: {fields!r:.200} is no added token; expected an id, a text, "
        "and true or false for each flag",
    )
    return AddedToken(**fields)
