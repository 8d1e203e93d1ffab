# SPDX-License-Identifier: Apache-2.0
"""An answer in pieces: which tokens and which characters are new."""

from collections.abc import Sequence

from switchx.data.tokenizers import Vocabulary

# What a vocabulary writes for bytes that are no character yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Of one input. The pieces together are the whole.

    Where a later token changes what earlier ones said, there is no such piece: nothing more
    is said until the end, and the answer has the text.
    """

    def __init__(self, vocabulary: Vocabulary | None):
        self._vocabulary = vocabulary
        self._num_tokens, self._text = 0, ""

    def piece(self, tokens: Sequence[int], *, is_last: bool = False) -> dict | None:
        """What is new in all tokens so far, `tokens` and `text`; None where nothing is."""
        new_tokens = list(tokens[self._num_tokens :])
        self._num_tokens = max(self._num_tokens, len(tokens))
        piece = {"tokens": new_tokens, "text": None}
        if self._vocabulary is not None:
            text = self._vocabulary.decode(list(tokens))
            # Half of a character is kept until the other half is there.
            text = text if is_last else text.rstrip(INCOMPLETE)
            is_longer = text.startswith(self._text)
            piece["text"] = text[len(self._text) :] if is_longer else ""
            self._text = text if is_longer else self._text
        return piece if new_tokens or piece["text"] else None
