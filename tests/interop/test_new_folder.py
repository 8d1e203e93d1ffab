# SPDX-License-Identifier: Apache-2.0
"""A folder that is written whole or not at all."""

import pytest

from switchx.manifest import new_folder
from tests.data.refusals import refused


def test_it_gets_its_name_when_all_is_written(tmp_path):
    with new_folder(tmp_path / "a/b") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a/b").exists()
    assert (tmp_path / "a/b/file").read_text() == "x"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_an_empty_folder_may_be_there(tmp_path):
    (tmp_path / "a").mkdir()
    with new_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
    assert (tmp_path / "a/file").exists()


def test_nothing_is_left_of_one_that_failed(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "file").write_text("x")
    for taken in (tmp_path, tmp_path / "file"):
        with (
            refused(f"{taken} exists; give a folder that is not there yet"),
            new_folder(taken),
        ):
            pass
    with pytest.raises(ValueError, match="cannot be made"), new_folder(tmp_path / "file/a"):
        pass
    assert (tmp_path / "file").read_text() == "x"
