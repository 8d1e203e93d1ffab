# SPDX-License-Identifier: Apache-2.0
import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.corpora.text_files import cut_lines, read_lines, validation_digests
from tests.data.refusals import refused


def test_lines_of_plain_and_packed_files(tmp_path):
    content = "\ufeffone\r\ntwo \u2028 é\n\nlast".encode()
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    for name in ("plain", "packed.gz"):
        assert list(read_lines(tmp_path / name)) == ["one\n", "two \u2028 é\n", "\n", "last"]


@pytest.mark.parametrize("name, pack", [("bad.txt", bytes), ("bad.txt.gz", gzip.compress)])
def test_not_utf8_names_file_and_offset(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(b"gut\n" + "schön".encode("latin-1")))
    with refused(
        f"{tmp_path / name} is not UTF-8: byte 0xf6 at offset 7; convert it, as with `iconv -f "
        "LATIN1 -t UTF-8`"
    ):
        list(read_lines(tmp_path / name))


def test_unreadable_names_file(tmp_path):
    cut_off = tmp_path / "cut_off.gz"
    cut_off.write_bytes(gzip.compress(b"text" * 100)[:-12])
    with refused(
        f"{cut_off} cannot be read: Compressed file ended before the end-of-stream marker was "
        "reached; check that it is whole and that you may read it"
    ):
        list(read_lines(cut_off))
    not_packed = tmp_path / "not_packed.gz"
    not_packed.write_bytes(b"text")
    with refused(f"{not_packed} cannot be read: Not a gzipped file<any>"):
        list(read_lines(not_packed))


def test_permission_denied_names_file(tmp_path, monkeypatch):
    def deny(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", deny)
    with refused(
        "secret.txt cannot be read: [Errno 13] Permission denied: 'secret.txt'; check that it "
        "is whole and that you may read it"
    ):
        list(read_lines(Path("secret.txt")))


def cut(text, max_characters):
    return list(cut_lines(text.splitlines(True), max_characters))


def test_cut_prefers_top_level_then_paragraphs_then_lines():
    source = "import a\n\ndef f():\n    x\n\n    y\n\ndef g():\n    z\n"
    assert cut(source, len(source)) == [source]
    # 33 characters up to g; g would be too much.
    assert cut(source, 35) == ["import a\n\ndef f():\n    x\n\n    y\n\n", "def g():\n    z\n"]
    # f alone has 23; cut before `y`, as an indented line follows a blank one.
    assert cut(source, 17) == [
        "import a\n\n",
        "def f():\n    x\n\n",
        "    y\n\n",
        "def g():\n    z\n",
    ]
    assert cut("aa\nbb\ncc\n", 6) == ["aa\nbb\n", "cc\n"]
    assert cut("a line longer than that\nb\n", 5) == ["a line longer than that\n", "b\n"]
    assert cut("\n\n \n", 2) == []


@given(st.lists(st.sampled_from(["a\n", "  bb\n", "\n", "cccc\n"])), st.integers(5, 20))
def test_cut_loses_only_blank_documents(lines, max_characters):
    documents = list(cut_lines(lines, max_characters))
    assert all(len(document) <= max_characters for document in documents)
    assert "".join(documents).split() == "".join(lines).split()


def test_held_out_are_the_lowest_digests():
    digests = [bytes([n]) + bytes(7) for n in range(256)]
    held_out = validation_digests([*digests, digests[3]], 0.05, "it")
    assert held_out == frozenset(digests[:13])  # 13 / 256 < 0.05 < 14 / 256
    assert validation_digests(digests[100:], 0.05, "it") == {digests[100]}
    assert validation_digests(digests[:3], 0.05, "it") == set(digests[:2])


def test_one_document_cannot_be_split():
    with refused(
        "it holds 1 distinct documents and a split into train and validation needs at least 2; "
        "add text, or cut it finer by a lower max_characters"
    ):
        validation_digests([b"12345678"] * 2, 0.05, "it")
