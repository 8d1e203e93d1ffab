# SPDX-License-Identifier: Apache-2.0
"""Manifests: every kind of damage to every file is found."""

import subprocess
import zlib

import pytest

from switchx.manifest import find_damage, read_manifest, write_manifest


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "30"
    (folder / "params" / "d").mkdir(parents=True)
    (folder / "params" / "d" / "array").write_bytes(bytes(range(256)) * 40)
    (folder / "params" / "_METADATA").write_text("{}")
    (folder / "empty").write_bytes(b"")
    write_manifest(folder, 30, -1.5, {"neg_log_perplexity": -1.5})
    return folder


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_whole_checkpoint(checkpoint):
    assert find_damage(checkpoint, checksums=True) is None
    manifest = read_manifest(checkpoint)
    assert (manifest.step, manifest.score) == (30, -1.5)
    assert manifest.metrics == {"neg_log_perplexity": -1.5}
    data = bytes(range(256)) * 40
    assert manifest.files["params/d/array"] == [10240, zlib.crc32(data)]


def test_checksum_is_the_one_that_gzip_writes(checkpoint):
    """An implementation of CRC-32 that is not ours: the trailer of a gzip file."""
    path = checkpoint / "params" / "d" / "array"
    gzip = subprocess.run(["gzip", "-c", str(path)], capture_output=True, check=True).stdout
    expected = int.from_bytes(gzip[-8:-4], "little")
    assert read_manifest(checkpoint).files["params/d/array"][1] == expected


@pytest.mark.parametrize("position", [0, 5000, -1])
def test_flipped_bit(checkpoint, position):
    flip(checkpoint / "params" / "d" / "array", position)
    expected = "its file params/d/array has changed since it was written"
    assert find_damage(checkpoint, checksums=True) == expected
    assert find_damage(checkpoint, checksums=False) is None  # says the docstring


def test_truncated_and_missing_files(checkpoint):
    path = checkpoint / "params" / "d" / "array"
    path.write_bytes(path.read_bytes()[:-1])
    expected = "its file params/d/array has 10239 bytes, not 10240"
    assert find_damage(checkpoint, checksums=False) == expected
    path.unlink()
    expected = "its file params/d/array is missing"
    assert find_damage(checkpoint, checksums=False) == expected


def test_any_flipped_bit_in_the_manifest_itself(checkpoint):
    path = checkpoint / "manifest.json"
    text = path.read_bytes()
    for position in range(len(text)):
        flip(path, position)
        assert find_damage(checkpoint, checksums=False) is not None, position
        path.write_bytes(text)


def test_missing_manifest_and_manifest_of_another_step(checkpoint):
    checkpoint = checkpoint.rename(checkpoint.with_name("40"))
    assert find_damage(checkpoint, checksums=False) == "its manifest.json is of step 30"
    (checkpoint / "manifest.json").unlink()
    expected = "it has no manifest.json, so its save did not finish"
    assert find_damage(checkpoint, checksums=False) == expected
