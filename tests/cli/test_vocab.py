# SPDX-License-Identifier: Apache-2.0
"""`switchx vocab`: trains, says what it made, and refuses what cannot be made."""

import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from switchx.cli import vocab
from switchx.cli.main import main
from switchx.data.tokenizers import SentencePieceVocabulary
from switchx.data.vocabulary_training import SAMPLE_CHARACTERS
from tests.integration.runs import write_corpus


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path)


def test_vocabulary_is_written_and_summed_up(corpus, cli):
    second = pathlib.Path("more.txt")
    second.write_text("further words\n\nof another file")
    arguments = ["vocab", f"--input={corpus},{second}", "--size=300", "--output=mine/vocab"]
    captured = cli(*arguments)
    assert captured.out.startswith("mine/vocab/vocabulary.model: 300 pieces, trained on ")
    assert "characters per token" in captured.out
    vocabulary = SentencePieceVocabulary("mine/vocab/vocabulary.model")
    assert vocabulary.size == 400
    assert vocabulary.decode(vocabulary.encode("expert token")) == "expert token"
    before = pathlib.Path("mine/vocab/vocabulary.model").read_bytes()
    said = cli.refused(*arguments[:2], "--size=310", arguments[-1])
    assert "mine/vocab/vocabulary.model is there, and runs may read it; give another" in said
    assert pathlib.Path("mine/vocab/vocabulary.model").read_bytes() == before


def test_a_column_is_named_as_in_gin_files(tmp_path, capsys, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [f"slot {number} of an expert" for number in range(200)]
    pq.write_table(pa.table({"body": texts, "id": range(200)}), "a.parquet")
    assert main(["vocab", "--input=a.parquet", "--size=290", "--output=mine"]) == 2
    assert (
        "expected the key text, or inputs and targets; got body, id" in capsys.readouterr().err
    )
    words = ["--input=a.parquet", "--size=290", "--output=mine", "--text_column=body"]
    assert f"trained on {sum(map(len, texts)):,} characters" in cli("vocab", *words).out


def test_default_sample_is_that_of_training():
    assert vocab.SAMPLE_CHARACTERS == SAMPLE_CHARACTERS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--input=none.txt", "--size=300"], "none.txt does not exist"),
        (["--input=empty", "--size=300"], "there is no file; put texts there that end in .txt"),
        (["--input=,", "--size=300"], "no text files are named"),
        (["--input=corpus.txt", "--size=100000"], "use at most"),
        (["--input=corpus.txt", "--size=20"], "use at least"),
        (["--input=corpus.txt", "--size=0"], "size=0; use some thousands of pieces"),
        (["--input=corpus.txt", "--size=many"], "argument --size: invalid int value: 'many'"),
        (["--input=corpus.txt", "--size=300", "--sample_characters=0"], "sample_characters=0"),
        (["--input=latin.txt", "--size=300"], "is not UTF-8"),
        (["--input=deep.jsonl", "--size=300"], "deep.jsonl:2: nested too deeply; flatten it"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(corpus, cli, options, said):
    pathlib.Path("empty").mkdir()
    pathlib.Path("latin.txt").write_bytes("über".encode("latin-1"))
    deep = '{"text": "a", "more": ' + "[" * 200_000 + "]" * 200_000 + "}"
    pathlib.Path("deep.jsonl").write_text('{"text": "a slot"}\n' + deep)
    error = cli.refused("vocab", *options, "--output=mine")
    assert said in error and "Traceback" not in error
    assert not pathlib.Path("mine").exists()


def test_output_that_cannot_be_written_is_refused(corpus, capsys):
    pathlib.Path("file").write_text("")
    assert main(["vocab", f"--input={corpus}", "--size=300", "--output=file"]) == 2
    assert "cannot be written to file" in capsys.readouterr().err
    assert pathlib.Path("file").read_text() == ""
