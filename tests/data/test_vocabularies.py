# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that are trained, that come from a corpus, and that a run folder holds."""

import json
import pickle
import re
import shutil

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.data import vocabulary_training
from switchx.data.corpora.text_files import TextFiles
from switchx.data.mixtures import ProportionalRates
from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary
from switchx.data.vocabularies import (
    CorpusVocabulary,
    SavedVocabulary,
    load_vocabulary,
    save_vocabulary,
)
from switchx.data.vocabulary_training import (
    sample_at_rates,
    sample_evenly,
    train_model,
    train_sentencepiece,
)
from tests.data.fakes import ListCorpus
from tests.data.refusals import refused
from tests.data.words import sentences

SOURCE = "def double(value):\n\tif value:\n        return 2 * value\n\n\n    # größer\n"
TEXTS = [sentence + SOURCE for sentence in sentences(200)]


@pytest.fixture(scope="module")
def processor():
    return sentencepiece.SentencePieceProcessor(model_proto=train_model(TEXTS, 400))


def test_languages_are_sampled_at_their_rates(tmp_path):
    """Oracle: the shares by hand. Sizes 8000 and 500 characters; 8000^(1/3) : 500^(1/3) is
    20 : 7.94."""
    large, small = ["x" * 10] * 800, ["y" * 10] * 50

    def characters(rates, total, sizes=None):
        texts = sample_at_rates([lambda: large, lambda: small], rates, total, sizes)
        joined = "".join(texts)
        return joined.count("x"), joined.count("y")

    assert characters((3.0, 1.0), 400) == (300, 100)
    assert characters(ProportionalRates(), 850) == (800, 50)
    assert characters(ProportionalRates(3.0), 1000) == (710, 280)
    assert characters(ProportionalRates(maximum=1), 400) == (200, 200)
    assert characters(ProportionalRates(), 400, sizes=(1, 3)) == (100, 300)
    # All that there is, once.
    assert characters((1.0, 3.0), 4000) == (1000, 500)
    with refused("rates=(1.0,) for 2 languages"):
        characters((1.0,), 400)
    with refused("languages of the sizes [8000, 0]"):
        sample_at_rates([lambda: large, lambda: []], ProportionalRates(), 400)
    half = "".join(TEXTS[:100])[:3000]
    for name, text in (("x", half), ("y", half[:200])):
        (tmp_path / f"{name}.txt").write_text(text)
    files = [[str(tmp_path / "x.txt")], [str(tmp_path / "y.txt")]]
    summary = train_sentencepiece(files, 400, str(tmp_path), 400, ProportionalRates(maximum=1))
    assert summary.num_characters == 3200  # no document is cut: one of each was drawn


def test_layout(processor):
    assert processor.get_piece_size() == 400
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id()) == (0, 1, 2)
    assert processor.bos_id() == -1
    assert processor.id_to_piece(3) == "\n"


def test_indentation_is_few_tokens(processor):
    assert processor.decode(processor.encode(SOURCE)) == SOURCE
    assert len(processor.encode("        ")) <= 2
    assert len(processor.encode("\n\n")) == 2


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_nothing_is_lost(processor, text):
    ids = processor.encode(text)
    assert processor.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_the_one_exception(processor):
    assert processor.decode(processor.encode("a\u2581b")) == "a b"


def test_same_texts_same_model():
    assert train_model(TEXTS, 400) == train_model(iter(TEXTS), 400)
    assert train_model(TEXTS, 400) != train_model(TEXTS, 390)


def test_a_line_that_sentencepiece_leaves_out_is_cut(monkeypatch):
    """Its characters get pieces."""
    monkeypatch.setattr(vocabulary_training, "_LONGEST_LINE", 4000)
    random = np.random.default_rng(0)
    long = "".join(chr(0x4E00 + i) for i in random.integers(0, 30, 2000))  # 3 bytes each
    model = sentencepiece.SentencePieceProcessor(model_proto=train_model([*TEXTS, long], 500))
    assert len(model.encode(long[:300])) <= 301


def test_sample_is_even_and_bounded():
    texts = [f"{n:04}" for n in range(1000)]
    assert sample_evenly(texts, 4000) == texts
    # 4,000 characters are halved to 2,000, 1,000, 500: every eighth text.
    assert sample_evenly(iter(texts), 300) == texts[::8]
    assert sample_evenly(["a long text"], 1) == ["a long text"]


