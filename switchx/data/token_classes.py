# SPDX-License-Identifier: Apache-2.0
"""The kind of piece of each id of a vocabulary: the start of a word, digits, ...

Dims: V ids of a vocabulary
"""

from typing import NamedTuple

import numpy as np

from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary

PIECE_CLASSES = (
    "word start",
    "word part",
    "digits",
    "punctuation",
    "whitespace",
    "byte",
    "sentinel",
    "special",
)
BYTE_CLASSES = ("letter", "digits", "punctuation", "whitespace", "byte", "sentinel", "special")


class TokenClasses(NamedTuple):
    """Names of classes, and the class of every id as an index into them."""

    names: tuple[str, ...]
    class_V: np.ndarray


def token_classes(vocabulary: SentencePieceVocabulary | ByteVocabulary) -> TokenClasses:
    """The class of every token id.

    word start: a word after a space or a sign in the same piece. word part: a piece that
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

    def class_of(token_id: int) -> str:
        piece = vocabulary.piece(token_id)
        if piece.kind == "control":
            return "sentinel" if token_id in sentinels else "special"
        name = "byte" if piece.kind == "byte" else _class_of(piece.text)
        return "letter" if is_bytes and name.startswith("word") else name

    classes = [names.index(class_of(token_id)) for token_id in range(vocabulary.size)]
    return TokenClasses(names, np.array(classes, np.int8))


def _class_of(text: str) -> str:
    if not text.strip():
        return "whitespace"
    if not any(map(str.isalnum, text)):
        return "punctuation"
    if not any(map(str.isalpha, text)):
        return "digits"
    return "word part" if text[0].isalnum() or text[0] == "_" else "word start"
