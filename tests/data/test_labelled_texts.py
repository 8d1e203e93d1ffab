# SPDX-License-Identifier: Apache-2.0
"""Texts with labels: files are labels, or a column is; nothing is lost in silence."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from switchx.data.labelled_texts import MAX_CHARACTERS, read_labelled_texts
from tests.data.refusals import refused


def pairs(read) -> list[tuple[str, str]]:
    return [(read.labels[k], text) for k, text in zip(read.label_R, read.texts, strict=True)]


def test_files_are_labels_and_their_paragraphs_texts(tmp_path):
    paragraphs = [f"{n} " * 150 for n in range(100, 120)]
    (tmp_path / "numbers.txt").write_text("\n\n".join(paragraphs))
    with gzip.open(tmp_path / "words.txt.gz", "wt") as file:
        file.write("a few words\n")
    read = read_labelled_texts([str(tmp_path)])
    assert read.labels == ("numbers", "words") and read.targets is None
    own = [text for label, text in pairs(read) if label == "numbers"]
    assert "".join(own).split() == " ".join(paragraphs).split()
    assert len(own) > 5 and max(map(len, own)) <= MAX_CHARACTERS
    assert pairs(read)[-1] == ("words", "a few words\n")
    assert f"documents: {len(own)} in numbers, 1 in words" in str(read.account)


ROWS = [("what is a?", "kind 1", "an answer"), ("where is b?", "kind 2", "there")]


NAMES = ("text", "kind", "target")


def write(folder, kind: str) -> str:
    path = folder / f"rows{kind}"
    table = pyarrow.table(list(map(list, zip(*ROWS, strict=True))), NAMES)
    if kind == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif kind == ".jsonl":
        path.write_text("\n".join(map(json.dumps, table.to_pylist())))
    else:
        path.write_text("\n".join("\t".join(row) for row in (NAMES, *ROWS)))
    return str(path)


@pytest.mark.parametrize("kind", [".tsv", ".jsonl", ".parquet"])
def test_a_column_is_the_label(tmp_path, kind):
    path = write(tmp_path, kind)
    read = read_labelled_texts([path], label_column="kind", target_column="target")
    assert pairs(read) == [(kind, text) for text, kind, _ in ROWS]
    assert read.targets == [target for *_, target in ROWS]
    read = read_labelled_texts([path], text_column="target")
    assert pairs(read) == [("rows", target) for *_, target in ROWS]
    with refused("row 1 has no 'question'; its columns are text, kind, target; name others"):
        read_labelled_texts([path], text_column="question")


def test_labels_are_values_of_a_row(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "a", "kind": 1}, {"text": "b", "kind": True}, {"text": " ", "kind": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_labelled_texts([str(path)], label_column="kind")
    assert pairs(read) == [("1", "a"), ("True", "b")]
    assert "1 blank texts" in str(read.account)
    for wrong in (None, "", [1]):
        path.write_text(json.dumps({"text": "a", "kind": wrong}))
        with refused(f"{path}: row 1: kind is {wrong!r}, no label; give each text one"):
            read_labelled_texts([str(path)], label_column="kind")
    path.write_text(json.dumps({"text": 5}))
    with refused("row 1: text is 5, no text; name another column"):
        read_labelled_texts([str(path)])


def test_files_without_labels_or_texts_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with refused(f"{tmp_path}/a.txt is a text without columns, and text, kind are asked for"):
        read_labelled_texts([str(tmp_path / "a.txt")], label_column="kind")
    (tmp_path / "empty.txt").write_text("\n \n")
    with refused(f"{tmp_path}/empty.txt holds no text; add some"):
        read_labelled_texts([str(tmp_path)])
    with refused("does not exist"):
        read_labelled_texts([str(tmp_path / "none.txt")])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"")
    with refused("there is no file of text; give files that end in .tsv"):
        read_labelled_texts([str(tmp_path / "folder")])


def test_files_of_one_name_have_their_folders_too(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"text of {folder}")
    paths = [str(tmp_path / folder) for folder in ("x", "y")]
    assert read_labelled_texts(paths).labels == ("x/a", "y/a")
    (tmp_path / "x" / "a.jsonl").write_text('{"text": "more"}')
    with refused("two files have the label x/a; rename one of them"):
        read_labelled_texts(paths)
