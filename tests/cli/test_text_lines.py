# SPDX-License-Identifier: Apache-2.0
"""Lines are what editors call lines; wrong ones are all named."""

import io
import sys
import types

import pytest

from switchx.cli.text.lines import read_lines, refuse_lines
from tests.data.refusals import refused


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\n b \r\n", ["a", " b "]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\xef\xbb\xbfa", ["a"]),
        ("é\u2028\x0c\x85c\nd".encode(), ["é\u2028\x0c\x85c", "d"]),
    ],
)
def test_lines_of_a_file_and_of_standard_input(tmp_path, monkeypatch, data, lines):
    (tmp_path / "in.txt").write_bytes(data)
    assert read_lines(str(tmp_path / "in.txt")) == lines
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
    assert read_lines("-") == lines


def test_lines_that_are_not_utf8_are_named(tmp_path):
    file = tmp_path / "in.txt"
    file.write_bytes(b"a\nb\xff\nc\n\xe9t\xe9")
    with refused(
        f"{file}: line 2 is not UTF-8: byte 2 is 0xff; line 4 is not UTF-8: byte 1 is 0xe9. "
        "Nothing was done; correct or remove what is wrong"
    ):
        read_lines(str(file))


def test_no_lines_and_no_file(tmp_path):
    (tmp_path / "in.txt").touch()
    with refused(f"{tmp_path}/in.txt has no lines; write one input a line"):
        read_lines(f"{tmp_path}/in.txt")
    with refused(
        f"--input={tmp_path}/no cannot be read (No such file or directory); name a text file, "
        "or - for standard input"
    ):
        read_lines(f"{tmp_path}/no")
    with refused("--input=<any> cannot be read (Is a directory); name<any>"):
        read_lines(str(tmp_path))


def test_many_wrong_lines_are_counted():
    refuse_lines("-", [])
    with refused(
        "standard input: line 1 is empty; <any>line 10 is empty; and 3 more lines.<any>"
    ):
        refuse_lines("-", [(number, "is empty") for number in range(1, 14)])
