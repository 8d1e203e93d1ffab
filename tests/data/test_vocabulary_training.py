# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.data.vocabularies import sample_evenly, train_model, train_sentencepiece
from tests.data.refusals import refused
from tests.data.words import sentences

SOURCE = "def double(value):\n\tif value:\n        return 2 * value\n\n\n    # größer\n"
TEXTS = [sentence + SOURCE for sentence in sentences(200)]


@pytest.fixture(scope="module")
def processor():
    return sentencepiece.SentencePieceProcessor(model_proto=train_model(TEXTS, 400))


def test_layout(processor):
    assert processor.get_piece_size() == 400
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id()) == (0, 1, 2)
    assert processor.bos_id() == -1
    assert processor.id_to_piece(3) == "\n"


def test_indentation_is_few_tokens(processor):
    assert processor.decode(processor.encode(SOURCE)) == SOURCE
    assert len(processor.encode("        ")) <= 2
    assert len(processor.encode("\n\n")) == 2


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_nothing_is_lost(processor, text):
    ids = processor.encode(text)
    assert processor.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_the_one_exception(processor):
    assert processor.decode(processor.encode("a\u2581b")) == "a b"


def test_same_texts_same_model():
    assert train_model(TEXTS, 400) == train_model(iter(TEXTS), 400)
    assert train_model(TEXTS, 400) != train_model(TEXTS, 390)


def test_sample_is_even_and_bounded():
    texts = [f"{n:04}" for n in range(1000)]
    assert sample_evenly(texts, 4000) == texts
    # 4,000 characters are halved to 2,000, 1,000, 500: every eighth text.
    assert sample_evenly(iter(texts), 300) == texts[::8]
    assert sample_evenly(["a long text"], 1) == ["a long text"]


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    (tmp_path / "b.jsonl").write_text('{"inputs": "one number", "targets": "eine Zahl"}\n')
    output = tmp_path / "output/vocabulary"
    summary = train_sentencepiece(str(tmp_path), 400, str(output))
    assert sorted(p.name for p in output.iterdir()) == ["vocabulary.model", "vocabulary.vocab"]
    assert summary.path == output / "vocabulary.model"
    assert summary.num_pieces == 400
    assert summary.num_characters == sum(map(len, TEXTS)) + len("one number" + "eine Zahl")
    assert 2 < summary.characters_per_token < 20
    lines = (output / "vocabulary.vocab").read_text().split("\n")
    assert lines[:5] == ["<pad>\t0", "</s>\t0", "<unk>\t0", "\\n\t0", "<0x00>\t0"]
    assert len(lines) == 401
    again = train_sentencepiece(str(tmp_path / "a.txt"), 400, str(tmp_path / "again"))
    assert again.path.read_bytes() == train_model(TEXTS, 400)


@pytest.mark.parametrize(
    "size, message",
    [
        (
            5000,
            "a vocabulary of 5000 pieces cannot be trained on <any> characters: use at most "
            "<any> (sentinels come on top), or more text",
        ),
        (
            0,
            "a vocabulary of 0 pieces cannot be trained on <any> characters: <any>; use some "
            "thousands, and text to match",
        ),
        (
            100,
            "a vocabulary of 100 pieces cannot be trained on <any> characters: use more than "
            "<any>, the bytes and single characters alone",
        ),
    ],
)
def test_size_that_does_not_fit(size, message):
    with refused(message):
        train_model(TEXTS, size)


def test_sample_of_nothing(tmp_path):
    with refused("sample_characters=0; use at least 1, usually 1,500,000"):
        train_sentencepiece(str(tmp_path), 300, str(tmp_path / "out"), sample_characters=0)
    assert not (tmp_path / "out").exists()


def test_largest_size_named_is_possible():
    with pytest.raises(ValueError) as error:
        train_model(TEXTS, 5000)
    largest = int(re.search(r"at most (\d+)", str(error.value))[1])
    model = train_model(TEXTS, largest)
    assert sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size() == largest


def test_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("\n \n")
    with refused("a vocabulary cannot be trained on no text; expected some, got none"):
        train_sentencepiece(str(tmp_path / "a.txt"), 400, str(tmp_path / "output"))


def test_output_that_cannot_be_written(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with refused(
        f"the vocabulary cannot be written to {tmp_path}/a.txt/output: [Errno 20] Not a "
        f"directory: '{tmp_path}/a.txt/output'; name a folder that can"
    ):
        train_sentencepiece(str(tmp_path / "a.txt"), 400, str(tmp_path / "a.txt/output"))


def test_real_text(shared_dir, tmp_path):
    file = shared_dir / "data/text/tinyshakespeare.txt"
    summary = train_sentencepiece(str(file), 4000, str(tmp_path))
    assert summary.num_characters == len(file.read_text())
    assert summary.characters_per_token > 3
