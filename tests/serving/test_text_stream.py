# SPDX-License-Identifier: Apache-2.0
"""Pieces of an answer together are the answer."""

import hypothesis
from hypothesis import strategies as st

from switchx.data.tokenizers import ByteVocabulary
from switchx.serving.app import TextStream


@hypothesis.settings(deadline=None)
@hypothesis.given(st.text(max_size=12), st.lists(st.integers(0, 48), max_size=6))
def test_pieces_are_the_whole(text, cuts):
    vocabulary = ByteVocabulary()
    tokens, stream = vocabulary.encode(text), TextStream(vocabulary)
    pieces = [stream.piece(tokens[:cut]) for cut in sorted(cuts) if cut < len(tokens)]
    pieces = [p for p in (*pieces, stream.piece(tokens, is_last=True)) if p is not None]
    assert sum((piece["tokens"] for piece in pieces), []) == tokens
    assert "".join(piece["text"] for piece in pieces) == vocabulary.decode(tokens)


def test_half_a_character_waits_for_the_other_half():
    vocabulary, stream = ByteVocabulary(), TextStream(ByteVocabulary())
    tokens = vocabulary.encode("aé")
    assert stream.piece(tokens[:2]) == {"tokens": tokens[:2], "text": "a"}
    assert stream.piece(tokens[:2]) is None
    assert stream.piece(tokens) == {"tokens": tokens[2:], "text": "é"}


def test_without_a_vocabulary_there_are_tokens():
    stream = TextStream(None)
    assert stream.piece([5, 6]) == {"tokens": [5, 6], "text": None}
    assert stream.piece([5, 6], is_last=True) is None


class Fickle:
    """A vocabulary in which the third token changes the first one's text."""

    def decode(self, tokens):
        return "ab" if len(tokens) < 3 else "XYZ"


def test_a_text_that_changes_is_not_sent_in_part():
    stream = TextStream(Fickle())
    pieces = [stream.piece([1] * n) for n in (1, 2, 3)]
    assert [piece["text"] for piece in pieces] == ["ab", "", ""]
