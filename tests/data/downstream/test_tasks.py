# SPDX-License-Identifier: Apache-2.0
"""Every task builds from files in their published form, writes T5's text, and is measured.

Oracles: `published_files.py`, with texts of T5's own tests and scores by hand; for data sets
that T5 knows, its texts as `t5.data.preprocessors_test` has them (`test_texts.py`).
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil

import pytest

from switchx.data.corpora.splits import open_split
from switchx.data.downstream.catalogue import DATASETS
from switchx.data.downstream.tasks import Downstream, mixture, task
from switchx.data.evaluation import evaluation_examples
from switchx.data.features import EncoderDecoderFeatures
from switchx.data.mixtures import ProportionalRates, evaluated_tasks
from switchx.data.tokenizers import ByteVocabulary
from tests.data.downstream.published_files import PUBLISHED
from tests.data.refusals import refused

VOCABULARY = ByteVocabulary()
FEATURES = EncoderDecoderFeatures(512, 64)
# DPR's files have a form of their own; it is read from TFDS alone.
FROM_TFDS = {"dpr"}


def written(folder: pathlib.Path, name: str) -> pathlib.Path:
    for file, content in PUBLISHED[name].files.items():
        path = folder / DATASETS[name].folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


def built(folder: pathlib.Path, name: str):
    made = task(name, VOCABULARY, str(written(folder, name)))
    if splits := PUBLISHED[name].splits:
        made = dataclasses.replace(made, train_split=splits[0], evaluation_split=splits[1])
    return made


def test_all_data_sets_are_here():
    assert PUBLISHED.keys() | FROM_TFDS == DATASETS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_and_score_of_a_constant(name, tmp_path):
    published, made = PUBLISHED[name], built(tmp_path, name)
    record = open_split(made.corpus, made.train_split, str(tmp_path))[0]
    assert (record["inputs"], record["targets"]) == (published.inputs, published.targets)
    examples = evaluation_examples(made, made.evaluation_split, FEATURES, str(tmp_path))
    found = examples.metrics([published.constant] * len(examples.targets))
    assert found.keys() == published.scores.keys()
    assert list(found) == [name for metric in made.metrics for name in metric.names]
    for metric, score in published.scores.items():
        if score is None:
            assert found[metric] is None
        else:
            assert found[metric] == pytest.approx(score)


@pytest.mark.parametrize("name", ["glue_cola", "trec"])
def test_examples_are_tokenized_with_eos(name, tmp_path):
    made = built(tmp_path, name)
    examples = evaluation_examples(made, "train", FEATURES, str(tmp_path))
    text = PUBLISHED[name].inputs
    assert examples.tokens[0].tolist() == [*VOCABULARY.encode(text), VOCABULARY.eos_id]


def test_files_are_found_from_above_and_packed(tmp_path):
    folder = written(tmp_path, "glue_cola")
    for each in (folder, folder / "glue", folder / "glue/CoLA"):
        source = Downstream("glue_cola", str(each)).open("validation", str(tmp_path))
        assert len(source) == 2 and source[1]["targets"] == "unacceptable"


def test_changed_files_are_read_again_and_the_content_is_the_fingerprint(tmp_path):
    corpus = Downstream("trec", str(written(tmp_path, "trec")))
    before = corpus.open("train", str(tmp_path))
    file = tmp_path / "trec/train.txt"
    file.write_text(file.read_text() + "HUM:ind Who ?\n")
    after = corpus.open("train", str(tmp_path))
    assert (len(before), len(after)) == (1, 2) and before.fingerprint != after.fingerprint
    assert after[1]["targets"] == "human"
    # Moved files are prepared anew, and are the same data.
    moved = tmp_path / "moved"
    (tmp_path / "trec").rename(moved)
    again = Downstream("trec", str(moved)).open("train", str(tmp_path))
    assert again.fingerprint == after.fingerprint


def test_rows_that_are_broken_are_named(tmp_path):
    corpus = Downstream("trec", str(written(tmp_path, "trec")))
    (tmp_path / "trec/train.txt").write_text("DESC:manner Why ?\nHow far ?\n")
    with refused("row 1: the line 'How far ?' does not begin with one of DESC, ENTY"):
        corpus.open("train", str(tmp_path))
    written(tmp_path, "super_glue_rte")
    (tmp_path / "super_glue/RTE/train.jsonl").write_text('{"premise": "p", "label": "yes"}\n')
    with refused("row 0: expected the field hypothesis, got the fields premise, label"):
        Downstream("super_glue_rte", str(tmp_path)).open("train", str(tmp_path))
    text = '{"premise": "p", "hypothesis": "h", "label": "yes"}\n'
    (tmp_path / "super_glue/RTE/train.jsonl").write_text(text)
    with refused("row 0: the label 'yes' is no number and none of entailment, not_entailment"):
        Downstream("super_glue_rte", str(tmp_path)).open("train", str(tmp_path))


def test_a_split_without_an_example_is_named(tmp_path):
    folder = written(tmp_path, "super_glue_wsc_train") / "super_glue/WSC"
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "test.jsonl").write_text(lines[0] + "\n")
    with refused("super_glue_wsc_train, test of <any> gives no example"):
        Downstream("super_glue_wsc_train", str(tmp_path)).open("test", str(tmp_path))


def test_bad_input_is_named(tmp_path):
    with refused("there is no data set 'glue_colla'"):
        task("glue_colla", VOCABULARY)
    with refused("the split 'train[' cannot be read"):
        task("trec", VOCABULARY, train_split="train[")
    with refused("scitldr is not in TFDS"):
        Downstream("scitldr").open("train", str(tmp_path))
    with refused("dpr is read from TFDS' definite_pronoun_resolution alone"):
        Downstream("dpr", str(tmp_path)).open("train", str(tmp_path))
    with refused(
        f"trec: none of train.txt, test.txt (or these packed, as .gz) is in {tmp_path}"
    ):
        Downstream("trec", str(tmp_path)).open("train", str(tmp_path))
    with refused(f"glue/cola is not prepared below {tmp_path}"):
        Downstream("glue_cola").open("train", str(tmp_path))
    made = built(tmp_path, "trec")
    with refused(f"trec in {tmp_path} has no split 'validation'"):
        evaluation_examples(made, "validation", FEATURES, str(tmp_path))
    examples = evaluation_examples(made, "test", FEATURES, str(tmp_path))
    with refused("task 'trec': 1 predictions for 2 examples of 'test'"):
        examples.metrics(["number"])


def test_sets_that_diagnose_are_evaluated_alone(tmp_path):
    made = task("glue_ax", VOCABULARY, str(written(tmp_path, "glue_ax")))
    with refused("glue_ax is evaluated alone, on 'test'"):
        open_split(made.corpus, made.train_split, str(tmp_path))
    examples = evaluation_examples(made, made.evaluation_split, FEATURES, str(tmp_path))
    assert examples.targets == ["<unk>"] and examples.metrics(["neutral"]) == {}
    assert examples.targets[0].choices == ("entailment", "neutral", "contradiction")


STORY = """A caption
By . A. Author

