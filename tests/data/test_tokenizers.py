# SPDX-License-Identifier: Apache-2.0
"""Oracles: T5's and ByT5's published ids; SentencePiece itself; HF's ByT5Tokenizer."""

import dataclasses
import hashlib
import io
import pickle
import re

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.token_classes import BYTE_CLASSES, PIECE_CLASSES, _class_of, token_classes
from switchx.data.tokenizers import (
    ByteVocabulary,
    Piece,
    SentencePieceVocabulary,
    TokenIdVocabulary,
    Vocabulary,
)
from switchx.data.vocabularies import load_vocabulary, save_vocabulary, train_model
from tests.data.refusals import refused
from tests.data.words import sentences

SENTENCES = [*["The dog sleeps."] * 20, *(sentence.strip() for sentence in sentences(300))]
T5_LAYOUT = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


def train(path, size=200, **options):
    """A model as T5's was trained: NFKC, spaces collapsed, a space put in front."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=3,
        **options,
    )
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    path = tmp_path_factory.mktemp("t5") / "spiece.model"
    return str(path), train(path, **T5_LAYOUT)


def test_t5_layout(t5):
    path, processor = t5
    num_pieces = processor.get_piece_size()
    vocabulary = SentencePieceVocabulary(path)
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    # As T5's 32,000 pieces make 32,100 ids with <extra_id_0> = 32,099, <extra_id_99> = 32,000.
    assert vocabulary.size == num_pieces + 100
    assert vocabulary.sentinel_id(0) == num_pieces + 99
    assert vocabulary.sentinel_id(99) == num_pieces
    assert vocabulary.encode(SENTENCES[0]) == processor.encode(SENTENCES[0])
    assert vocabulary.decode(vocabulary.encode(SENTENCES[0])) == SENTENCES[0]


@pytest.mark.hf
def test_texts_around_sentinels_are_those_of_transformers(t5):
    transformers = pytest.importorskip("transformers")
    path, processor = t5
    vocabulary, pieces = SentencePieceVocabulary(path), range(processor.get_piece_size())
    scores = [(processor.id_to_piece(i), processor.get_score(i)) for i in pieces]
    theirs = transformers.T5Tokenizer(
        vocab=scores + [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    )
    first, second = vocabulary.sentinel_id(0), vocabulary.sentinel_id(1)
    assert theirs.convert_tokens_to_ids("<extra_id_0>") == first
    words, inside = vocabulary.encode("The dog"), [processor.piece_to_id("s")]
    space = [processor.piece_to_id("\u2581")]
    assert processor.unk_id() not in inside + space
    for ids in (
        [first, *words, second], [*words, first, *words], [first, second, *words],
        [*words, first], [first, *inside, *words], [first, *inside], [first, *space, *words],
        [first, *words, second, *inside],
    ):  # fmt: skip
        assert vocabulary.decode(ids) == theirs.decode(ids)
    assert vocabulary.decode([first, *words]) == "<extra_id_0> The dog"


def test_padded_size_leaves_the_sentinels(t5):
    path, processor = t5
    padded = SentencePieceVocabulary(path, pad_to_multiple_of=128)
    # As T5's 32,100 are 32,128 in the released checkpoints.
    assert padded.size == -(-(processor.get_piece_size() + 100) // 128) * 128
    assert padded.sentinel_id(0) == SentencePieceVocabulary(path).sentinel_id(0)
    assert padded.decode([padded.size - 1]) == " ⁇ "


def test_decode_shows_every_id(t5):
    path, _ = t5
    vocabulary = SentencePieceVocabulary(path)
    the, dog = vocabulary.encode("The"), vocabulary.encode("dog")
    ids = [
        *the,
        vocabulary.sentinel_id(0),
        0,
        *dog,
        1,
        vocabulary.sentinel_id(12),
        *the,
        10**6,
        -1,
    ]
    assert vocabulary.decode(ids) == "The<extra_id_0> dog<extra_id_12> The ⁇  ⁇ "
    assert vocabulary.decode([]) == vocabulary.decode([0, 1, 0]) == ""


def test_text_never_becomes_a_sentinel(t5):
    path, _ = t5
    vocabulary = SentencePieceVocabulary(path)
    ids = vocabulary.encode("<extra_id_0></s><pad>")
    assert max(ids) < vocabulary.num_pieces and not {0, 1} & set(ids)


def test_own_sentinels_are_kept(tmp_path):
    names = [f"<extra_id_{i}>" for i in range(10)]
    path = tmp_path / "own.model"
    processor = train(path, user_defined_symbols=names, **T5_LAYOUT)
    vocabulary = SentencePieceVocabulary(str(path), num_sentinels=10)
    assert vocabulary.size == processor.get_piece_size()
    assert [vocabulary.sentinel_id(i) for i in range(10)] == list(range(3, 13))
    assert vocabulary.decode([4, *vocabulary.encode("dog")]) == "<extra_id_1> dog"
    with refused(f"vocabulary {path} has 10 pieces <extra_id_*> and num_sentinels=100"):
        SentencePieceVocabulary(str(path)).sentinel_id(0)


def test_other_layout_is_refused(tmp_path):
    train(tmp_path / "llama.model")
    with refused(
        f"vocabulary {tmp_path}/llama.model has pad, eos, unk at (-1, 2, 0), expected (0, 1, 2)"
    ):
        SentencePieceVocabulary(str(tmp_path / "llama.model")).encode("text")


def test_missing_and_broken_models(tmp_path):
    with refused("vocabulary no.model does not exist"):
        SentencePieceVocabulary("no.model").encode("text")
    (tmp_path / "x.vocab").write_text("<pad>\t0\n")
    with refused("x.vocab is no SentencePiece model that can be read: "):
        SentencePieceVocabulary(str(tmp_path / "x.vocab")).encode("text")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_sentinels": -1}, "num_sentinels=-1"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
    ],
)
def test_options_are_checked(options, message):
    with refused(message):
        SentencePieceVocabulary("x.model", **options)


def test_too_many_sentinels(t5):
    for vocabulary in (SentencePieceVocabulary(t5[0]), ByteVocabulary()):
        for index in (-1, 100):
            with refused(f"sentinel {index} of 100"):
                vocabulary.sentinel_id(index)


def test_fingerprint_is_of_model_and_layout(t5, tmp_path):
    path, processor = t5
    copy = tmp_path / "copy.model"
    copy.write_bytes(processor.serialized_model_proto())
    other = tmp_path / "other.model"
    train(other, size=150, **T5_LAYOUT)
    original = SentencePieceVocabulary(path).fingerprint()
    assert SentencePieceVocabulary(str(copy)).fingerprint() == original
    assert (
        len(
            {
                original,
                SentencePieceVocabulary(str(other)).fingerprint(),
                SentencePieceVocabulary(path, num_sentinels=99).fingerprint(),
                SentencePieceVocabulary(path, pad_to_multiple_of=128).fingerprint(),
                ByteVocabulary().fingerprint(),
                ByteVocabulary(10).fingerprint(),
            }
        )
        == 6
    )
    assert re.fullmatch("[0-9a-f]{64}", original)


def test_pickled_before_and_after_use(t5):
    vocabulary = SentencePieceVocabulary(t5[0])
    before = pickle.loads(pickle.dumps(vocabulary))
    ids = vocabulary.encode(SENTENCES[-1])
    after = pickle.loads(pickle.dumps(vocabulary))
    assert before.encode(SENTENCES[-1]) == after.encode(SENTENCES[-1]) == ids
    assert before == vocabulary and hash(before) == hash(vocabulary)


# Ids from the tests of Hugging Face's ByT5Tokenizer, without its final eos.
@pytest.mark.parametrize(
    "text, ids",
    [
        ("Unicode €.", [88, 113, 108, 102, 114, 103, 104, 35, 229, 133, 175, 49]),
        ("e è é ê ë", [104, 35, 198, 171, 35, 198, 172, 35, 198, 173, 35, 198, 174]),
        ("hello", [107, 104, 111, 111, 114]),
        ("\x00\xff", [3, 198, 194]),
    ],
)
def test_byt5_ids(text, ids):
    vocabulary = ByteVocabulary()
    assert vocabulary.encode(text) == ids
    assert vocabulary.decode(ids) == text


def test_byt5_layout():
    vocabulary = ByteVocabulary()
    assert vocabulary.size == 384
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert [vocabulary.sentinel_id(i) for i in (0, 1, 99)] == [258, 257, 159]
    assert vocabulary.decode([107, 0, 258, 1, 257, 248, 2, 300]) == (
        "h<extra_id_0><extra_id_1><extra_id_10> ⁇  ⁇ "
    )
    # The twelfth sentinel is the byte 0xF4, which UTF-8 uses.
    assert vocabulary.decode([vocabulary.sentinel_id(11)]) == "\ufffd"
    assert vocabulary.decode(vocabulary.encode("\U00100000")) == "\U00100000"
    with refused("ByteVocabulary.num_sentinels=257"):
        ByteVocabulary(257)


@given(st.text())
def test_bytes_lose_nothing(text):
    assert ByteVocabulary().decode(ByteVocabulary().encode(text)) == text


def test_bytes_as_hugging_face():
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    theirs = transformers.ByT5Tokenizer()
    for text in (*SENTENCES[-3:], "größer 漢字 😀\n"):
        assert [*ByteVocabulary().encode(text), 1] == theirs(text).input_ids


def test_fingerprint_of_bytes_is_fixed():
    """A changed one would orphan every checkpoint."""
    assert ByteVocabulary().fingerprint() == hashlib.sha256(b"bytes 100 384").hexdigest()


def test_pieces_of_a_model_are_sentencepieces_own(t5):
    path, oracle = t5
    vocabulary = SentencePieceVocabulary(path, num_sentinels=3, pad_to_multiple_of=8)
    size = oracle.get_piece_size()
    for token_id in range(3, size):
        piece = vocabulary.piece(token_id)
        assert piece.kind == "text"
        assert piece.text == oracle.id_to_piece(token_id).replace("\u2581", " ")
    assert [vocabulary.piece(i).text for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    others = [vocabulary.piece(i) for i in (0, 1, 2, *range(size, vocabulary.size))]
    assert {piece.kind for piece in others} == {"control"}
    assert [piece.text for piece in others[3:6]] == [f"<extra_id_{i}>" for i in (2, 1, 0)]


def test_pieces_of_bytes():
    vocabulary = ByteVocabulary()
    for byte in range(0x80):
        assert vocabulary.piece(byte + 3) == Piece(chr(byte), "text")
    assert vocabulary.piece(0xC3 + 3) == Piece("0xC3", "byte")
    assert vocabulary.piece(0) == Piece("<pad>", "control")
    assert vocabulary.piece(1) == Piece("</s>", "control")
    assert vocabulary.piece(258) == Piece("<extra_id_0>", "control")
    assert {vocabulary.piece(i).kind for i in (2, 259, 383)} == {"control"}


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
        f"{word[:40]!r} is no token id: this model came without a vocabulary, and "
        "its texts are ids from 0 to 49 such as '12 5 7'"
    ):
        VOCABULARY.encode(f"1 {word}")


def test_it_is_saved_and_loaded(tmp_path):
    save_vocabulary(VOCABULARY, tmp_path)
    assert load_vocabulary(tmp_path) == VOCABULARY
    assert [path.name for path in tmp_path.iterdir()] == ["vocabulary.json"]
    assert VOCABULARY.fingerprint() != TokenIdVocabulary(51).fingerprint()


def test_there_are_no_sentinels_and_no_empty_vocabulary():
    with refused("sentinel 0 of 0"):
        VOCABULARY.sentinel_id(0)
    with refused("TokenIdVocabulary.size=0"):
        TokenIdVocabulary(0)
    with refused("special id 50 of a vocabulary of 0 to 49"):
        TokenIdVocabulary(50, start_id=50)
    with refused("eos_ids=(), pad_id=0, start_id=0<any>; expected one end at least"):
        TokenIdVocabulary(50, eos_ids=())


def test_own_special_ids_are_saved_and_give_no_text(tmp_path):
    vocabulary = TokenIdVocabulary(50, pad_id=None, eos_ids=(7, 3), start_id=None)
    assert vocabulary.decode([0, 7, 1, 3, 12]) == "0 1 12" and vocabulary.eos_id == 7
    assert (vocabulary.piece(0).kind, vocabulary.piece(3).kind) == ("text", "control")
    save_vocabulary(vocabulary, tmp_path)
    assert load_vocabulary(tmp_path) == vocabulary
    assert vocabulary.fingerprint() != TokenIdVocabulary(50).fingerprint()
    (tmp_path / "vocabulary.json").write_text(
        (tmp_path / "vocabulary.json").read_text().replace("null", '"1"', 1)
    )
    with refused("pad_id=1, start_id=None<any>; expected one end at least, and ids"):
        load_vocabulary(tmp_path)


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


@dataclasses.dataclass(frozen=True)
class Two(Vocabulary):
    size = 10
    num_sentinels = 2

    def encode(self, text):
        return [3 for _ in text]

    def decode(self, ids):
        return "a" * len(list(ids))


def test_sentinels_are_the_last_ids_unless_a_vocabulary_says_otherwise():
    assert [Two().sentinel_id(i) for i in range(2)] == [9, 8]
    with pytest.raises(ValueError, match="sentinel 2 of 2"):
        Two().sentinel_id(2)


def test_half_a_surrogate_pair_is_no_text(pieces):
    from switchx.characters import CharacterError
    from switchx.inference.config import DecodingConfig

    for vocabulary in (ByteVocabulary(), pieces):
        with pytest.raises(
            CharacterError, match="half a surrogate pair, U.D83D, at character 1"
        ):
            vocabulary.encode("a\ud83d")
        assert vocabulary.encode("🙂")
    with pytest.raises(ValueError, match=r"stop.*stop\[1\] has half a surrogate pair, U.DE42"):
        DecodingConfig(stop=("a", "\ude42"))
