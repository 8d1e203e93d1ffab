# SPDX-License-Identifier: Apache-2.0
"""Rows of TFDS give the examples that the published files give.

Features are those of TFDS' own builders, read off `tensorflow_datasets`; the oracle is the
first example of `published_files.py`, where the same row stands in its published form.
"""

import gzip
import re
import types

import numpy as np
import pytest
from etils import epath
from tensorflow_datasets import features as tfds

from switchx.data.corpora import tfds_folder
from switchx.data.corpora.tfds_folder import plain
from switchx.data.downstream.catalogue import DATASETS
from switchx.data.downstream.tasks import Downstream, task
from switchx.data.downstream.templates import Templates, template_task
from switchx.data.evaluation import evaluation_examples
from switchx.data.features import EncoderDecoderFeatures
from switchx.data.tasks import open_task
from switchx.data.text_metrics import Accuracy, Squad
from switchx.data.tokenizers import ByteVocabulary
from tests.data.downstream.published_files import PASSAGE, PUBLISHED
from tests.data.refusals import refused
from tests.data.tfds_folders import as_tf_records, write
from tests.processes import ROOT

TEXT, TEXTS = tfds.Text(), tfds.Sequence(tfds.Text())
LETTERS = tfds.ClassLabel(names=list("ABCDE"))


def classes(*names):
    return tfds.ClassLabel(names=list(names))


