# SPDX-License-Identifier: Apache-2.0
"""A folder is there whole or not at all, and its manifest knows its bytes."""

import hashlib
import json

import pytest

from switchx.manifest import (
    check_file,
    require_free,
    sha256_of,
    write_checked,
)
from tests.data.refusals import refused

SHA256 = hashlib.sha256(b"gate").hexdigest()


def write(folder):
    (folder / "words.txt").write_text("gate")


def test_the_manifest_has_sizes_and_checksums_of_all_and_of_itself(tmp_path):
    size = write_checked(tmp_path / "a", "about.json", {"format": "x"}, write)
    text = (tmp_path / "a/about.json").read_bytes()
    content = json.loads(text)
    assert content.pop("sha256") == sha256_of(content)
    assert content == {"format": "x", "files": {"words.txt": [4, SHA256]}}
    assert size == len(text) + 4
    check_file(tmp_path / "a", "about.json", "words.txt", 4, SHA256, again="again")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("other.txt", "gate", "<any>other.txt is missing; copy it"),
        ("words.txt", "gat", "<any>words.txt has 3 bytes, not 4; copy it"),
        ("words.txt", "gats", "<any>words.txt has changed since it was written; copy it"),
        ("../a", "gate", "<any>about.json names the file '../a', which is not in <any>"),
    ],
)
def test_a_file_that_is_not_as_it_was_is_named(tmp_path, name, text, said):
    (tmp_path / "words.txt").write_text(text)
    with refused(said):
        check_file(tmp_path, "about.json", name, 4, SHA256, again="copy it")


def test_nothing_is_left_of_what_could_not_be_written(tmp_path):
    def fail(folder):
        write(folder)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_checked(tmp_path / "a", "about.json", {}, fail)
    assert list(tmp_path.iterdir()) == []


def test_only_a_free_place_is_written_to(tmp_path):
    (tmp_path / "file").touch()
    with refused(f"{tmp_path} is not empty; give a folder that is not there yet"):
        require_free(tmp_path)
    with refused(f"{tmp_path / 'file'} is a file; give a folder that is not there yet"):
        require_free(tmp_path / "file")
    with refused("<any>file/a cannot be made: <any>; give another folder"):
        require_free(tmp_path / "file" / "a")