@pytest.mark.parametrize("rates", [None, (1.0, 1.0)])
def test_a_sample_keeps_to_its_bound(rates, tmp_path, caplog):
    """Documents of 20 to 1,000 characters; the progress line and the refusal count alike."""
    lengths = np.random.default_rng(0).integers(20, 1000, 300)
    documents = ["".join(TEXTS)[:n].replace("\n\n", " ") for n in lengths]
    for name, texts in (("x", documents), ("y", documents[::-1])):
        lines = (json.dumps({"text": text}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in "xy"]
    inputs = files if rates is None else [[each] for each in files]
    for most in (20_000, 60_000, 110_000):
        out = str(tmp_path / f"{most}")
        summary = train_sentencepiece(inputs, 360, out, most, rates)
        assert 0.9 * most < summary.num_characters <= most
    caplog.set_level("INFO", "switchx")
    with pytest.raises(ValueError) as error:
        train_sentencepiece(inputs, 50_000, str(tmp_path / "out"), 20_000, rates)
    counts = [int(re.search(r"on (\d+) char", x)[1]) for x in (caplog.text, str(error.value))]
    assert counts[0] == counts[1] <= 20_000


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    (tmp_path / "b.jsonl").write_text('{"inputs": "one number", "targets": "eine Zahl"}\n')
    (tmp_path / "empty.jsonl").write_text("")  # as some shard may be
    output = tmp_path / "output/vocabulary"
    summary = train_sentencepiece(str(tmp_path), 400, str(output))
    assert sorted(p.name for p in output.iterdir()) == ["vocabulary.model", "vocabulary.vocab"]
    assert summary.path == output / "vocabulary.model"
    assert summary.num_pieces == 400
    assert summary.num_characters == sum(map(len, TEXTS)) + len("one number" + "eine Zahl")
    assert 2 < summary.characters_per_token < 20
    lines = (output / "vocabulary.vocab").read_text().split("\n")
    assert lines[:5] == ["<pad>\t0", "</s>\t0", "<unk>\t0", "\\n\t0", "<0x00>\t0"]
    assert len(lines) == 401
    again = train_sentencepiece(str(tmp_path / "a.txt"), 400, str(tmp_path / "again"))
    assert again.path.read_bytes() == train_model(TEXTS, 400)


@pytest.mark.parametrize(
    "size, message",
    [
        (
            5000,
            "a vocabulary of 5000 pieces cannot be trained on <any> characters: use at most "
            "<any> (sentinels come on top), or more text",
        ),
        (0, "a vocabulary of 0 pieces cannot be trained on <any> characters: "),
        (
            100,
            "a vocabulary of 100 pieces cannot be trained on <any> characters: use at least "
            "<any>: bytes and single characters alone need as many",
        ),
    ],
)
def test_size_that_does_not_fit(size, message):
    with refused(message):
        train_model(TEXTS, size)


def test_sample_of_nothing(tmp_path):
    with refused("sample_characters=0"):
        train_sentencepiece(str(tmp_path), 300, str(tmp_path / "out"), sample_characters=0)
    assert not (tmp_path / "out").exists()


def test_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("\n \n")
    with refused("a vocabulary cannot be trained on no text"):
        train_sentencepiece(str(tmp_path / "a.txt"), 400, str(tmp_path / "output"))


def test_output_that_cannot_be_written(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    with refused(
        f"the vocabulary cannot be written to {tmp_path}/a.txt/output: [Errno 20] "
        f"Not a directory: '{tmp_path}/a.txt/output'"
    ):
        train_sentencepiece(str(tmp_path / "a.txt"), 400, str(tmp_path / "a.txt/output"))


@pytest.mark.slow
def test_real_text(shared_dir, tmp_path):
    file = shared_dir / "data/text/tinyshakespeare.txt"
    summary = train_sentencepiece(str(file), 4000, str(tmp_path))
    assert summary.num_characters == len(file.read_text())
    assert summary.characters_per_token > 3


TEXT = "\n".join(f"    function({sentence[:-1]}, 'größer')\n" for sentence in sentences(300))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return TextFiles(str(tmp_path / "text.txt"), max_characters=200)


def test_trained_once_and_found_again(corpus, tmp_path, monkeypatch):
    data_dir = str(tmp_path / "data")
    vocabulary = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    assert not (tmp_path / "data").exists()  # nothing happens before the first use
    ids = vocabulary.encode(TEXT)
    assert max(ids) < 400 and vocabulary.sentinel_id(0) == 499
    assert vocabulary.decode([*ids, 499]) == TEXT + "<extra_id_0>"
    assert vocabulary.size == vocabulary.resolved.size == 500
    (model,) = (tmp_path / "data/vocabularies").iterdir()
    assert re.fullmatch("text_files_500_[0-9a-f]{16}.model", model.name)

    monkeypatch.setattr("switchx.data.vocabularies.train_model", None)
    again = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    assert again.fingerprint() == vocabulary.fingerprint()


def test_whatever_determines_it_is_in_its_name(corpus, tmp_path):
    data_dir = str(tmp_path / "data")
    original = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    others = [
        CorpusVocabulary(corpus, 501, data_dir=data_dir),
        CorpusVocabulary(corpus, 500, num_sentinels=99, data_dir=data_dir),
        CorpusVocabulary(corpus, 500, sample_characters=9000, data_dir=data_dir),
    ]
    assert len({v.fingerprint() for v in (original, *others)}) == 4
    (tmp_path / "text.txt").write_text(TEXT.replace("function", "procedure"))
    changed = CorpusVocabulary(corpus, 500, data_dir=data_dir)
    assert changed.fingerprint() != original.fingerprint()
    assert len(list((tmp_path / "data/vocabularies").iterdir())) == 5


def test_facts_of_examples_are_no_text(tmp_path):
    """A vocabulary of none that has them keeps the name that it had."""
    fields, words = ("inputs", "targets"), TEXT.split(" ")
    pairs = tuple((a, a) for a in words)
    of_pairs = CorpusVocabulary(ListCorpus(pairs, fields), 400, data_dir=str(tmp_path))
    told = tuple((*pair, '{"example_id": "%%%"}') for pair in pairs)
    vocabulary = CorpusVocabulary(
        ListCorpus(told, (*fields, "facts")), 400, data_dir=str(tmp_path)
    )
    assert vocabulary.encode(TEXT) == of_pairs.encode(TEXT)
    assert len({*(tmp_path / "vocabularies").iterdir()}) == 2


def test_killed_training_is_not_read(corpus, tmp_path, monkeypatch):
    vocabulary = CorpusVocabulary(corpus, 500, data_dir=str(tmp_path / "data"))

    def die(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("switchx.data.data_dir.os.replace", die)
        vocabulary.encode("text")
    assert list((tmp_path / "data/vocabularies").iterdir()) == []
    assert vocabulary.decode(vocabulary.encode("text")) == "text"


def test_pickled_before_and_after_use(corpus, tmp_path):
    vocabulary = CorpusVocabulary(corpus, 500, data_dir=str(tmp_path / "data"))
    before = pickle.loads(pickle.dumps(vocabulary))
    ids = vocabulary.encode(TEXT)
    after = pickle.loads(pickle.dumps(vocabulary))
    assert before.encode(TEXT) == after.encode(TEXT) == ids
    assert "resolved" in vars(after)


def test_size_is_checked(corpus, tmp_path):
    with refused("CorpusVocabulary.size=100 leaves no piece beside 100 sentinels"):
        CorpusVocabulary(corpus, 100)
    said = (
        "a vocabulary of {} ids, 100 of them sentinels, cannot be trained on <any>: use at {} "
    )
    for size, bound in ((32000, "most"), (110, "least")):
        vocabulary = CorpusVocabulary(corpus, size, data_dir=str(tmp_path / "data"))
        with refused(said.format(size, bound)) as error:
            vocabulary.encode("text")
        # What it says can be used: it is in the numbers of `size`.
        size = int(re.search(rf"use at {bound} (\d+)", str(error.value))[1])
        CorpusVocabulary(corpus, size, data_dir=str(tmp_path / "data")).encode("text")


def test_of_several_corpora(tmp_path):
    """Words of either are pieces; which corpora they are is in the name."""
    corpora = []
    for language, word in (("one", "Schmetterling"), ("two", "papillon")):
        (tmp_path / f"{language}.txt").write_text(f"the {word} of a {word}\n" * 50 + TEXT)
        corpora.append(TextFiles(str(tmp_path / f"{language}.txt"), max_characters=200))
    data_dir = str(tmp_path / "data")
    both = CorpusVocabulary(tuple(corpora), 500, data_dir=data_dir)
    one = CorpusVocabulary(corpora[0], 500, data_dir=data_dir)
    assert len(both.encode(" papillon")) < len(one.encode(" papillon"))
    assert len(both.encode(" Schmetterling")) <= 2
    assert both.fingerprint() != one.fingerprint()


SENTENCES = sentences(300)


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "trained.model").write_bytes(train_model(SENTENCES, 300))
    return SentencePieceVocabulary(str(tmp_path / "trained.model"), 10, 128)


@pytest.fixture
def run(tmp_path, vocabulary):
    save_vocabulary(vocabulary, tmp_path / "run")
    return tmp_path / "run"


def change(run, **values):
    file = run / "vocabulary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_sentencepiece(run, vocabulary):
    (run.parent / "trained.model").unlink()
    loaded = load_vocabulary(run)
    assert loaded.fingerprint() == vocabulary.fingerprint()
    assert loaded.size == vocabulary.size == 384
    assert loaded.encode(SENTENCES[0]) == vocabulary.encode(SENTENCES[0])
    assert str(run.parent) not in (run / "vocabulary.json").read_text()


def test_folder_can_be_moved(run, vocabulary):
    moved = run.rename(run.parent / "moved")
    assert load_vocabulary(moved).fingerprint() == vocabulary.fingerprint()


def test_bytes(tmp_path):
    save_vocabulary(ByteVocabulary(7), tmp_path)
    assert load_vocabulary(tmp_path) == ByteVocabulary(7)
    assert json.loads((tmp_path / "vocabulary.json").read_text()) == {
        "kind": "bytes",
        "fingerprint": ByteVocabulary(7).fingerprint(),
        "num_sentinels": 7,
    }


def test_vocabulary_of_a_corpus(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES))
    corpus = TextFiles(str(tmp_path / "text.txt"), max_characters=100)
    vocabulary = CorpusVocabulary(corpus, 400, data_dir=str(tmp_path / "data"))
    save_vocabulary(vocabulary, tmp_path / "run")
    assert load_vocabulary(tmp_path / "run").fingerprint() == vocabulary.fingerprint()


def test_other_model_is_refused(run):
    (run / "vocabulary.model").write_bytes(train_model(SENTENCES, 301))
    said = json.loads((run / "vocabulary.json").read_text())["fingerprint"]
    with refused(
        f"the vocabulary in {run} has the fingerprint <any>, its description says {said}"
    ):
        load_vocabulary(run)


@pytest.mark.parametrize(
    "values",
    [
        {"model": "../../etc/passwd"},
        {"path": "/etc/passwd"},
        {"kind": "pickle"},
        {"kind": ["bytes"]},
        {"num_sentinels": "10"},
        {"num_sentinels": True},
    ],
)
def test_hostile_descriptions(run, values):
    change(run, **values)
    with refused(
        f"{run}/vocabulary.json does not describe a vocabulary: expected the kind "
        "sentencepiece, bytes, token_ids, bpe <any>, got {<any>}"
    ):
        load_vocabulary(run)


def test_numbers_out_of_range(run):
    change(run, num_sentinels=-1)
    with refused("num_sentinels=-1"):
        load_vocabulary(run)


def test_model_outside_the_folder(run):
    model = run / "vocabulary.model"
    elsewhere = model.rename(run.parent / "elsewhere.model")
    model.symlink_to(elsewhere)
    with refused(f"{model} leads out of the folder, to {elsewhere}"):
        load_vocabulary(run)


def test_the_vocabulary_of_another_run_is_read_when_it_is_needed(run, vocabulary):
    nowhere = SavedVocabulary("nowhere")
    assert nowhere == pickle.loads(pickle.dumps(nowhere))
    with refused("no vocabulary can be read from nowhere"):
        nowhere.encode("text")
    saved = SavedVocabulary(str(run))
    assert (saved.size, saved.num_sentinels) == (vocabulary.size, vocabulary.num_sentinels)
    assert saved.fingerprint() == vocabulary.fingerprint()
    save_vocabulary(saved, run.parent / "copy")
    shutil.rmtree(run)
    # A worker process gets what was read.
    assert pickle.loads(pickle.dumps(saved)).resolved.size == vocabulary.size
    copy = load_vocabulary(run.parent / "copy")
    assert copy.fingerprint() == vocabulary.fingerprint()


def test_nothing_to_load(tmp_path):
    with refused(
        f"no vocabulary can be read from {tmp_path}: [Errno 2] No such file or "
        f"directory: '{tmp_path}/vocabulary.json'"
    ):
        load_vocabulary(tmp_path)
    (tmp_path / "vocabulary.json").write_text("[1")
    with refused(f"no vocabulary can be read from {tmp_path}: "):
        load_vocabulary(tmp_path)
    (tmp_path / "vocabulary.json").write_text("[]")
    with refused(": expected an object, got a list"):
        load_vocabulary(tmp_path)


def test_largest_size_named_is_possible():
    with pytest.raises(ValueError) as error:
        train_model(TEXTS, 5000)
    largest = int(re.search(r"at most (\d+)", str(error.value))[1])
    model = train_model(TEXTS, largest)
    assert sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size() == largest


def test_same_on_every_machine(corpus, tmp_path):
    first, second = (
        CorpusVocabulary(corpus, 500, data_dir=str(tmp_path / name)) for name in "ab"
    )
    assert first.fingerprint() == second.fingerprint()
