# SPDX-License-Identifier: Apache-2.0
"""Classes of tokens: what kind of piece a token id stands for, from the vocabulary alone.

Dims: V ids of the vocabulary
"""

import dataclasses

import numpy as np

from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary

PIECE_CLASSES = (
    "word start", "word part", "digits", "punctuation", "whitespace", "byte", "sentinel",
    "special",
)  # fmt: skip
BYTE_CLASSES = (
    "letter", "digits", "punctuation", "whitespace", "byte", "sentinel", "special",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TokenClasses:
    """Names of classes, and the class of every id as an index into these."""

    names: tuple[str, ...]
    class_V: np.ndarray


def token_classes(vocabulary: SentencePieceVocabulary | ByteVocabulary) -> TokenClasses:
    """The class of every token id.

    word start: a word behind a space or a sign of the same piece. word part: a piece that
    begins with a letter, inside a word or, in a vocabulary without a space in front of each
    text, at the start of a line. In a vocabulary of bytes both are `letter`. digits: digits
    and no letter. punctuation: neither letter nor digit. whitespace: spaces, indentation
    and line breaks. byte: part of a character that has no piece. sentinel: stands for a span
    that was taken out. special: padding (which also begins a decoder's input), end,
    unknown, unused ids.
    """
    is_bytes = isinstance(vocabulary, ByteVocabulary)
    names = BYTE_CLASSES if is_bytes else PIECE_CLASSES
    sentinels = {vocabulary.sentinel_id(i) for i in range(vocabulary.num_sentinels)}
    class_V = np.zeros(vocabulary.size, np.int8)
    for token_id in range(vocabulary.size):
        piece = vocabulary.piece(token_id)
        if piece.kind == "text":
            name = _class_of(piece.text)
            if is_bytes and name.startswith("word"):
                name = "letter"
        elif piece.kind == "byte":
            name = "byte"
        else:
            name = "sentinel" if token_id in sentinels else "special"
        class_V[token_id] = names.index(name)
    return TokenClasses(names, class_V)


def _class_of(text: str) -> str:
    if not text.strip():
        return "whitespace"
    if not any(character.isalnum() for character in text):
        return "punctuation"
    if not any(character.isalpha() for character in text):
        return "digits"
    return "word part" if text[0].isalnum() or text[0] == "_" else "word start"