He said: "Yes"
Then he left

@highlight

He said yes

@highlight

He left!
"""


def with_stories(folder: pathlib.Path, **stories: str) -> pathlib.Path:
    """Lists and stories as they are published, of addresses `http://NAME`."""
    for publisher in ("cnn", "dailymail"):
        (folder / publisher / "stories").mkdir(parents=True, exist_ok=True)
    for number, (name, text) in enumerate(stories.items()):
        sha1 = hashlib.sha1(f"http://{name}".encode()).hexdigest()
        folder.joinpath(("cnn", "dailymail")[number % 2], f"stories/{sha1}.story").write_text(
            text, encoding="utf-8"
        )
    addresses = "".join(f"http://{name}\n" for name in stories)
    (folder / "all_train.txt").write_text(addresses)
    return folder


def test_stories_of_cnn_and_daily_mail(tmp_path):
    folder = with_stories(tmp_path / "cnn_dailymail", one=STORY, two=STORY + "Two")
    corpus = Downstream("cnn_dailymail", str(tmp_path))
    source = corpus.open("train", str(tmp_path))
    first, second = source
    # A full stop where none ends a line; all lines after the first mark are highlights.
    article = 'A caption. By . A. Author. He said: "Yes" Then he left.'
    assert first["inputs"] == f"summarize: {article}"
    assert first["targets"] == "He said yes.\nHe left!"
    assert second["targets"] == "He said yes.\nHe left!\nTwo."
    assert json.loads(first["facts"])["example_id"] == hashlib.sha1(b"http://one").hexdigest()
    # Another story makes the data anew; one without an article is left out, and counted.
    with_stories(folder, one=STORY, two="@highlight\n\nNo article", three=STORY)
    again = corpus.open("train", str(tmp_path))
    assert len(again) == 2 and again.fingerprint != source.fingerprint
    assert again.accounts[0].rows_left_out == {"stories without a text": 1}


def test_a_story_that_is_edited_is_read_again(tmp_path):
    folder = with_stories(tmp_path / "cnn_dailymail", one=STORY, two=STORY)
    corpus = Downstream("cnn_dailymail", str(tmp_path))
    before = corpus.open("train", str(tmp_path))
    story = folder / f"cnn/stories/{hashlib.sha1(b'http://one').hexdigest()}.story"
    story.write_text(story.read_text().replace("Yes", "No"))  # no time of its folder changes
    after = corpus.open("train", str(tmp_path))
    assert "Yes" in before[0]["inputs"] and "No" in after[0]["inputs"]


def test_stories_that_are_not_there_are_named(tmp_path):
    folder, sha1 = with_stories(tmp_path, one=STORY), hashlib.sha1(b"http://one").hexdigest()
    corpus = Downstream("cnn_dailymail", str(tmp_path))
    (folder / f"cnn/stories/{sha1}.story").unlink()
    with refused(f"{sha1}.story of 'http://one' is not in "):
        corpus.open("train", str(tmp_path))
    for publisher in ("cnn", "dailymail"):
        shutil.rmtree(folder / publisher)
    with refused("lists stories, and neither cnn/stories nor dailymail/stories is in"):
        corpus.open("train", str(tmp_path))
    (folder / "all_train.txt").unlink()
    with refused("cnn_dailymail: none of all_train.txt, train.jsonl, train.csv, all_val.txt"):
        corpus.open("train", str(tmp_path))


def test_a_mixture_is_evaluated_on_other_tasks(tmp_path):
    written(tmp_path, "glue_mnli")
    splits = ("validation_matched", "validation_mismatched")
    made = mixture(
        ("glue_mnli", "trec"), VOCABULARY, str(tmp_path), ProportionalRates(maximum=1),
        ("glue_mnli", "glue_mnli"), splits,
    )  # fmt: skip
    assert [each.name for each in made.tasks] == ["glue_mnli", "trec"]
    assert made.probabilities([300, 2]).tolist() == [0.5, 0.5]
    names = [each.name for each in evaluated_tasks(made)]
    assert names == ["glue_mnli_validation_matched", "glue_mnli_validation_mismatched"]
    targets = [
        evaluation_examples(each, each.evaluation_split, FEATURES, str(tmp_path)).targets
        for each in evaluated_tasks(made)
    ]
    assert targets == [["neutral", "contradiction"], ["contradiction"]]
    assert evaluated_tasks(mixture(("trec",), VOCABULARY))[0].name == "trec"
    with refused("evaluation_splits=('a', 'b') for evaluated=('trec',)"):
        mixture(("trec",), VOCABULARY, evaluated=("trec",), evaluation_splits=("a", "b"))
    with refused("an evaluation of ['trec', 'trec']"):
        made = mixture(("trec",), VOCABULARY)
        dataclasses.replace(made, evaluation=made.tasks * 2)


REAL = {  # examples of the training and the evaluation split, as their authors count them
    "glue_cola": (8551, 1043), "glue_sst2": (67349, 872), "super_glue_rte": (2490, 277),
    "super_glue_cb": (250, 56), "super_glue_copa": (400, 100), "trec": (5452, 500),
    "arc_easy": (2251, 570), "openbookqa": (4957, 500), "web_questions": (3417, 361),
    "scitldr": (1992, 619),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_files(name, tmp_path, shared_dir):
    made = task(name, VOCABULARY, str(shared_dir / "data"))
    sizes = [
        len(open_split(made.corpus, split, str(tmp_path)))
        for split in (made.train_split, made.evaluation_split)
    ]
    assert tuple(sizes) == REAL[name]
