# SPDX-License-Identifier: Apache-2.0
import ast
import sysconfig
from pathlib import Path

import pytest

from switchx.data.corpora import python_stdlib
from switchx.data.corpora.python_stdlib import PythonStdlib, clean
from tests.data.refusals import refused


@pytest.fixture(scope="module")
def splits(session_cache):
    data_dir = str(session_cache / "switchx")  # prepared once a session
    return {
        split: [example["text"] for example in PythonStdlib().open(split, data_dir)]
        for split in ("train", "validation")
    }


def test_size(splits):
    train, validation = (sum(map(len, splits[s])) for s in ("train", "validation"))
    has_tests = (Path(sysconfig.get_path("stdlib")) / "test/test_grammar.py").exists()
    assert train + validation > (20e6 if has_tests else 6e6)
    assert 0.02 < validation / (train + validation) < 0.1
    assert max(map(len, splits["train"])) <= 8000


def test_holds_source_and_documentation(splits):
    whole = "\n".join(splits["train"] + splits["validation"])
    assert "class Path(PurePath" in whole or "class Path(PathBase" in whole
    assert "def urlopen(" in whole
    assert 'The "assert" statement\n**********************\n' in whole  # a topic of pydoc
    assert "LATIN CAPITAL LETTER A WITH RING ABOVE" not in whole  # tables of encodings
    assert "topics = {'assert'" not in whole  # their source is the same again


def test_splits_share_no_document(splits):
    assert not set(splits["train"]) & set(splits["validation"])
    assert len(set(splits["train"])) > 0.99 * len(splits["train"])


def test_source_stays_source():
    text = Path(python_stdlib.__file__).read_text()
    assert clean([text]) == [text]


def test_blocks_that_came_before_are_dropped():
    licence = (
        "# Copyright 2006, Someone. All rights reserved, and so on for a long line of text.\n\n"
    )
    assert len(licence) > 80
    assert clean([licence + "import a\n\n", licence + "import a\n\n", licence]) == [
        licence + "import a\n\n",
        "import a\n\n",
    ]


def test_tables_are_dropped():
    table = "names = {\n" + "".join(f"    {n:#x}: 'name',\n" for n in range(50)) + "}\n\n"
    calls = "".join(f"call({n})\n" for n in range(50))
    ast.parse(table + calls)
    assert clean([table + calls]) == [calls]
    assert clean([table]) == []


def test_files_that_do_not_decode_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xf6'\n")
    (tmp_path / "plain.py").write_text("y = 1\n")
    for folder in ("site-packages", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("z = 1\n")
    (tmp_path / "_sysconfigdata__linux.py").write_text("build_time_vars = {}\n")
    data_dir = str(tmp_path / "data")
    texts = {
        example["text"]
        for split in ("train", "validation")
        for example in PythonStdlib().open(split, data_dir)
    }
    assert texts == {"# coding: latin-1\nx = 'ö'\n", "y = 1\n"}


def test_another_interpreter_is_another_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    (tmp_path / "lib").mkdir()
    fingerprints = set()
    for version in ("1", "2"):
        for name in ("a", "b"):
            (tmp_path / "lib" / f"{name}.py").write_text(f"{name} = {version}\n")
        source = PythonStdlib().open("train", str(tmp_path / "data"))
        assert source[0]["text"].endswith(f"= {version}\n")
        fingerprints.add(source.fingerprint)
    assert len(fingerprints) == 2


def test_interpreter_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(python_stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    with refused(
        f"no source files of the standard library in {tmp_path}: this interpreter comes without"
    ):
        PythonStdlib().open("train", None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"validation_fraction": 0.0}, "validation_fraction=0.0"),
        ({"max_characters": 0}, "max_characters=0"),
    ],
)
def test_options_are_checked(options, message):
    with refused(message):
        PythonStdlib(**options)
