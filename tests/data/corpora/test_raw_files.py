# SPDX-License-Identifier: Apache-2.0
"""Rows of files as they were written, and what is said of files that are not of their kind."""

import gzip
import json
from collections import Counter

import pytest

from switchx.data.corpora.raw_files import RawFile, read_rows
from tests.data.refusals import refused

TALLY = Counter()


def rows(tmp_path, name, content, **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(path, RawFile(name, **options), TALLY))


def test_tables(tmp_path):
    # Quotes are text in .tsv, and quotes in .csv; a byte order mark and \r\n go.
    tsv = '\ufeffa\tb\r\n1\t"x" y\r\nü\t\r\n'
    assert rows(tmp_path, "t.tsv", tsv) == [{"a": "1", "b": '"x" y'}, {"a": "ü", "b": ""}]
    assert rows(tmp_path, "t.tsv", "1\tx\n", has_header=False) == [{"0": "1", "1": "x"}]
    csv = 'text,kind\n"one, two\nthree",k\n'
    assert rows(tmp_path, "t.csv", csv) == [{"text": "one, two\nthree", "kind": "k"}]
    packed = gzip.compress(csv.encode())
    assert rows(tmp_path, "t.csv.gz", packed) == [{"text": "one, two\nthree", "kind": "k"}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", "q,a\nx,y\nHi, you,z\n", "t.csv:3: expected 2 cells, q, a, got 3, ['Hi'"),
        ("t.csv", "q,a\nx\n", "t.csv:2: expected 2 cells, q, a, got 1"),
        ("t.tsv", "q\ta\nx\ty\tz\n", "t.tsv:2: expected 2 cells, q, a, got 3"),
        ("t.csv", "q,a,q\n1,2,3\n", "t.csv:1 has the column 'q' twice"),
        ("t.jsonl", '{"q": 1, "q": 2}\n', "t.jsonl:1: an object has the key 'q' twice"),
        (
            "t.csv",
            "q,a\n" + "x,y\n" * 10 + 'x,"y\n' + "x,y\n" * 90,
            "t.csv:12: the quote that opens here is never closed",
        ),
        (
            "t.csv",
            "q,a\n" + "x,y\n" * 10 + 'x,"y\n' + "x,y\n" * 20 + 'x,"y"\n' + "x,y\n" * 9,
            "t.csv:12: the quote that opens here is closed inside of a cell, 21 lines on",
        ),
        ("t.csv", 'q,a\nx,5" wide\n', "t.csv:2: a quote inside of a cell that begins without"),
    ],
)
def test_tables_with_a_fault(tmp_path, name, content, said):
    with refused(said):
        rows(tmp_path, name, content)


def test_blank_lines_are_skipped_and_counted(tmp_path):
    TALLY.clear()
    for name, mark in (("t.csv", ","), ("t.tsv", "\t")):
        text = f"\n\nq{mark}a\n\n1{mark}2\n \n\n3{mark}\n\n\n"
        assert rows(tmp_path, name, text) == [{"q": "1", "a": "2"}, {"q": "3", "a": ""}]
    assert TALLY == {"rows": 4, "blank lines": 14}
    # In a table of one column a blank cell is a row; a line without anything is none.
    assert rows(tmp_path, "t.csv", 'q\n""\n\n') == [{"q": ""}]


def test_json_and_lines(tmp_path):
    row = {"q": "é", "answers": [{"text": "a"}]}
    line = json.dumps(row)
    assert rows(tmp_path, "t.jsonl", f"{line}\n\n{line}\n") == [row, row]
    assert rows(tmp_path, "t.json", f"[{line}]") == [row]
    assert rows(tmp_path, "t.json", f'{{"data": [{line}]}}', rows_in="data") == [row]
    assert rows(tmp_path, "t.txt", "NUM:dist How far ?\n\n") == [{"text": "NUM:dist How far ?"}]


def test_short_rows_are_an_error_or_counted(tmp_path):
    with refused("t.tsv:3: expected 2 cells, a, b, got 1"):
        rows(tmp_path, "t.tsv", "a\tb\n1\t2\n3\n")
    TALLY.clear()
    found = rows(tmp_path, "t.tsv", "a\tb\n1\t2\n3\n4\t5\n", skips_short_rows=True)
    assert found == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]
    assert TALLY == {"rows": 2, "rows with too few cells": 1}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", '{"a": 1}\n{"a"\n', "t.jsonl:2: not JSON"),
        ("t.jsonl", f'{{"a": 1}}\n{{"a": {"1" * 5000}}}\n', "t.jsonl:2: Exceeds the limit"),
        ("t.jsonl", "[1]\n", "t.jsonl:1: expected an object a row, got list"),
        ("t.json", "{}", "t.json: expected a list of rows, got dict"),
        ("t.json", '{"rows": []}', "t.json: expected rows under 'data', got the keys rows"),
        ("t.json", "[3]", "t.json: expected an object a row, got int"),
        ("t.json", b"[\xff]", "t.json is not UTF-8"),
        ("t.json.gz", b"no gzip", "t.json.gz cannot be read"),
        ("t.parquet", "x", "t.parquet cannot be read: <any>Parquet"),
        ("t.xml", "x", "t.xml: rows are read of .tsv, .csv, .jsonl, .json, .txt"),
    ],
)
def test_files_of_another_kind(tmp_path, name, content, said):
    with refused(said):
        rows(tmp_path, name, content, rows_in="data" if "under" in said else None)
