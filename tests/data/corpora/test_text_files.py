# SPDX-License-Identifier: Apache-2.0
"""A user's own text: files, lines, documents, and which of them are held out."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.corpora.text_files import TextFiles, cut_lines, hold_out, read_lines
from tests.data.refusals import refused


def read(corpus, data_dir):
    return {
        split: sorted(
            tuple(example.values()) for example in corpus.open(split, str(data_dir / "data"))
        )
        for split in ("train", "validation")
    }


def test_folder_of_all_kinds(tmp_path):
    texts = tmp_path / "texts"
    (texts / "below").mkdir(parents=True)
    (texts / "a.txt").write_text("one\n\ntwo\n")
    (texts / "b.txt.gz").write_bytes(gzip.compress("drei ö\n".encode()))
    (texts / "below/c.jsonl").write_text(
        '{"text": "four\\n", "url": "x"}\n\n{"text": "five"}\n'
    )
    (texts / "below/d.json.gz").write_bytes(gzip.compress(b'{"text": "six"}\n{"text": " "}\n'))
    (texts / "ignored.md").write_text("seven")
    splits = read(TextFiles(str(texts)), tmp_path)
    found = sorted(splits["train"] + splits["validation"])
    assert found == [
        (t,) for t in sorted(["one\n\ntwo\n", "drei ö\n", "four\n", "five", "six"])
    ]
    assert len(splits["validation"]) >= 1


def test_pairs(tmp_path):
    file = tmp_path / "pairs.jsonl"
    pairs = [{"inputs": f"in {n}", "targets": f"out {n}"} for n in range(100)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    source = TextFiles(str(file)).open("train", str(tmp_path / "data"))
    assert source.fields == ("inputs", "targets")
    assert all(example["inputs"][3:] == example["targets"][4:] for example in source)
    splits = read(TextFiles(str(file)), tmp_path)
    assert len(splits["train"]) + len(splits["validation"]) == 100
    assert 1 <= len(splits["validation"]) <= 15


def test_real_text_is_split_whole(shared_dir, tmp_path):
    file = shared_dir / "data/text/tinyshakespeare.txt"
    splits = read(TextFiles(str(file)), tmp_path)
    documents = [text for (text,) in splits["train"] + splits["validation"]]
    assert sum(map(len, documents)) == len(file.read_text())
    assert sorted("".join(documents)) == sorted(file.read_text())
    assert 0.01 < sum(len(t) for (t,) in splits["validation"]) / 1115394 < 0.12
    whole = file.read_text()
    assert all(text in whole for text in documents)


@pytest.mark.parametrize("num_documents", [2, 3, 10])
def test_validation_is_never_empty(tmp_path, num_documents):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(num_documents)))
    splits = read(TextFiles(str(file)), tmp_path)
    assert splits["train"] and splits["validation"]
    assert len(splits["train"]) + len(splits["validation"]) == num_documents


def test_equal_documents_are_on_one_side(tmp_path):
    file = tmp_path / "twice.jsonl"
    file.write_text("".join(f'{{"text": "document {n % 40}"}}\n' for n in range(80)))
    splits = read(TextFiles(str(file), validation_fraction=0.5), tmp_path)
    assert len(splits["train"]) + len(splits["validation"]) == 80
    assert not set(splits["train"]) & set(splits["validation"])


def test_changed_files_are_prepared_anew(tmp_path):
    file = tmp_path / "text.txt"
    fingerprints = set()
    for number, text in enumerate(["one\n\ntwo\n", "one\n\nten\n"]):
        file.write_text(text)
        os.utime(file, (number, number))
        corpus = TextFiles(str(file), max_characters=5)
        splits = read(corpus, tmp_path)
        assert "".join(t for (t,) in sorted(splits["train"] + splits["validation"])) == text
        fingerprints.add(corpus.open("train", str(tmp_path / "data")).fingerprint)
    assert len(fingerprints) == 2


def test_several_paths(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    corpus = TextFiles([str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), str(tmp_path)])
    splits = read(corpus, tmp_path)
    assert sorted(splits["train"] + splits["validation"]) == [("a",), ("b",)]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "x"}\n{"text": 3}\n', ":2: expected texts under text, got the k"),
        (
            "a.jsonl",
            '{"inputs": "x", "targets": "y"}\n{"inputs": "x"}\n',
            ":2: expected texts under inputs and targets, got the keys inputs",
        ),
        (
            "a.jsonl",
            '{"text": "half a pair: \\ud800"}\n',
            ":1: text has half a surrogate pair, U+D800, at character 13",
        ),
        ("a.jsonl", '{"content": "x"}\n', ":1: expected the key text, or inputs and targets"),
        ("a.jsonl", '["x"]\n', ":1: expected an object a row, got list"),
        ("a.jsonl", "{'text': 'x'}\n", ":1: not JSON (Expecting property name enclosed in "),
        ("a.jsonl", "\n", ": no records"),
        ("a.txt", "\n \n", "' holds 0 distinct documents and a split into train and validat"),
        ("a.txt", "one\n", "' holds 1 distinct documents and a split into train and validat"),
        ("a.md", "x", " holds no text: its files end in .md (1), and none in .txt, .jsonl, "),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with refused(f"{tmp_path}/{name}{message}"):
        TextFiles(str(tmp_path / name)).open("train", str(tmp_path / "data"))


def test_missing_files(tmp_path):
    with refused(f"{tmp_path}/no.txt does not exist"):
        TextFiles(str(tmp_path / "no.txt")).open("train", None)
    with refused(f"{tmp_path}: there is no file"):
        TextFiles(str(tmp_path)).open("train", None)
    with refused("no text files are named"):
        TextFiles([]).open("train", None)


def test_lines_of_plain_and_packed_files(tmp_path):
    content = "\ufeffone\r\ntwo \u2028 é\n\nlast".encode()
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    for name in ("plain", "packed.gz"):
        assert list(read_lines(tmp_path / name)) == ["one\n", "two \u2028 é\n", "\n", "last"]


@pytest.mark.parametrize("name, pack", [("bad.txt", bytes), ("bad.txt.gz", gzip.compress)])
def test_not_utf8_names_file_and_offset(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(b"gut\n" + "schön".encode("latin-1")))
    with refused(f"{tmp_path / name} is not UTF-8: byte 0xf6 at offset 7"):
        list(read_lines(tmp_path / name))


def test_permission_denied_names_file(monkeypatch):
    def deny(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", deny)
    with refused("secret.txt cannot be read: [Errno 13] Permission denied: 'secret.txt'"):
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


def held_out(digests) -> list[bytes]:
    """The validation split, where documents are digests; the other has the rest, in order."""
    splits = hold_out(lambda: digests, lambda digest: digest, 0.05, "it")
    validation = list(splits["validation"])
    assert list(splits["train"]) == [each for each in digests if each not in validation]
    return validation


def test_held_out_are_the_lowest_digests():
    digests = [bytes([n]) + bytes(7) for n in range(256)]
    # 13 / 256 < 0.05 < 14 / 256
    assert held_out([*digests, digests[3]]) == [*digests[:13], digests[3]]
    assert held_out(digests[100:]) == [digests[100]]
    assert held_out(digests[:3]) == digests[:2]


def test_one_document_cannot_be_split():
    with refused(
        "it holds 1 distinct documents and a split into train and validation needs at least 2"
    ):
        held_out([b"12345678"] * 2)


def test_unreadable_names_file(tmp_path):
    cut_off = tmp_path / "cut_off.gz"
    cut_off.write_bytes(gzip.compress(b"text" * 100)[:-12])
    with refused(f"{cut_off} cannot be read: it ends before its end marker"):
        list(read_lines(cut_off))
    not_packed = tmp_path / "not_packed.gz"
    not_packed.write_bytes(b"text")
    with refused(f"{not_packed} cannot be read: <any>incorrect header"):
        list(read_lines(not_packed))
