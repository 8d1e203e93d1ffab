# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from switchx.data.corpora.text_files import TextFiles
from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary
from switchx.data.vocabularies import (
    CorpusVocabulary,
    load_vocabulary,
    save_vocabulary,
    train_model,
)
from tests.data.refusals import refused
from tests.data.words import sentences

TEXTS = sentences(300)


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "trained.model").write_bytes(train_model(TEXTS, 300))
    return SentencePieceVocabulary(str(tmp_path / "trained.model"), 10, 128)


@pytest.fixture
def run(tmp_path, vocabulary):
    save_vocabulary(vocabulary, tmp_path / "run")
    return tmp_path / "run"


def change(run, **values):
    file = run / "vocabulary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_sentencepiece(run, vocabulary):
    (run.parent / "trained.model").unlink()
    loaded = load_vocabulary(run)
    assert loaded.fingerprint() == vocabulary.fingerprint()
    assert loaded.size == vocabulary.size == 384
    assert loaded.encode(TEXTS[0]) == vocabulary.encode(TEXTS[0])
    assert str(run.parent) not in (run / "vocabulary.json").read_text()


def test_folder_can_be_moved(run, vocabulary):
    moved = run.rename(run.parent / "moved")
    assert load_vocabulary(moved).fingerprint() == vocabulary.fingerprint()


def test_bytes(tmp_path):
    save_vocabulary(ByteVocabulary(7), tmp_path)
    assert load_vocabulary(tmp_path) == ByteVocabulary(7)
    assert json.loads((tmp_path / "vocabulary.json").read_text()) == {
        "kind": "bytes",
        "fingerprint": ByteVocabulary(7).fingerprint(),
        "num_sentinels": 7,
    }


def test_vocabulary_of_a_corpus(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    corpus = TextFiles(str(tmp_path / "text.txt"), max_characters=100)
    vocabulary = CorpusVocabulary(corpus, 400, data_dir=str(tmp_path / "data"))
    save_vocabulary(vocabulary, tmp_path / "run")
    assert load_vocabulary(tmp_path / "run").fingerprint() == vocabulary.fingerprint()


def test_other_model_is_refused(run):
    (run / "vocabulary.model").write_bytes(train_model(TEXTS, 301))
    said = json.loads((run / "vocabulary.json").read_text())["fingerprint"]
    with refused(
        f"the vocabulary in {run} has the fingerprint <any>, its description says {said}; "
        "restore vocabulary.model from where the run was trained"
    ):
        load_vocabulary(run)


@pytest.mark.parametrize(
    "values",
    [
        {"model": "../../etc/passwd"},
        {"path": "/etc/passwd"},
        {"kind": "pickle"},
        {"kind": ["bytes"]},
        {"num_sentinels": "10"},
        {"num_sentinels": True},
    ],
)
def test_hostile_descriptions(run, values):
    change(run, **values)
    with refused(
        f"{run}/vocabulary.json does not describe a vocabulary: expected the kind "
        "sentencepiece, bytes, token_ids <any>, got {<any>}; restore the file"
    ):
        load_vocabulary(run)


def test_numbers_out_of_range(run):
    change(run, num_sentinels=-1)
    with refused("num_sentinels=-1; use 0 or more, T5 has 100"):
        load_vocabulary(run)


def test_model_outside_the_folder(run):
    model = run / "vocabulary.model"
    elsewhere = model.rename(run.parent / "elsewhere.model")
    model.symlink_to(elsewhere)
    with refused(f"{model} leads out of the folder, to {elsewhere}; put the file itself there"):
        load_vocabulary(run)


def test_nothing_to_load(tmp_path):
    with refused(
        f"no vocabulary can be read from {tmp_path}: [Errno 2] No such file or directory: "
        f"'{tmp_path}/vocabulary.json'; name a run folder, or save one there"
    ):
        load_vocabulary(tmp_path)
    (tmp_path / "vocabulary.json").write_text("[1")
    with refused(
        f"no vocabulary can be read from {tmp_path}: <any>; name a run folder, or save one "
        "there"
    ):
        load_vocabulary(tmp_path)
    (tmp_path / "vocabulary.json").write_text("[]")
    with refused("<any>does not describe a vocabulary: <any>, got []; restore the file"):
        load_vocabulary(tmp_path)
