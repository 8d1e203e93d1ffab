# SPDX-License-Identifier: Apache-2.0
import functools
import gzip
import http.server
import threading

import pytest

from switchx.data.corpora.multi30k import Multi30k
from tests.data.refusals import refused

NOWHERE = "http://127.0.0.1:9/"  # the discard port: nothing answers


def write(folder, split, **lines):
    folder.mkdir(parents=True, exist_ok=True)
    for language, texts in lines.items():
        (folder / f"{split}.{language}").write_text("".join(f"{text}\n" for text in texts))


@pytest.fixture
def server(tmp_path):
    """Serves the folder `tmp_path/remote`."""
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=tmp_path / "remote"
    )
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.mark.slow
def test_real_files(shared_dir, own_cache):
    data_dir = str(shared_dir / "data/multi30k")
    corpus = Multi30k("en", "de", address=NOWHERE)
    sizes = {split: len(corpus.open(split, data_dir)) for split in corpus.splits}
    assert sizes == {
        "train": 29000,
        "validation": 1014,
        "test_2016_flickr": 1000,
        "test_2017_flickr": 1000,
    }
    assert {
        "inputs": "Two young, White males are outside near many bushes.",
        "targets": "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    } in list(corpus.open("train", data_dir))


def test_any_pair_and_the_parent_folder(shared_dir, own_cache, monkeypatch):
    monkeypatch.setenv("SWITCHX_DATA_DIR", str(shared_dir / "data"))
    corpus = Multi30k("cs", "fr", address=NOWHERE)
    assert len(corpus.open("test_2016_flickr", None)) == 1000
    with refused("multi30k_cs_fr has no split 'test_2017_flickr'"):
        corpus.open("test_2017_flickr", None)


def test_unpacked_files_and_missing_test_sets(tmp_path):
    write(tmp_path / "multi30k", "train", en=["a dog ", "a\u2028cat"], de=["ein Hund", "Katze"])
    corpus = Multi30k("de", "en", address=NOWHERE)
    examples = list(corpus.open("train", str(tmp_path)))
    assert sorted(example["inputs"] for example in examples) == ["Katze", "ein Hund"]
    assert {"inputs": "Katze", "targets": "a\u2028cat"} in examples


def test_misaligned_files(tmp_path):
    write(tmp_path, "train", en=["1", "2", "3"], de=["1", "2"])
    with refused(
        f"{tmp_path}/train.en has 3 lines and {tmp_path}/train.de has 2, expected "
        "equally many and at least 1"
    ):
        Multi30k().open("train", str(tmp_path))
    write(tmp_path, "train", en=[], de=[])
    with refused("train.en has 0 lines and <any>train.de has 0, expected"):
        Multi30k().open("train", str(tmp_path))


def test_download(tmp_path, server):
    (tmp_path / "remote").mkdir()
    for split in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
        for language in ("en", "fr"):
            packed = gzip.compress(f"{split} {language}\n".encode())
            (tmp_path / "remote" / f"{split}.{language}.gz").write_bytes(packed)
    source = Multi30k("en", "fr", address=server).open("validation", str(tmp_path / "data"))
    assert list(source) == [{"inputs": "val en", "targets": "val fr"}]
    assert len(list((tmp_path / "data/multi30k").iterdir())) == 8
    # The second time nothing is fetched.
    again = Multi30k("en", "fr", address=NOWHERE).open("train", str(tmp_path / "data"))
    assert list(again) == [{"inputs": "train en", "targets": "train fr"}]


def test_no_network(tmp_path, own_cache):
    with refused(
        f"train.en.gz of Multi30K is in none of {tmp_path}, {own_cache} (or "
        "multi30k below them), and http://127.0.0.1:9/train.en.gz cannot be "
        "downloaded: <urlopen error [Errno 111] Connection refused>"
    ):
        Multi30k(address=NOWHERE).open("train", str(tmp_path))


def test_languages_are_checked():
    with refused("Multi30k.target='es'"):
        Multi30k("en", "es")
    with refused("Multi30k.source and target are both 'en'"):
        Multi30k("en", "en")
