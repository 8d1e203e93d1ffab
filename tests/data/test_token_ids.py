# SPDX-License-Identifier: Apache-2.0
"""Texts that are token ids: there and back, and what is no id."""

import pytest

from switchx.data.tokenizers import Piece, TokenIdVocabulary
from switchx.data.vocabularies import load_vocabulary, save_vocabulary
from tests.data.refusals import refused

VOCABULARY = TokenIdVocabulary(50)


def test_there_and_back():
    assert VOCABULARY.encode(" 12 5\n49 ") == [12, 5, 49]
    assert VOCABULARY.encode("") == []
    assert VOCABULARY.decode([12, 5, 1, 0, 49]) == "12 5 49"
    assert VOCABULARY.piece(12) == Piece("12 ", "text")
    assert VOCABULARY.piece(1) == Piece("1", "control")
    assert (VOCABULARY.pad_id, VOCABULARY.eos_id, VOCABULARY.size) == (0, 1, 50)


@pytest.mark.parametrize("word", ["50", "word", "-1", "1.0", "9" * 50, "\u0663"])
def test_what_is_no_id(word):
    with refused(
        f"{word[:40]!r} is no token id: this model came without a vocabulary, and its texts "
        "are ids from 0 to 49 such as '12 5 7'; convert it again with its SentencePiece model, "
        "--vocabulary=FILE"
    ):
        VOCABULARY.encode(f"1 {word}")


def test_it_is_saved_and_loaded(tmp_path):
    save_vocabulary(VOCABULARY, tmp_path)
    assert load_vocabulary(tmp_path) == VOCABULARY
    assert [path.name for path in tmp_path.iterdir()] == ["vocabulary.json"]
    assert VOCABULARY.fingerprint() != TokenIdVocabulary(51).fingerprint()


def test_there_are_no_sentinels_and_no_empty_vocabulary():
    with refused("sentinel 0 of 0; <any>"):
        VOCABULARY.sentinel_id(0)
    with refused("TokenIdVocabulary.size=0; use at least 1"):
        TokenIdVocabulary(0)
