# SPDX-License-Identifier: Apache-2.0
"""Packed files are read to their end or refused, whatever was done to them."""

import bz2
import gzip
import importlib.util
import lzma
import sys

import pytest

from switchx.data.corpora.packed_files import name_of, read_lines
from tests.data.refusals import refused

PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def packer(packing):
    if packing != ".zst":
        return PACKERS[packing]
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.compress
    if importlib.util.find_spec("backports") is None:
        pytest.skip("backports.zstd is not installed")
    return pytest.importorskip("backports.zstd").compress


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zst"])
def test_streams_one_after_another(tmp_path, packing):
    pack = packer(packing)
    file = tmp_path / f"A.TXT{packing.upper()}"
    bom = b"\xef\xbb\xbf"
    content = pack(bom + "one ö\r\n".encode()) + pack(bom + b"two\n")
    file.write_bytes(content)
    assert list(read_lines(file)) == ["one ö\n", "two\n"]
    for cut in range(1, len(content)):
        file.write_bytes(content[:cut])
        try:
            assert list(read_lines(file)) == ["one ö\n"]  # cut between the streams
            assert cut == len(pack(bom + "one ö\r\n".encode()))
        except ValueError as error:
            assert str(error).startswith(f"{file} cannot be read: ")
    file.write_bytes(content + b"something else")
    with refused(f"{file} cannot be read: "):
        list(read_lines(file))
    file.write_bytes(b"")
    with refused(f"{file} cannot be read: it ends before its end marker"):
        list(read_lines(file))


def test_lines_that_end_in_a_carriage_return(tmp_path):
    file = tmp_path / "old.txt"
    file.write_bytes(b"\xef\xbb\xbfone\rtwo\r\rthree")
    assert list(read_lines(file)) == ["one\n", "two\n", "\n", "three"]
    file.write_bytes(b"a\rb\nc\n")  # one that ends lines otherwise keeps it
    assert list(read_lines(file)) == ["a\rb\n", "c\n"]


def test_names():
    assert name_of("Notes.TXT.gz") == ("Notes", ".txt", ".gz")
    assert name_of("a.tar.ZST") == ("a", ".tar", ".zst")
    assert name_of("LICENSE") == ("LICENSE", "", "")
