# SPDX-License-Identifier: Apache-2.0
"""Oracle: datasets written by TFDS under the names and features of its own C4 builder."""

import tensorflow_datasets as tfds

from switchx.data.corpora.c4 import C4
from tests.data.refusals import refused


class FakeC4(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Two pages a split; features as tfds/text/c4.py has them."""

    name = "c4"
    VERSION = tfds.core.Version("3.1.0")
    SUPPORTED_VERSIONS = [tfds.core.Version("3.0.1")]
    url_infos = None

    def __init__(self, splits, **options):
        self._splits = splits
        super().__init__(file_format="array_record", **options)

    def _info(self):
        names = ("content-length", "content-type", "text", "timestamp", "url")
        features = {name: tfds.features.Text() for name in names}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, download_manager):
        return {split: self._generate_examples(split) for split in self._splits}

    def _generate_examples(self, split):
        for number in range(2):
            page = dict.fromkeys(("content-length", "content-type", "timestamp", "url"), "x")
            yield number, page | {"text": f"{split} {self.version} é {number}"}


def prepare(data_dir, config, splits, version="3.1.0"):
    tfds.disable_progress_bar()
    config = tfds.core.BuilderConfig(name=config, version=version)
    FakeC4(splits, data_dir=data_dir, config=config).download_and_prepare()


def texts(corpus, split, data_dir):
    return sorted(example["text"] for example in corpus.open(split, str(data_dir)))


def test_newest_version_is_read(tmp_path):
    prepare(tmp_path, "en", ("train", "validation"))
    prepare(tmp_path / "old", "en", ("train",), "3.0.1")
    (tmp_path / "old/c4/en/3.0.1").rename(tmp_path / "c4/en/3.0.1")
    (tmp_path / "c4/en/incomplete.ABC_3.2.0").mkdir()
    assert texts(C4(), "train", tmp_path) == ["train 3.1.0 é 0", "train 3.1.0 é 1"]
    assert texts(C4(), "validation", tmp_path) == [
        "validation 3.1.0 é 0",
        "validation 3.1.0 é 1",
    ]
    source = C4().open("train", str(tmp_path))
    assert source.fields == ("text",) and source.name == "c4/en/train"


def test_languages_of_mc4(tmp_path):
    prepare(tmp_path, "multilingual", ("de", "de-validation", "fr", "fr-validation"))
    german = C4("multilingual", "de")
    assert texts(german, "train", tmp_path) == ["de 3.1.0 é 0", "de 3.1.0 é 1"]
    assert texts(german, "validation", tmp_path)[0] == "de-validation 3.1.0 é 0"
    with refused("c4/multilingual/sw has no split 'sw'"):
        C4("multilingual", "sw").open("train", str(tmp_path))


def test_not_prepared(tmp_path, own_cache):
    with refused(f"c4/en is not prepared below {tmp_path}, {own_cache}"):
        C4().open("train", str(tmp_path))


def test_options_are_checked(tmp_path):
    with refused("C4.variant='english'"):
        C4("english")
    for options in (("en", "de"), ("multilingual", None)):
        with refused(f"C4.variant={options[0]!r} does not go with language={options[1]!r}"):
            C4(*options)
    with refused("c4/en has no split 'test'"):
        C4().open("test", str(tmp_path))
