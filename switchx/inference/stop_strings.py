# SPDX-License-Identifier: Apache-2.0
"""Stop strings: texts that end an output, in whatever pieces its text arrives."""

import bisect
from collections.abc import Sequence

from switchx.data.tokenizers import Vocabulary

# What a vocabulary decodes bytes to that are no complete character yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Texts before the first of which an output ends.

    The first is the one that is complete first, and of several such the longest, so that an
    output is the same in whatever pieces its text arrives.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str]):
        self._vocabulary, self._stops = vocabulary, stops

    def place(self, text: str) -> int | None:
        """The place where a stop string ends a text; None where it has none."""
        places = ((text.find(stop), stop) for stop in self._stops)
        found = [(place + len(stop), place) for place, stop in places if place >= 0]
        return min(found)[1] if found else None

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        return text[: self.place(text)]

    def num_kept(self, text: str) -> int:
        """Number of characters at a text's end that may be the beginning of a stop string."""
        most = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(most, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def num_tokens(self, tokens: Sequence[int], *, is_last: bool) -> int | None:
        """Number of tokens up to the one that completes a stop string; None where none does.

        Args:
            is_last: whether no tokens follow these.
        """

        def has_stop(number: int) -> bool:
            text = self.decoded(tokens[:number], is_last=is_last and number == len(tokens))
            return self.place(text) is not None

        if not has_stop(len(tokens)):
            return None
        return bisect.bisect_left(range(len(tokens)), True, key=has_stop)

    def decoded(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """The tokens' text without a partial character that the next ones may complete."""
        text = self._vocabulary.decode(list(tokens))
        return text if is_last else text.rstrip(INCOMPLETE)
