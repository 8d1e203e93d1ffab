# SPDX-License-Identifier: Apache-2.0
"""Folders that are there whole or not at all, whose manifest knows their bytes."""

import hashlib
import json
import subprocess
import zlib

import pytest

from switchx.whole_folders import (
    checksum_of,
    damages,
    new_folder,
    num_bytes,
    read_manifest,
    require_free,
    write_manifest,
)
from tests.data.refusals import refused

ABOUT = "about.json"
CHECKSUMS = pytest.mark.parametrize("checksum", ["crc32", "sha256"])
DATA = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    """Three files, one of them in a folder; the manifest is each test's to write."""
    folder = tmp_path / "folder"
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "array").write_bytes(DATA)
    (folder / "empty").write_bytes(b"")
    (folder / "log").write_text("changes later")
    return folder


def faults(folder, checksum, *, read=True) -> list[str]:
    files = read_manifest(folder, ABOUT, checksum)["files"]
    return list(damages(folder, files, checksum if read else None))


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@CHECKSUMS
def test_it_has_sizes_and_checksums_of_all_files_and_of_itself(folder, checksum):
    written = write_manifest(folder, ABOUT, {"step": 3}, checksum, left_out=("log",))
    of = zlib.crc32 if checksum == "crc32" else lambda data: hashlib.sha256(data).hexdigest()
    assert written == {
        "step": 3,
        "files": {"empty": [0, of(b"")], "params/array": [len(DATA), of(DATA)]},
    }
    content = json.loads((folder / ABOUT).read_text())
    assert content == written | {checksum: checksum_of(written, checksum)}
    assert read_manifest(folder, ABOUT, checksum) == content
    assert faults(folder, checksum) == []
    assert num_bytes(folder) == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_crc32_is_gzips_and_a_cut_or_missing_file_is_found_by_size(folder):
    # An implementation that is not ours: the trailer of a gzip file.
    write_manifest(folder, ABOUT, {}, "crc32")
    command = ["gzip", "-c", str(folder / "params/array")]
    gzip = subprocess.run(command, capture_output=True, check=True).stdout
    expected = int.from_bytes(gzip[-8:-4], "little")
    assert read_manifest(folder, ABOUT, "crc32")["files"]["params/array"][1] == expected
    (folder / "params/array").write_bytes(DATA[:-1])
    (folder / "empty").unlink()
    assert faults(folder, "crc32", read=False) == [
        "its file empty is missing",
        "its file params/array has 10239 bytes, not 10240",
    ]


@CHECKSUMS
@pytest.mark.parametrize("position", [0, 5000, -1])
def test_a_flipped_bit_is_found_by_reading(folder, checksum, position):
    write_manifest(folder, ABOUT, {}, checksum)
    flip(folder / "params/array", position)
    assert faults(folder, checksum) == [
        "its file params/array has changed since it was written"
    ]
    assert faults(folder, checksum, read=False) == []


@CHECKSUMS
def test_any_flipped_bit_in_the_manifest_itself(folder, checksum):
    write_manifest(folder, ABOUT, {"step": 3}, checksum)
    path = folder / ABOUT
    text = path.read_bytes()
    whole = json.loads(text)
    for position in range(len(text)):
        flip(path, position)
        with pytest.raises(ValueError, match=f"its {ABOUT} is damaged"):
            read_manifest(folder, ABOUT, checksum)
            pytest.fail(f"read with byte {position} changed")
    path.write_bytes(text)
    assert read_manifest(folder, ABOUT, checksum) == whole
    path.unlink()
    with pytest.raises(ValueError, match=f"it has no {ABOUT}, so it was not written to its"):
        read_manifest(folder, ABOUT, checksum)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b"])
def test_files_outside_of_the_folder_are_not_read(folder, name):
    (said,) = damages(folder, {name: [1, 0]}, "crc32")
    assert said == f"its manifest names {name!r}, which is outside of it"


def test_an_empty_folder_may_be_there_and_nothing_is_overwritten(tmp_path):
    (tmp_path / "a").mkdir()
    with new_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
    assert (tmp_path / "a/file").exists()
    (tmp_path / "file").write_text("x")
    for taken in (tmp_path, tmp_path / "file"):
        with refused(f"{taken} exists"):
            require_free(taken)
        with refused(f"{taken} exists"), new_folder(taken):
            pass
    with refused("file/a cannot be made"), new_folder(tmp_path / "file/a"):
        pass
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_gets_its_name_when_all_is_written_or_is_gone(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "a/b") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a/b").exists()
    assert (tmp_path / "a/b/file").read_text() == "x"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
