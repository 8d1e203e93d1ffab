# SPDX-License-Identifier: Apache-2.0
"""Classes of tokens by hand, and that every id has one."""

import pytest

from switchx.data.token_classes import (
    BYTE_CLASSES,
    PIECE_CLASSES,
    _class_of,
    token_classes,
)
from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary
from switchx.data.vocabularies import train_model
from tests.data.words import sentences

TEXTS = ["def f(x1):\n    return x1 + 42, self.__name__  # caf\u00e9 3.14\n"] * 30


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> SentencePieceVocabulary:
    path = tmp_path_factory.mktemp("pieces") / "some.model"
    path.write_bytes(train_model([*TEXTS, *sentences(300)], 400))
    return SentencePieceVocabulary(str(path), num_sentinels=5, pad_to_multiple_of=100)


def classes_of(vocabulary) -> dict[str, set[str]]:
    """Texts of the pieces by class."""
    classes, found = token_classes(vocabulary), {}
    assert len(classes.class_V) == vocabulary.size
    for token, index in enumerate(classes.class_V):
        found.setdefault(classes.names[index], set()).add(vocabulary.piece(token).text)
    return found


def test_pieces(pieces):
    found = classes_of(pieces)
    assert found.keys() == set(PIECE_CLASSES)
    for name, texts in found.items():
        for text in texts:
            has_letter = any(c.isalpha() for c in text)
            if name == "word start":
                assert has_letter and not text[0].isalnum()
            elif name == "word part":
                assert has_letter and (text[0].isalnum() or text[0] == "_")
            elif name == "digits":
                assert not has_letter and any(c.isdigit() for c in text)
            elif name == "whitespace":
                assert not text.strip()
            elif name == "punctuation":
                assert text.strip() and not any(c.isalnum() for c in text)
    assert "\n" in found["whitespace"] and "+" in found["punctuation"]
    assert found["sentinel"] == {f"<extra_id_{i}>" for i in range(5)}
    assert {"<pad>", "</s>", "<unk>"} < found["special"]
    assert found["byte"] == {f"0x{byte:02X}" for byte in range(0x80, 0x100)}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" the", "word start"),
        (".join", "word start"),
        ("ing", "word part"),
        ("__init__", "word part"),
        ("\u00e9t\u00e9", "word part"),
        ("42", "digits"),
        ("3.14", "digits"),
        ("x1", "word part"),
        ("_", "punctuation"),
        (" (", "punctuation"),
        ("    ", "whitespace"),
        ("\n", "whitespace"),
    ],
)
def test_class_of_a_text(text, name):
    assert _class_of(text) == name


def test_bytes():
    classes = token_classes(ByteVocabulary())
    assert classes.names == BYTE_CLASSES

    def name(token: int) -> str:
        return classes.names[classes.class_V[token]]

    for character, want in (
        ("a", "letter"), ("Z", "letter"), ("7", "digits"), ("(", "punctuation"),
        (" ", "whitespace"), ("\n", "whitespace"),
    ):  # fmt: skip
        assert name(ord(character) + 3) == want
    assert [name(token) for token in (0, 1, 2, 259, 383)] == ["special"] * 5
    # Bytes that are in no UTF-8 text; the twelfth sentinel is also a byte of a character.
    assert [name(258), name(248), name(247)] == ["sentinel", "sentinel", "byte"]
    assert name(0xC3 + 3) == "byte"
