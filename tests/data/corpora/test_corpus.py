# SPDX-License-Identifier: Apache-2.0
"""Prepared corpora: whole or not there, whichever process is killed or runs beside."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from switchx.data import data_dir as locations
from switchx.data.corpora.corpus import fingerprint_of
from switchx.data.corpora.prepared import Recipe, open_prepared
from switchx.files import write_atomically
from tests.data.refusals import refused


def test_order_is_argument_environment_cache(tmp_path, own_cache, monkeypatch):
    monkeypatch.setenv("SWITCHX_DATA_DIR", str(tmp_path / "environment"))
    given = str(tmp_path / "given")
    assert locations.data_dirs(given) == [Path(given), tmp_path / "environment", own_cache]
    assert locations.data_dirs(None) == [tmp_path / "environment", own_cache]
    monkeypatch.delenv("SWITCHX_DATA_DIR")
    assert locations.data_dirs(None) == [own_cache]


def test_cache_is_in_home_without_xdg(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert locations.cache_dir() == Path("/home/someone/.cache/switchx")


def test_what_is_prepared_is_found_before_anything_is_written(tmp_path, own_cache):
    assert locations.find_or_place("c/1", str(tmp_path)) == tmp_path / "c/1"
    (own_cache / "c/1").mkdir(parents=True)
    assert locations.find_or_place("c/1", str(tmp_path)) == own_cache / "c/1"


def test_folder_that_cannot_be_written_gives_way_to_the_cache(tmp_path, own_cache, monkeypatch):
    given = tmp_path / "read_only"
    given.mkdir()
    may_write = locations.os.access
    monkeypatch.setattr(
        locations.os, "access", lambda path, mode: path != given and may_write(path, mode)
    )
    assert locations.writable_dir(str(given)) == own_cache


def test_no_folder_to_write_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with refused(
        f"no folder for prepared data can be written: {tmp_path}/file/data, "
        f"{tmp_path}/file/switchx"
    ):
        locations.writable_dir(str(tmp_path / "file/data"))


@pytest.mark.parametrize(
    "name, problem",
    [
        (
            "gs://bucket/data",
            "is a remote address and this corpus is prepared in a local folder; name a folder "
            "on this machine",
        ),
        (__file__, "is a file; name a folder"),
    ],
)
def test_data_dir_that_is_no_folder(name, problem, monkeypatch):
    with refused(f"data_dir='{name}' {problem}"):
        locations.data_dirs(name)
    monkeypatch.setenv("SWITCHX_DATA_DIR", name)
    with refused(f"SWITCHX_DATA_DIR='{name}' {problem}"):
        locations.data_dirs(None)


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    file = tmp_path / "folder/file"
    write_atomically(file, b"old")

    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(locations.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]


_ROOT = Path(__file__).parents[3]

_OPEN = """
import sys, time
from switchx.data.corpora import prepared

def examples():
    for number in range(1000):
        if number == 500 and sys.argv[2] == "hang":
            print("half of it", flush=True)
            time.sleep(600)
        yield {"text": f"document {number}"}

