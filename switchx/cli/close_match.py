# SPDX-License-Identifier: Apache-2.0
"""The name that was probably meant."""

import difflib
from collections.abc import Iterable


def close_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is spelt most like `name`, if any is much like it.

    Args:
        cutoff: likeness from which on, 0 to 1.
    """
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` (did you mean X?)` to follow `name` in a sentence, or nothing."""
    found = close_match(name, known, cutoff)
    return f" (did you mean {found}?)" if found else ""