ROWS = {
    "glue_cola": (
        {"sentence": TEXT, "label": classes("unacceptable", "acceptable"), "idx": np.int32},
        {"sentence": "Our friends won't.", "label": 1, "idx": 0},
    ),
    "glue_stsb": (
        {"sentence1": TEXT, "sentence2": TEXT, "label": np.float32, "idx": np.int32},
        {"sentence1": "One, two.", "sentence2": '3 "four"?', "label": 1.66, "idx": 0},
    ),
    "super_glue_multirc": (
        {"paragraph": TEXT, "question": TEXT, "answer": TEXT, "label": classes("False", "True"),
         "idx": {"paragraph": np.int32, "question": np.int32, "answer": np.int32}},
        {"paragraph": "<b>Sent 1: </b>Once upon a time.<br><b>Sent 2: </b>Joey.",
         "question": "Why?", "answer": "Answer 0", "label": 1,
         "idx": {"paragraph": 5, "question": 0, "answer": 0}},
    ),
    "super_glue_record": (
        {"passage": TEXT, "query": TEXT, "entities": TEXTS, "answers": TEXTS,
         "idx": {"passage": np.int32, "query": np.int32}},
        {"passage": PASSAGE, "query": "It was @placeholder.", "entities": ["This", "passage"],
         "answers": ["This", "passage"], "idx": {"passage": 1, "query": 2}},
    ),
    "super_glue_wsc_train": (
        {"text": TEXT, "span1_text": TEXT, "span1_index": np.int32, "span2_text": TEXT,
         "span2_index": np.int32, "label": classes("False", "True"), "idx": np.int32},
        {"text": "Mitchell asked Tom if he could lend some money.", "span1_text": "Tom",
         "span1_index": 2, "span2_text": "he", "span2_index": 4, "label": 1, "idx": 1},
    ),
    "squad": (
        {"id": TEXT, "title": TEXT, "context": TEXT, "question": TEXT,
         "answers": tfds.Sequence({"text": TEXT, "answer_start": np.int32})},
        {"id": "q1", "title": "T", "context": "Some  context (2).", "question": "A question?",
         "answers": {"text": ["The answer."], "answer_start": [0]}},
    ),
    "arc_easy": (
        {"id": TEXT, "question": TEXT, "answerKey": LETTERS,
         "choices": tfds.Sequence({"text": TEXT, "label": LETTERS})},
        {"id": "M", "question": "What is hot?", "answerKey": 1,
         "choices": {"text": ["the sun", "a leg"], "label": [0, 1]}},
    ),
    "openbookqa": (
        {"question": {"stem": TEXT} | {f"choice_{letter}": TEXT for letter in "ABCD"},
         "answerKey": LETTERS},
        {"question": {"stem": "The sun is", "choice_A": "hot", "choice_B": "a  star",
                      "choice_C": "far", "choice_D": "old"}, "answerKey": 1},
    ),
    "winogrande": (
        {"sentence": TEXT, "option1": TEXT, "option2": TEXT, "label": classes("1", "2")},
        {"sentence": "Ian _ Dennis.", "option1": "I", "option2": "D", "label": 1},
    ),
    "anli_r1": (
        {"uid": TEXT, "context": TEXT, "hypothesis": TEXT, "label": classes("e", "n", "c")},
        {"uid": "u", "context": "It rains.", "hypothesis": "It is wet.", "label": 1},
    ),
    "trec": (
        {"text": TEXT, "label-coarse": classes("DESC", "ENTY", "ABBR", "HUM", "NUM", "LOC"),
         "label-fine": classes("manner", "cremat")},
        {"text": "How did it ?", "label-coarse": 0, "label-fine": 0},
    ),
    "natural_questions_open": (
        {"question": TEXT, "answer": TEXTS},
        {"question": "who is it", "answer": ["Ann Lee", "Lee"]},
    ),
    "web_questions": (
        {"url": TEXT, "question": TEXT, "answers": TEXTS},
        {"url": "u", "question": "who?", "answers": ["Ann Lee", "Lee"]},
    ),
    "trivia_qa": (
        {"question": TEXT, "question_id": TEXT, "answer": {"value": TEXT, "aliases": TEXTS}},
        {"question": "Who?", "question_id": "t1",
         "answer": {"value": "Ann", "aliases": ["Ann", "Lee"]}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_tfds(name, tmp_path):
    features, row = ROWS[name]
    split = DATASETS[name].train_split.partition("[")[0]
    write(tmp_path, DATASETS[name].tfds, features, **{split: [row]})
    record = Downstream(name).open(split, str(tmp_path))[0]
    want = PUBLISHED[name]
    assert (record["inputs"], record["targets"]) == (want.inputs, want.targets)


def test_dpr(tmp_path):
    features = {"sentence": TEXT, "pronoun": TEXT, "candidates": TEXTS, "label": np.int32}
    row = {"sentence": "Bob told Tom, he left.", "pronoun": "he", "candidates": ["Bob", "Tom"],
           "label": 1}  # fmt: skip
    write(tmp_path, "definite_pronoun_resolution", features, train=[row])
    record = Downstream("dpr").open("train", str(tmp_path))[0]
    assert record["inputs"] == "wsc: Bob told Tom, *he* left." and record["targets"] == "Tom"


def test_test_sets_and_tf_records(tmp_path):
    features, row = ROWS["glue_cola"]
    write(tmp_path, "glue/cola", features, train=[row], test=[row | {"label": -1, "idx": 7}])
    as_tf_records(tmp_path / "glue/cola/1.0.0", shards=1)
    record = Downstream("glue_cola").open("test", str(tmp_path))[0]
    assert record["targets"] == "<unk>" and '"example_id": "7"' in record["facts"]


@pytest.mark.parametrize("name", ["", ".gz"])
def test_a_shard_with_other_records_than_its_split_says_is_refused(tmp_path, name):
    """Empty, or cut between two records: what is left is sound."""
    features, row = ROWS["glue_cola"]
    write(tmp_path, "glue/cola", features, train=[row | {"idx": i} for i in range(4)])
    for path in as_tf_records(tmp_path / "glue/cola/1.0.0"):
        last = path.with_name(path.name + name)
        content = path.read_bytes()
        path.unlink()
        last.write_bytes(gzip.compress(content) if name else content)
    whole, corpus = last.read_bytes(), Downstream("glue_cola")
    for content, number in ((b"", 0), (whole + whole, 4)):
        last.write_bytes(content)
        with refused(f"{last.name} holds {number} records, its dataset_info.json says 2"):
            corpus.open("train", str(tmp_path))
    last.write_bytes(whole)
    assert len(corpus.open("train", str(tmp_path))) == 4


def test_remote_data_are_prepared_in_the_cache(tmp_path, own_cache, monkeypatch):
    """Only the address is of a bucket here; its files are below `tmp_path`."""
    features, row = ROWS["glue_cola"]
    write(tmp_path, "glue/cola", features, train=[row])
    as_tf_records(tmp_path / "glue/cola/1.0.0", shards=1)

    def path(name):
        return epath.Path(str(name).replace("remote://bucket", str(tmp_path)))

    monkeypatch.setattr(tfds_folder, "epath", types.SimpleNamespace(Path=path))
    made = task("glue_cola", ByteVocabulary(), train_split="train", cache_tokens=True)
    opened = open_task(made, "train", "remote://bucket", EncoderDecoderFeatures(64, 16))
    assert opened.records[0]["targets"] == "acceptable" and len(opened.tokens) == 1
    assert {each.name for each in own_cache.iterdir()} == {"glue_cola", "tokens"}
    found = tfds_folder.find_folder("glue/cola", "remote://bucket")
    assert plain(found.records("train")[0]) == row
    assert (own_cache / "tfrecord_indexes").is_dir()


NEWS = {"title": TEXT, "label": classes("World", "Sports"), "more": {"ids": TEXTS}}


def test_templates_of_tfds(tmp_path):
    rows = [{"title": "A {b}", "label": i, "more": {"ids": ["x", "y"]}} for i in (0, 1)]
    write(tmp_path, "news", NEWS, train=rows, test=rows)
    corpus = Templates("tfds:news", "{{news}}: {title} {more/ids/1}", "{label}", "more/ids")
    made = template_task(corpus, ByteVocabulary(), (Accuracy(), Squad()), "train[:1]", "test")
    features = EncoderDecoderFeatures(64, 16)
    examples = evaluation_examples(made, "test", features, str(tmp_path))
    assert made.name == "templates_news"
    assert examples.inputs == ["{news}: A {b} y"] * 2 and examples.targets == [
        "World",
        "Sports",
    ]
    assert examples.metrics(["y", "World"]) == {
        "accuracy": 0.0, "exact_match": 50.0, "f1": 50.0,
    }  # fmt: skip
    # Classes within others have names, too.
    label = NEWS["label"]
    nested = {"title": NEWS["title"], "labels": tfds.Sequence(label)}
    nested |= {"inner": {"label": label}}
    row = {"title": "t", "labels": [1, 0], "inner": {"label": 1}}
    write(tmp_path, "nested", nested, train=[row])
    corpus = Templates("tfds:nested", "{title}", "{labels/0} {labels/1} {inner/label}")
    opened = corpus.open("train", str(tmp_path))
    assert opened[0]["targets"] == "Sports World Sports"
    # A split that cannot be written so does not keep others from it.
    empty = rows[0] | {"more": {"ids": []}}
    write(tmp_path, "uneven", NEWS, train=rows, test=[empty])
    uneven = Templates("tfds:uneven", "{more/ids/0}", "{label}")
    assert uneven.open("train", str(tmp_path))[0]["inputs"] == "x"
    with refused("row 0: Templates.inputs: there is no field 'more/ids/0'"):
        uneven.open("test", str(tmp_path))
    for template, said in (
        ("{titel}", "there is no field 'titel'; the row has label, more, title"),
        ("{more/id}", "there is no field 'more/id'; more has ids"),
        ("{more/ids/2}", "there is no field 'more/ids/2'; more/ids has 0, 1"),
        ("{more/ids}", "the field 'more/ids' is a list; name a text or a number in it"),
        ("{title/0}", "there is no field 'title/0'; title has nothing"),
    ):
        with refused(f"Templates.inputs: {said}"):
            Templates("tfds:news", template, "{label}").open("train", str(tmp_path))
    with refused("Templates.answers='title' is 'A {b}', expected a list"):
        Templates("tfds:news", "{title}", "{label}", "title").open("train", str(tmp_path))


@pytest.mark.parametrize(
    ("language", "text", "inputs"),
    [
        # t5.data.preprocessors_test.test_translate
        ("de", "Das ist gut.", "translate English to German: That is good."),
        ("fr", "C'est bon.", "translate English to French: That is good."),
        ("ro", "E bine.", "translate English to Romanian: That is good."),
    ],
)
def test_translation(language, text, inputs, tmp_path):
    gin = (ROOT / f"configs/tasks/wmt_en_{language}.gin").read_text()
    source, *templates = re.findall(r'^(?:FROM|INPUTS|TARGETS) = "(.*)"', gin, re.MULTILINE)
    row = {"en": "That is good.", language: text}
    write(tmp_path, source.removeprefix("tfds:"), dict.fromkeys(row, TEXT), train=[row])
    record = Templates(source, *templates).open("train", str(tmp_path))[0]
    assert (record["inputs"], record["targets"]) == (inputs, text)


def test_single_precision_is_written_as_the_shortest_number_that_it_is(tmp_path):
    row = {"score": 3.8, "more": [0.1, 1e10]}
    features = {"score": np.float32, "more": tfds.Sequence(np.float32)}
    write(tmp_path, "scores", features, train=[row])
    record = Templates("tfds:scores", "{score} {more/0}", "{more/1}").open(
        "train", str(tmp_path)
    )
    assert (record[0]["inputs"], record[0]["targets"]) == ("3.8 0.1", "10000000000.0")
    (account,) = record.accounts
    assert account.files == {".array_record": 1}
    assert account.rows == account.documents["train"] == 1


def test_templates_of_a_folder(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"q": "Who?", "n": 3}\n')
    (data / "test.csv").write_text("q,n\nWhy?,4\n")
    corpus = Templates(str(data), "question: {q}", "{n}")
    source = corpus.open("train", str(tmp_path))
    assert (source[0]["inputs"], source[0]["targets"]) == ("question: Who?", "3")
    assert corpus.open("test", str(tmp_path))[0]["inputs"] == "question: Why?"
    other = Templates(str(data), "Q: {q}", "{n}").open("train", str(tmp_path))
    assert other[0]["inputs"] == "Q: Who?", "another template is prepared anew"
    with refused(f"in {data} has no split 'validation'"):
        corpus.open("validation", str(tmp_path))
    (data / "train.jsonl").write_text('{"q": "Who?", "n": NaN}\n')
    with refused("row 0: Templates.targets: the field 'n' is nan, which stands for no number"):
        corpus.open("train", str(tmp_path))
    (data / "test.csv").write_text("q,n\nWhy?,\n")
    account = corpus.open("test", str(tmp_path)).accounts[0]
    assert account.rows_left_out == {"examples with no target text": 1}
    (data / "train.tsv").write_text("q\tn\n")
    with refused("train.jsonl, train.tsv, expected one file a split"):
        corpus.open("train", str(tmp_path))
    with refused(f"{tmp_path / 'none'} is no folder"):
        Templates(str(tmp_path / "none"), "{q}", "{n}").open("train", str(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    with refused(f"{empty} has no file that ends in .tsv, .csv, .jsonl, .json, .txt"):
        Templates(str(empty), "{q}", "{n}").open("train", str(tmp_path))


@pytest.mark.parametrize("template", ["{a", "a}", "{}", "{a:3}", "{a!r}", "{/}"])
def test_templates_that_are_none(template):
    with refused(f"Templates.inputs={template!r}: "):
        Templates("tfds:news", template, "{label}")
