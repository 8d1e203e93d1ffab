# SPDX-License-Identifier: Apache-2.0
"""Which ids a folder's tokenizer has: sentinels, added tokens, from every form and back."""

import json
import shutil

import pytest

from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import SentencePieceVocabulary
from switchx.data.vocabularies import load_vocabulary, save_vocabulary
from switchx.data.vocabulary_training import train_sentencepiece
from switchx.interop.folder_tokenizer import folder_vocabulary, write_tokenizer
from switchx.interop.tokenizer_json import sentencepiece_model
from tests.conftest import ROOT
from tests.data.refusals import refused
from tests.data.words import sentences

PIECES, ROWS = 400, 712


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "text.txt").write_text("".join(sentences(400)))
    train_sentencepiece([str(folder / "text.txt")], PIECES, str(folder))
    return folder / "vocabulary.model"


@pytest.fixture
def folder(tmp_path, spiece):
    shutil.copy(spiece, tmp_path / "spiece.model")
    return tmp_path


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def read(folder, rows=ROWS) -> SentencePieceVocabulary:
    return folder_vocabulary(folder / "spiece.model", folder, rows)


def again(vocabulary, folder, rows=ROWS) -> SentencePieceVocabulary:
    """The vocabulary out of a run folder, and out of a folder that was written of that."""
    save_vocabulary(vocabulary, folder / "run")
    saved = load_vocabulary(folder / "run")
    assert saved.fingerprint() == vocabulary.fingerprint()
    back = folder / "back"
    back.mkdir()
    shutil.copy(saved.path, back / "spiece.model")
    write_tokenizer(back, saved.num_sentinels, saved.added_tokens)
    return read(back, rows)


@pytest.mark.parametrize("count", [0, 32, 50, 100, 300])
def test_as_many_sentinels_as_the_folder_says(folder, count):
    write(folder, tokenizer_config={"extra_ids": count})
    vocabulary = read(folder, PIECES + count)
    assert (vocabulary.num_sentinels, vocabulary.size) == (count, PIECES + count)
    if count:
        assert vocabulary.sentinel_id(0) == PIECES + count - 1
    assert again(vocabulary, folder, PIECES + count).fingerprint() == vocabulary.fingerprint()


def test_t5_has_a_hundred_where_no_file_says_so_and_mt5_none_beside_its_pieces(folder):
    assert read(folder).num_sentinels == 100
    assert read(folder, PIECES + 12).num_sentinels == 0


def test_tokens_that_only_added_tokens_json_names(folder):
    """As a published fine-tuned mT5 has them: sentinels among others, in their own order."""
    added = {"<event>": 400, "{": 401, "<extra_id_0>": 402, "<extra_id_1>": 403}
    write(folder, tokenizer_config={"extra_ids": 0}, added_tokens=added)
    vocabulary = read(folder)
    assert (vocabulary.num_sentinels, vocabulary.sentinel_id(1)) == (2, 403)
    plain = SentencePieceVocabulary(str(folder / "spiece.model"), 0)
    begin, end = plain.encode("the gate"), plain.encode("an expert")
    ids = [400, *begin, 402, *end, 401]
    assert vocabulary.encode("<event>the gate<extra_id_0>an expert{") == ids
    text = vocabulary.decode(ids)
    assert text.startswith("<event>") and "<extra_id_0>" in text and text.endswith("{")
    assert vocabulary.piece(400) == ("<event>", "text")
    assert vocabulary.piece(402).kind == "control"
    back = again(vocabulary, folder)
    assert back.added_tokens == vocabulary.added_tokens
    assert back.encode("a{b<event>") == vocabulary.encode("a{b<event>")


def test_flags_of_the_other_files_are_read(folder):
    flags = {"lstrip": True, "rstrip": True, "single_word": True, "special": False}
    decoder = {"400": {"content": "<sep>", **flags}}
    write(folder, tokenizer_config={"extra_ids": 0, "added_tokens_decoder": decoder})
    write(folder, added_tokens={"<sep>": 400})
    vocabulary = read(folder)
    (token,) = vocabulary.added_tokens
    assert {name: getattr(token, name) for name in flags} == flags
    assert vocabulary.encode("<sep>") == vocabulary.encode("  <sep> ") == [400]
    assert 400 not in vocabulary.encode("a<sep>")
    assert again(vocabulary, folder).added_tokens == vocabulary.added_tokens


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"added_tokens": {"<x>": ROWS}},
            f"'<x>' has the id {ROWS}, the embedding {ROWS} rows",
        ),
        ({"added_tokens": {"<x>": 5}}, "the added token '<x>' has the id 5, of the piece"),
        ({"added_tokens": {"<extra_id_1>": 400}}, "has the sentinels [1]"),
        ({"added_tokens": {"<x>": "400"}}, "is no added token"),
        ({"added_tokens": {"": 400}}, "is no added token"),
        ({"tokenizer": {"added_tokens": [3]}}, "added_tokens is no list of ids and contents"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "has no tokens by id"),
        ({"tokenizer_config": {"extra_ids": -1}}, "extra_ids=-1"),
        ({"tokenizer_config": {"extra_ids": 400}}, "extra_ids=400 sentinels beside 400 pieces"),
        (
            {"special_tokens_map": {"eos_token": {"content": "<pad>"}}},
            "special_tokens_map.json: eos_token is '<pad>', of another id than 1",
        ),
        (
            {"special_tokens_map": {"additional_special_tokens": ["<extra_id_0>", "<x>"]}},
            "special_tokens_map.json: no file says which id '<x>' has",
        ),
        (
            {"tokenizer_config": {"extra_ids": 9}, "added_tokens": {"<x>": 401}},
            "extra_ids=9 sentinels beside 400 pieces have ids that added tokens have, too",
        ),
        (
            {
                "tokenizer": {"added_tokens": [{"id": 400, "content": "<y>"}]},
                "added_tokens": {"<x>": 400},
            },
            "id 400 is '<x>', and '<y>' in another file of the folder",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, files, said):
    write(folder, **files)
    with refused(said):
        read(folder)


