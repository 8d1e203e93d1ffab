# SPDX-License-Identifier: Apache-2.0
"""Languages are tasks of one vocabulary, drawn as mT5 draws them; oracle: TFDS' list of mC4."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorflow_datasets.text import c4 as tfds_c4

from switchx.data import languages
from switchx.data.features import DecoderOnlyFeatures
from switchx.data.loader import BatchConfig, TrainLoader, evaluation_batches
from switchx.data.mixtures import evaluated_tasks
from switchx.data.objectives import CausalLM, SpanCorruption
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import CorpusVocabulary
from tests.data.refusals import refused
from tests.data.words import sentences

VOCABULARY = ByteVocabulary()


def test_languages_of_mc4():
    assert len(languages.MC4_LANGUAGES) == 101
    known = languages.MC4_LANGUAGES + languages.MC4_IN_LATIN
    assert sorted(known) == sorted(tfds_c4.MC4_LANGUAGES)
    mixture = languages.mc4(VOCABULARY)
    assert len(mixture.tasks) == 101 and mixture.tasks[0].objective == SpanCorruption()
    assert mixture.tasks[1].name == "mc4_am" and mixture.tasks[1].corpus.language == "am"
    # |L|^0.3: a language with a thousandth of the examples is drawn 1000^0.3 = 7.94 times less.
    rates = languages.mc4(VOCABULARY, ("en", "sw")).probabilities([1_000_000, 1000])
    assert rates[0] / rates[1] == pytest.approx(10**0.9)
    some = languages.mc4(VOCABULARY, ("en", "sw", "ru-Latn"), evaluated=("sw",))
    assert [task.name for task in evaluated_tasks(some)] == ["mc4_sw"]
    with refused("mC4 has no language klingon"):
        languages.mc4(VOCABULARY, ("en", "klingon"))
    with refused("mC4 has no language xx"):
        languages.mc4(VOCABULARY, ("en",), evaluated=("xx",))


@pytest.fixture
def folder(tmp_path):
    def lines(texts):
        return "".join(json.dumps({"text": text}) + "\n" for text in texts)

    texts = sentences(60)
    (tmp_path / "en.jsonl").write_text(lines(texts))
    (tmp_path / "de").mkdir()
    (tmp_path / "de/a.jsonl").write_text(lines(f"{text} äöü" for text in texts[:20]))
    return tmp_path


def test_a_users_languages_are_trained_and_evaluated_apart(folder):
    corpora = languages.language_files(str(folder), ("en", "de"))
    vocabulary = CorpusVocabulary(
        corpora, 380, 10, 1000, data_dir=str(folder), rates=languages.MT5_RATES
    )
    made = languages.text_languages(
        str(folder), ("en", "de"), vocabulary, (0.5, 0.5), CausalLM()
    )
    assert [task.name for task in made.tasks] == ["text_en", "text_de"]
    config = BatchConfig(DecoderOnlyFeatures(16), 4)
    loader = TrainLoader(made, config, seed=0, data_dir=str(folder))
    assert next(loader)["decoder_target_tokens"].shape == (4, 16)
    seen = {}
    for task in evaluated_tasks(made):
        batches = evaluation_batches(task, config, data_dir=str(folder))
        ids = np.concatenate([batch["decoder_target_tokens"].ravel() for batch in batches])
        seen[task.name] = "äöü" in vocabulary.decode(ids.tolist())
    assert seen == {"text_en": False, "text_de": True}
    # Other rates, another vocabulary.
    other = CorpusVocabulary(corpora, 380, 10, 1000, data_dir=str(folder))
    assert other.fingerprint() != vocabulary.fingerprint()


def test_a_language_may_be_a_table_with_a_column_of_another_name(tmp_path):
    pq.write_table(pa.table({"body": sentences(20)}), tmp_path / "en.parquet")
    (corpus,) = languages.language_files(str(tmp_path), ("en",), ("body",))
    splits = [corpus.open(split, str(tmp_path)) for split in ("train", "validation")]
    assert sum(map(len, splits)) == 20
    with refused("en.parquet: expected the key text, "):
        languages.language_files(str(tmp_path), ("en",))[0].open("train", str(tmp_path))


def test_files_of_languages_are_named_if_they_are_not_there(folder):
    with refused("language 'fr': expected one of fr/, fr.txt, fr.jsonl <any>, got none"):
        languages.language_files(str(folder), ("en", "fr"))
    (folder / "de.jsonl").write_text("{}")
    with refused("language 'de': expected one of de/, <any>, got de, de.jsonl"):
        languages.text_languages(str(folder), ("de",), VOCABULARY)
    with refused("no languages"):
        languages.language_files(str(folder), ())