recipe = prepared.Recipe("numbers", "key", ("text",), lambda: {"train": examples()})
source = prepared.open_prepared(recipe, "train", sys.argv[1])
print(len(source), len({source[i]["text"] for i in range(1000)}))
"""


def start(data_dir, mode=""):
    return subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(data_dir), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
    )


def recipe(**splits):
    return Recipe(
        "words",
        "key",
        ("text",),
        lambda: {split: ({"text": text} for text in texts) for split, texts in splits.items()},
    )


def test_source_is_random_access_and_can_be_pickled(tmp_path):
    texts = ["one", "zwei ö", "three\n"]
    source = open_prepared(recipe(train=texts, other=["four"]), "train", str(tmp_path))
    assert len(source) == 3
    assert sorted(example["text"] for example in source) == sorted(texts)
    copy = pickle.loads(pickle.dumps(source))
    assert [copy[i] for i in range(3)] == [source[i] for i in range(3)]
    assert repr(source) == (
        f"CorpusSource(name='words/train', fingerprint='{source.fingerprint}', "
        "fields=('text',))"
    )
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"^words/train has 3 examples; index={index}"):
            source[index]


def test_prepared_once_without_tensorflow_or_noise(tmp_path, capfd):
    open_prepared(recipe(train=["one"]), "train", str(tmp_path))
    source = open_prepared(recipe(train=["other"]), "train", str(tmp_path))
    assert source[0] == {"text": "one"}
    assert [p.name for p in tmp_path.iterdir()] == ["words"]
    assert "tensorflow" not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_fingerprint_is_of_the_content(tmp_path):
    first, second, third = (
        open_prepared(recipe(train=texts), "train", str(tmp_path / name)).fingerprint
        for name, texts in (("a", ["1", "2"]), ("b", ["1", "2"]), ("c", ["12"]))
    )
    assert first == second != third


def test_fingerprint_of_tells_parts_apart():
    assert fingerprint_of("a", "b") != fingerprint_of("ab") != fingerprint_of("a", b"b")
    assert len(fingerprint_of("a")) == 16


def test_unknown_split_names_the_others(tmp_path):
    with refused("words has no split 'test'"):
        open_prepared(recipe(train=["one"], dev=["two"]), "test", str(tmp_path))


def test_failure_leaves_nothing(tmp_path):
    def fail():
        yield {"text": "one"}
        raise ValueError("the second document is bad")

    bad = Recipe("words", "key", ("text",), lambda: {"train": fail()})
    with refused("the second document is bad"):
        open_prepared(bad, "train", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_full_disk(tmp_path):
    def fail():
        yield {"text": "one"}
        raise OSError(28, "No space left on device")

    bad = Recipe("words", "key", ("text",), lambda: {"train": fail()})
    with refused(
        f"words cannot be prepared in {tmp_path}/words/key/1.0.0: <any>No space left on device"
    ):
        open_prepared(bad, "train", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["dataset_info.json", "words-train.array_record-00000-of-00001"]
)
def test_damaged_since(tmp_path, name):
    open_prepared(recipe(train=["one"]), "train", str(tmp_path))
    (tmp_path / "words/key/1.0.0" / name).unlink()
    with refused(f"the prepared data of words is damaged: <any>{name}"):
        open_prepared(recipe(train=["one"]), "train", str(tmp_path))


@pytest.mark.parametrize("name", ["dataset_info.json", "metadata.json", "features.json"])
def test_descriptions_damaged_since(tmp_path, name):
    open_prepared(recipe(train=["one"]), "train", str(tmp_path))
    folder = tmp_path / "words/key/1.0.0"
    (folder / name).write_text('{"cut')
    with refused("the prepared data of words is damaged: "):
        open_prepared(recipe(train=["one"]), "train", str(tmp_path))


def test_a_record_damaged_in_the_middle_is_named(tmp_path):
    """Not at the start, where nothing is wrong; also of a copy that was pickled."""
    texts = ["".join(f"{number} {i} " for i in range(9000)) for number in range(40)]
    open_prepared(recipe(train=texts), "train", str(tmp_path))
    folder = tmp_path / "words/key/1.0.0"
    (file,) = folder.glob("*array_record*")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    file.write_bytes(content)
    source = pickle.loads(pickle.dumps(open_prepared(recipe(train=[]), "train", str(tmp_path))))
    refusals = []
    for index in range(len(source)):
        try:
            assert source[index]["text"] in texts
        except ValueError as error:
            refusals.append((index, str(error)))
    assert 0 < len(refusals) < len(texts)
    for index, said in refusals:
        start = f"the prepared data of words/train is damaged: record {index} of {file} cannot"
        assert said.startswith(start)
        assert said.endswith(f"; remove {folder}, and it is prepared anew")
    with pytest.raises(IndexError):
        source.records[len(texts)]


@pytest.mark.parametrize(
    "error, said",
    [
        (RecursionError("too deep"), "a record is nested too deeply; take it out"),
        (PermissionError("a.txt"), "see to what is read"),
    ],
)
def test_what_cannot_be_read_is_no_full_disk(tmp_path, error, said):
    def examples():
        yield {"text": "one"}
        raise error

    bad = Recipe("words", "key", ("text",), lambda: {"train": examples()})
    with refused(
        f"words cannot be prepared: {type(error).__name__} while its source is read: {error}"
        f"<any>{said}"
    ):
        open_prepared(bad, "train", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_killed_preparation_is_not_read(tmp_path):
    child = start(tmp_path, "hang")
    assert child.stdout.readline() == "half of it\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "numbers").exists()
    # Then two prepare it at once.
    children = [start(tmp_path) for _ in range(2)]
    assert [child.communicate() for child in children] == [("1000 1000\n", "")] * 2
    assert "numbers" in [path.name for path in tmp_path.iterdir()]


def test_second_of_two_takes_what_the_first_prepared(tmp_path):
    def meanwhile():
        open_prepared(recipe(train=["first"]), "train", str(tmp_path))
        return {"train": [{"text": "second"}]}

    late = Recipe("words", "key", ("text",), meanwhile)
    assert open_prepared(late, "train", str(tmp_path))[0] == {"text": "first"}
