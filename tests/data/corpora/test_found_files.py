# SPDX-License-Identifier: Apache-2.0
"""Files of folders: links, hidden ones, doubles, other suffixes, and what is said of them."""

import gzip
import json

import pytest

from switchx.data.corpora.text_files import TextFiles, find_texts
from switchx.data.downstream.templates import Templates
from tests.data.refusals import refused


def names(found, root):
    return [path.relative_to(root).as_posix() for path in found.files]


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    return folder


def test_links_are_read_once_and_cycles_end(tmp_path, texts):
    other = tmp_path / "other"
    (other / "below").mkdir(parents=True)
    (other / "below/b.txt").write_text("two\n")
    (texts / "link").symlink_to(other)
    (texts / "link_again").symlink_to(other)
    (texts / "itself").symlink_to(texts)
    (other / "back").symlink_to(texts)
    (texts / "a_again.txt").symlink_to(texts / "a.txt")
    (texts / "broken.txt").symlink_to(tmp_path / "nowhere")
    found = find_texts(str(texts))
    assert names(found, texts) == ["a.txt", "link/below/b.txt"]
    assert sorted(found.left_out["read already"]) == [
        f"a_again.txt -> {texts}/a.txt",
        f"itself -> {texts}",
        f"link/back -> {texts}",
        f"link_again -> {other}",
    ]
    assert found.left_out["link that leads to no file"] == [f"broken.txt -> {tmp_path}/nowhere"]


def test_a_link_by_a_name_that_is_read_to_a_file_that_is_not(texts):
    """As the cache of Hugging Face's hub has them: the file itself is named by its hash."""
    (texts / "blobs").mkdir()
    (texts / "blobs/0123").write_text("two\n")
    (texts / "b.md").symlink_to(texts / "blobs/0123")
    (texts / "b.txt").symlink_to(texts / "blobs/0123")
    (texts / "c.txt").symlink_to(texts / "blobs/0123")
    found = find_texts(str(texts))
    assert names(found, texts) == ["a.txt", "b.txt"]
    assert found.left_out["suffix none"] == ["0123"]
    assert found.left_out["read already"] == [f"c.txt -> {texts}/blobs/0123"]


def test_hidden_files_and_other_suffixes_are_said(tmp_path, texts):
    (texts / ".ipynb_checkpoints").mkdir()
    (texts / ".ipynb_checkpoints/a-checkpoint.txt").write_text("old\n")
    (texts / "._a.txt").write_text("resource fork")
    for name in ("read.md", "more.md", "x.json", "LICENSE"):
        (texts / name).write_text("x")
    (texts / "Z.TXT.GZ").write_bytes(gzip.compress(b"two\n"))
    source = TextFiles(str(texts)).open("train", str(tmp_path / "data"))
    (account,) = source.accounts
    assert account.files == {".txt": 1, ".txt.gz": 1}
    assert account.rows == 2 and account.documents == {"train": 1, "validation": 1}
    assert account.num_bytes == sum((texts / n).stat().st_size for n in ("a.txt", "Z.TXT.GZ"))
    assert account.left_out == {
        "hidden": (2, ["._a.txt", ".ipynb_checkpoints/"]),
        "suffix .json": (1, ["x.json"]),
        "suffix .md": (2, ["more.md", "read.md"]),
        "suffix none": (1, ["LICENSE"]),
    }
    assert str(account) == (
        f"text_files: 2 files (1 .txt, 1 .txt.gz), {account.num_bytes} bytes, 2 rows; "
        "documents: 1 in train, 1 in validation\n"
        "text_files: left out 2 hidden (._a.txt, .ipynb_checkpoints/); 1 suffix .json "
        "(x.json); 2 suffix .md (more.md, read.md); 1 suffix none (LICENSE)"
    )
    # Read again, nothing is prepared, and the account is the same.
    again = TextFiles(str(texts)).open("validation", str(tmp_path / "data"))
    assert again.accounts == source.accounts


def test_one_text_in_two_packings_is_read_once(texts):
    lines = "".join(json.dumps({"text": f"t{n}"}) + "\n" for n in range(3))
    (texts / "x.jsonl").write_text(lines)
    (texts / "x.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = find_texts(str(texts))
    assert names(found, texts) == ["a.txt", "x.jsonl"]
    assert found.left_out["same text as another, packed otherwise"] == ["x.jsonl.gz"]
    (texts / "x.jsonl.gz").write_bytes(gzip.compress(lines.encode() + b'{"text": "t4"}\n'))
    with refused("x.jsonl and x.jsonl.gz beside it hold different texts under one name"):
        find_texts(str(texts))
    (texts / "x.jsonl").unlink()
    (texts / "x.json.gz").write_bytes((texts / "x.jsonl.gz").read_bytes())  # C4's name of it
    assert names(find_texts(str(texts)), texts) == ["a.txt", "x.json.gz"]


def test_splits_of_a_folder_of_any_case(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.CSV").write_text("q,a\nx,y\n")
    (folder / ".train.csv").write_text("hidden")
    (folder / "notes.md").write_text("x")
    corpus = Templates(str(folder), "{q}", "{a}")
    source = corpus.open("train", str(tmp_path / "data"))
    assert source[0]["targets"] == "y"
    (account,) = source.accounts
    assert account.files == {".csv": 1} and account.rows == 1
    assert account.left_out == {"hidden": (1, [".train.csv"]), "suffix .md": (1, ["notes.md"])}
    (folder / "train.csv.gz").write_bytes(gzip.compress(b"q,a\nx,z\n"))
    with refused("hold different texts under one name"):
        corpus.open("train", str(tmp_path / "data"))


def test_fingerprints_are_those_of_earlier_versions(tmp_path, texts):
    # By these a run goes on, and finds its vocabulary and its tokens.
    (texts / "a.txt").write_bytes(b"one\r\n\r\ntwo\n")
    (texts / "b.txt.gz").write_bytes(gzip.compress("drei ö\n".encode()))
    (texts / "c.jsonl").write_text('{"text": "four"}\n{"text": "five"}\n')
    for split, fingerprint in (
        ("train", "ae494d0521d67049"),
        ("validation", "984d36d4ae426751"),
    ):
        assert TextFiles(str(texts)).open(split, str(tmp_path)).fingerprint == fingerprint
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.csv").write_text('q,a\n"x, y",z\n')
    source = Templates(str(own), "{q}", "{a}").open("train", str(tmp_path))
    assert source.fingerprint == "a2bdd1eba7ee8ff6"


def test_pairs_by_named_columns(tmp_path, texts):
    (texts / "pairs.jsonl").write_text('{"de": "a", "en": "b"}\n{"de": "c", "en": "d"}\n')
    corpus = TextFiles(str(texts), columns=("de", "en"))
    source = corpus.open("train", str(tmp_path / "data"))
    assert source[0] in ({"inputs": "a", "targets": "b"}, {"inputs": "c", "targets": "d"})
    assert source.accounts[0].left_out == {"suffix .txt": (1, ["a.txt"])}
    with refused("TextFiles.columns=('a', 'b', 'c')"):
        TextFiles(str(texts), columns=("a", "b", "c"))
