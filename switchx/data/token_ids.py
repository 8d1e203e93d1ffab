# SPDX-License-Identifier: Apache-2.0
"""A vocabulary for models that came without one: texts are token ids in decimal, `12 5 7`."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from typing import ClassVar

from switchx.data.tokenizers import EOS_ID, PAD_ID, UNK_ID, Piece, require_sentinel

_NUMBER = re.compile(r"[0-9]{1,10}")


@dataclasses.dataclass(frozen=True)
class TokenIdVocabulary:
    """Ids 0 to `size` - 1, each written as its number; pad and eos are T5's 0 and 1."""

    pad_id: ClassVar[int] = PAD_ID
    eos_id: ClassVar[int] = EOS_ID
    unk_id: ClassVar[int] = UNK_ID
    num_sentinels: ClassVar[int] = 0

    size: int

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"TokenIdVocabulary.size={self.size}; use at least 1")

    def sentinel_id(self, index: int) -> int:
        """Refuses: there are none."""
        require_sentinel(index, self.num_sentinels)
        return self.unk_id

    def encode(self, text: str) -> list[int]:
        """The numbers in a text.

        Raises:
            ValueError: there is anything else, or a number that is no id.
        """
        words = text.split()
        for word in words:
            if not (_NUMBER.fullmatch(word) and int(word) < self.size):
                raise ValueError(
                    f"{word[:40]!r} is no token id: this model came without a vocabulary, and "
                    f"its texts are ids from 0 to {self.size - 1} such as '12 5 7'; convert "
                    "it again with its SentencePiece model, --vocabulary=FILE"
                )
        return [int(word) for word in words]

    def piece(self, token_id: int) -> Piece:
        """What a token id below `size` stands for."""
        is_text = token_id not in (PAD_ID, EOS_ID)
        return Piece(f"{token_id} ", "text") if is_text else Piece(str(token_id), "control")

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as numbers, without pad and eos."""
        return " ".join(str(int(i)) for i in ids if int(i) not in (PAD_ID, EOS_ID))

    def fingerprint(self) -> str:
        return hashlib.sha256(f"token ids {self.size}".encode()).hexdigest()
