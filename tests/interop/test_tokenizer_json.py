# SPDX-License-Identifier: Apache-2.0
"""`tokenizer.json` alone: the ids are those of transformers' tokenizer, of many odd texts."""

import json
import random

import pytest
import sentencepiece

from switchx.data.tokenizers import SentencePieceVocabulary
from switchx.interop.tokenizer_json import sentencepiece_model
from tests.data.refusals import refused
from tests.data.words import sentences
from tests.interop.folders import tokenizer_json

# Spaces, signs that are composed or taken apart, signs without a piece, sentinels and almost.
BITS = [
    *("<extra_id_0>", "<extra_id_99>", "<extra_id_100>", "<extra_id_0", "<", ">", "!", "."),
    *(" ", "  ", "\n", "\t", "\xa0", "\u3000", "\u200b", "\u2028", "\u2581", "\x00", "\x1f"),
    *("é", "e\u0301", "ﬁ", "１２", "ﷺ", "각", "東京", "привет", "ı", "𝒳", "😀", "👩\u200d👧"),
    *sentences(1)[0].split(),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with `spiece.model`, its ids and its normalization T5's."""
    folder = tmp_path_factory.mktemp("spiece")
    lines = sentences(400) + ["héllo wörld ﬁne １２ 東京 и привет 각\n"] * 30
    (folder / "text.txt").write_text("".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=300,
        character_coverage=1.0,
        minloglevel=2,
        **dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1),
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 100})
    )
    return folder


def theirs(folder, target, **options):
    """transformers' tokenizer of a folder, and the `tokenizer.json` that it writes."""
    import transformers

    tokenizer = transformers.T5Tokenizer.from_pretrained(folder, **options)
    tokenizer.save_pretrained(target)
    return tokenizer, target / "tokenizer.json"


def ours(file, num_sentinels=100) -> SentencePieceVocabulary:
    model = file.with_suffix(".model")
    model.write_bytes(sentencepiece_model(file))
    return SentencePieceVocabulary(str(model), num_sentinels)


def texts(count: int):
    draw = random.Random(0)
    return ["".join(draw.choices(BITS, k=draw.randint(0, 9))) for _ in range(count)]


@pytest.mark.hf
def test_the_same_ids_for_every_text(trained, tmp_path):
    tokenizer, file = theirs(trained, tmp_path)
    assert not (tmp_path / "spiece.model").exists()
    vocabulary = ours(file)
    assert (vocabulary.size, vocabulary.sentinel_id(0), vocabulary.sentinel_id(99)) == (
        (400, 399, 300)
    )
    for text in texts(2000):
        assert vocabulary.encode(text) == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.hf
def test_a_file_without_a_character_map_or_with_runs_made_one(trained, tmp_path):
    import tokenizers

    _, file = theirs(trained, tmp_path)
    content = json.loads(file.read_text())
    precompiled = content["normalizer"]
    run = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    for normalizer in (None, {"type": "Sequence", "normalizers": [precompiled, run]}):
        file.write_text(json.dumps(content | {"normalizer": normalizer}))
        tokenizer, vocabulary = tokenizers.Tokenizer.from_file(str(file)), ours(file)
        for text in texts(300):
            if normalizer is not None or "\u2581" not in text:
                want = tokenizer.encode(text, add_special_tokens=False).ids
                assert vocabulary.encode(text) == want, repr(text)


def test_bytes_and_added_tokens(tmp_path):
    vocab = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁a", -1.0]]
    vocab += [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
    model = {"type": "Unigram", "unk_id": 2, "vocab": vocab, "byte_fallback": True}
    added = [
        {"id": 260, "content": "<extra_id_0>", "special": True},
        {"id": 261, "content": "<mask>", "special": True},
    ]
    file = tokenizer_json(tmp_path / "tokenizer.json", model=model, added_tokens=added)
    vocabulary = ours(file, 1)
    assert vocabulary.sentinel_id(0) == 260
    first = [4 + byte for byte in "\u2581é".encode()]
    assert vocabulary.encode("a<extra_id_0>é a") == [3, 260, *first, 3]
    assert 261 not in vocabulary.encode("<mask>")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"type": "BPE"}}, "model.type='BPE'"),
        ({"model": None}, "model.type=None"),
        (
            {"model": {"type": "Unigram", "vocab": [["a", "b"]] * 9}},
            "model.vocab is no list of pieces and scores",
        ),
        (
            {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]] * 9}},
            "model.unk_id=0",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer 'Lowercase' is "),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%"}},
            "precompiled_charsmap is no base64",
        ),
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "the pre_tokenizer ['ByteLevel'] "),
        (
            {"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}},
            "the pre_tokenizer Metaspace has replacement='_' and prepend_scheme='always'",
        ),
        (
            {"added_tokens": [{"id": 9, "content": "<s>", "special": True}]},
            "the added token '<s>' has the id 9, of another",
        ),
        ({"added_tokens": [3]}, "added_tokens is no list of ids and contents"),
    ],
)  # fmt: skip
def test_what_a_sentencepiece_model_cannot_do_is_refused(tmp_path, changes, reason):
    file = tokenizer_json(tmp_path / "tokenizer.json", **changes)
    with refused(f"{file}: {reason}"):
        sentencepiece_model(file)