@pytest.mark.hf
def test_the_ids_of_transformers_with_added_words(folder):
    import transformers

    tokenizer = transformers.T5Tokenizer.from_pretrained(folder, extra_ids=50)
    tokenizer.add_tokens(["{", "<sep>"])
    tokenizer.save_pretrained(folder / "theirs")
    shutil.copy(folder / "spiece.model", folder / "theirs/spiece.model")
    vocabulary = read(folder / "theirs")
    assert vocabulary.num_sentinels == 50
    for text in ("a { b", "<sep>the gate{an<extra_id_3> expert<extra_id_49>", "{{", ""):
        want = tokenizer(text, add_special_tokens=False).input_ids
        got = vocabulary.encode(text)
        # The trained model has no space before a text, which theirs puts there.
        assert [i for i in got if i >= PIECES] == [i for i in want if i >= PIECES], text


@pytest.mark.hf
def test_special_tokens_of_a_tokenizer_json_alone(folder):
    import transformers

    tokenizer = transformers.T5Tokenizer.from_pretrained(folder, extra_ids=50)
    tokenizer.add_tokens(["<sep>", "[NEW]"], special_tokens=True)
    tokenizer.save_pretrained(folder / "theirs")
    model = sentencepiece_model(folder / "theirs/tokenizer.json")
    (folder / "theirs/spiece.model").write_bytes(model)
    vocabulary = read(folder / "theirs")
    assert again(vocabulary, folder).fingerprint() == vocabulary.fingerprint()
    written = transformers.T5Tokenizer.from_pretrained(folder / "back")
    assert len(written) == len(tokenizer)
    for text in (
        "a <sep> b",
        "<sep>the gate[NEW]an<extra_id_3>",
        "<extra_id_49> a<extra_id_0>",
    ):
        want = tokenizer(text, add_special_tokens=False).input_ids
        assert vocabulary.encode(text) == want
        assert written(text, add_special_tokens=False).input_ids == want


@pytest.mark.hf
def test_words_are_looked_for_in_normalized_text_where_they_are_added_so(folder):
    """Special tokens are in `special_tokens_map.json`; all others' texts are normalized."""
    import transformers

    tokenizer = transformers.T5Tokenizer.from_pretrained(folder, extra_ids=0)
    tokenizer.add_tokens(["\uff46\uff4f\uff4f", "<sep>"])
    tokenizer.add_tokens("\uff42\uff41\uff52", special_tokens=True)
    tokenizer.save_pretrained(folder / "theirs")
    shutil.copy(folder / "spiece.model", folder / "theirs/spiece.model")
    vocabulary = read(folder / "theirs")
    for text in ("a foo b", "a \uff46oo b", "a bar b", "a \uff42\uff41\uff52", "x\uff1csep>y"):
        want = tokenizer(text, add_special_tokens=False).input_ids
        got = vocabulary.encode(text)
        assert [i for i in got if i >= PIECES] == [i for i in want if i >= PIECES], text
    write(folder, added_tokens={"\uff46oo": 400, "<x>": 401}, tokenizer_config={"extra_ids": 0})
    write(folder, special_tokens_map={"additional_special_tokens": ["<x>"]})
    foo, x = read(folder).added_tokens
    assert (foo.normalized, foo.special, x.normalized, x.special) == (True, False, False, True)
    assert again(read(folder), folder).added_tokens == (foo, x)


def test_published_ids_of_the_released_vocabulary():
    """Of T5's tokenizer: its documentation's sentence, sentinels, and a character it lacks."""
    file = ROOT.parent / "shared/data/t5/spiece.model"
    if not file.is_file():
        pytest.skip("needs T5's released spiece.model in ../shared/data/t5")
    vocabulary = folder_vocabulary(file, None, 32128)
    sentence = "The <extra_id_0> walks in <extra_id_1> park"
    of_conversions = TextFormat.of_training(None, is_encoder_decoder=True)
    ids = [37, 32099, 10681, 16, 32098, 2447, 1]
    assert of_conversions.inputs(vocabulary, sentence) == ids
    assert vocabulary.encode("translate English to German: The house is wonderful.") == (
        [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5]
    )
    assert vocabulary.encode("\u6c34")[-1] == 2
