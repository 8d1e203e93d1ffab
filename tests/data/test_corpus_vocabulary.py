# SPDX-License-Identifier: Apache-2.0
import pickle
import re

import pytest

from switchx.data.corpora.text_files import TextFiles
from switchx.data.vocabularies import CorpusVocabulary
from tests.data.refusals import refused
from tests.data.words import sentences

TEXT = "\n".join(f"    function({sentence[:-1]}, 'größer')\n" for sentence in sentences(300))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return TextFiles(str(tmp_path / "text.txt"), max_characters=200)


def test_trained_once_and_found_again(corpus, tmp_path, monkeypatch):
    data_dir = str(tmp_path / "data")
    vocabulary = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    assert not (tmp_path / "data").exists()  # nothing happens before the first use
    ids = vocabulary.encode(TEXT)
    assert max(ids) < 400 and vocabulary.sentinel_id(0) == 499
    assert vocabulary.decode([*ids, 499]) == TEXT + "<extra_id_0>"
    assert vocabulary.size == vocabulary.resolved.size == 500
    (model,) = (tmp_path / "data/vocabularies").iterdir()
    assert re.fullmatch("text_files_500_[0-9a-f]{16}.model", model.name)

    monkeypatch.setattr("switchx.data.vocabularies.train_model", None)
    again = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    assert again.fingerprint() == vocabulary.fingerprint()


def test_whatever_determines_it_is_in_its_name(corpus, tmp_path):
    data_dir = str(tmp_path / "data")
    original = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    others = [
        CorpusVocabulary(corpus, 501, data_dir=data_dir),
        CorpusVocabulary(corpus, 500, num_sentinels=99, data_dir=data_dir),
        CorpusVocabulary(corpus, 500, sample_characters=9000, data_dir=data_dir),
    ]
    assert len({v.fingerprint() for v in (original, *others)}) == 4
    (tmp_path / "text.txt").write_text(TEXT.replace("function", "procedure"))
    changed = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    assert changed.fingerprint() != original.fingerprint()
    assert len(list((tmp_path / "data/vocabularies").iterdir())) == 5


def test_same_on_every_machine(corpus, tmp_path):
    first, second = (
        CorpusVocabulary(corpus, 500, data_dir=str(tmp_path / name)) for name in "ab"
    )
    assert first.fingerprint() == second.fingerprint()


def test_killed_training_is_not_read(corpus, tmp_path, monkeypatch):
    vocabulary = CorpusVocabulary(corpus, 500, data_dir=str(tmp_path / "data"))

    def die(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("switchx.data.data_dir.os.replace", die)
        vocabulary.encode("text")
    assert list((tmp_path / "data/vocabularies").iterdir()) == []
    assert vocabulary.decode(vocabulary.encode("text")) == "text"


def test_pickled_before_and_after_use(corpus, tmp_path):
    vocabulary = CorpusVocabulary(corpus, 500, data_dir=str(tmp_path / "data"))
    before = pickle.loads(pickle.dumps(vocabulary))
    ids = vocabulary.encode(TEXT)
    after = pickle.loads(pickle.dumps(vocabulary))
    assert before.encode(TEXT) == after.encode(TEXT) == ids
    assert "resolved" in vars(after)


def test_size_is_checked(corpus, tmp_path):
    with refused(
        "CorpusVocabulary.size=100 leaves no piece beside 100 sentinels; use some thousands, "
        "such as 8192"
    ):
        CorpusVocabulary(corpus, 100)
    with refused(
        "a vocabulary of 31900 pieces cannot be trained on <any> characters: use at most <any> "
        "(sentinels come on top), or more text"
    ):
        CorpusVocabulary(corpus, 32000, data_dir=str(tmp_path / "data")).encode("text")


def test_of_several_corpora(tmp_path):
    """Words of either are pieces; which corpora they are is in the name."""
    corpora = []
    for language, word in (("one", "Schmetterling"), ("two", "papillon")):
        (tmp_path / f"{language}.txt").write_text(f"the {word} of a {word}\n" * 50 + TEXT)
        corpora.append(TextFiles(str(tmp_path / f"{language}.txt"), max_characters=200))
    data_dir = str(tmp_path / "data")
    both = CorpusVocabulary(tuple(corpora), 500, data_dir=data_dir)
    one = CorpusVocabulary(corpora[0], 500, data_dir=data_dir)
    assert len(both.encode(" papillon")) < len(one.encode(" papillon"))
    assert len(both.encode(" Schmetterling")) <= 2
    assert both.fingerprint() != one.fingerprint()
