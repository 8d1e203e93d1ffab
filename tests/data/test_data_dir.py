# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from switchx.data import data_dir as locations
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
        f"{tmp_path}/file/switchx; set DATA_DIR or SWITCHX_DATA_DIR to one that can"
    ):
        locations.writable_dir(str(tmp_path / "file/data"))


@pytest.mark.parametrize(
    "name, problem",
    [
        (
            "gs://bucket/data",
            "is a remote address and this corpus is prepared in a local folder; name a folder, "
            "or mount the bucket",
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
    locations.write_atomically(file, b"old")

    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(locations.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        locations.write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file]
