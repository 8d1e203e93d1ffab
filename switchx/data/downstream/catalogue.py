# SPDX-License-Identifier: Apache-2.0
"""The table of downstream data sets: the source, the text and the metrics of each.

Texts and metrics are T5's (`t5.data.tasks`, `t5.data.glue_utils`; closed-book questions
`t5_cbqa.tasks`) where its authors published them. For ANLI, ARC, OpenBookQA, TREC and
Winogrande they did not: those texts follow the same form, and are marked `is_ours`.
"""

import dataclasses

from switchx.data.corpora.raw_files import RawFile
from switchx.data.corpora.stories import StoryList
from switchx.data.downstream import pronouns, published, texts
from switchx.data.downstream.sources import Files
from switchx.data.label_metrics import (
    BinaryF1,
    GroupExactMatch,
    MacroF1,
    MatthewsCorrelation,
    Pearson,
    ReferentAccuracy,
    Spearman,
)
from switchx.data.text_metrics import Accuracy, Rouge, Squad, TextMetric


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One downstream data set.

    Attributes:
        text: function of a row that returns its examples.
        rows: function that brings rows of the files, and of TFDS, into one form.
        tfds: name of the data set in TFDS; None if TFDS does not have it.
        folder: path of its files in `manual_dir`: they are in it, or in a path of its last
            parts.
        files: files by split.
        train_split, evaluation_split: T5's splits; a data set without a `train_split` is only
            evaluated.
        is_ours: whether the text is our own, not one that T5's authors published.
    """

    text: texts.TextFunction
    metrics: tuple[TextMetric, ...]
    tfds: str | None = None
    folder: str = ""
    files: Files = dataclasses.field(default_factory=dict)
    rows: published.RowFunction = published.as_it_is
    train_split: str | None = "train"
    evaluation_split: str = "validation"
    is_ours: bool = False


def _files(options: dict | None = None, **splits: str) -> Files:
    """`train="a.json+b.json|c.json"`: the first two together, or the last, whichever exists."""
    return {
        split: tuple(
            tuple(RawFile(name, **(options or {})) for name in names.split("+"))
            for names in alternatives.split("|")
        )
        for split, alternatives in splits.items()
    }


_GLUE = {"skips_short_rows": True}
_GLUE_FILES = _files(_GLUE, train="train.tsv", validation="dev.tsv", test="test.tsv")
_COLA_FILES = {
    **_files({"has_header": False}, train="train.tsv", validation="dev.tsv"),
    **_files(test="test.tsv"),
}
_MNLI_FILES = _files(
    _GLUE,
    train="train.tsv",
    validation_matched="dev_matched.tsv",
    validation_mismatched="dev_mismatched.tsv",
    test_matched="test_matched.tsv",
    test_mismatched="test_mismatched.tsv",
)
_SUMMARIES = {each: f"{each}.jsonl|{each}.csv" for each in ("train", "validation", "test")}
_CNN_LISTS = {"train": "all_train.txt", "validation": "all_val.txt", "test": "all_test.txt"}
_CNN_FILES = {
    split: ((StoryList(name),), *_files(**_SUMMARIES)[split])
    for split, name in _CNN_LISTS.items()
}
_TRUTH = ("False", "True")
_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")


def _glue(
    name: str,
    folder: str,
    fields: dict[str, str],
    classes: tuple[str, ...],
    metrics: tuple[TextMetric, ...] = (Accuracy(),),
    label: str = "label",
    files: Files = _GLUE_FILES,
    **more,
) -> Dataset:
    """A data set of GLUE with classes; T5 writes its fields in alphabetical order."""
    return Dataset(
        texts.choice(name, sorted(fields), classes),
        metrics,
        f"glue/{name}",
        f"glue/{folder}",
        files,
        published.columns(fields, label, classes),
        **more,
    )


def _super_glue(
    name: str,
    folder: str,
    text: texts.TextFunction,
    rows: published.RowFunction,
    metrics: tuple[TextMetric, ...] = (Accuracy(),),
    **more,
) -> Dataset:
    files = _files(train="train.jsonl", validation="val.jsonl", test="test.jsonl")
    return Dataset(
        text, metrics, f"super_glue/{name}", f"super_glue/{folder}", files, rows, **more
    )


def _super_glue_classes(
    name: str,
    folder: str,
    fields: str,
    classes: tuple[str, ...],
    metrics: tuple[TextMetric, ...] = (Accuracy(),),
) -> Dataset:
    names = fields.split()
    rows = published.columns({field: field for field in names}, "label", classes)
    return _super_glue(name, folder, texts.choice(name, names, classes), rows, metrics)


def _diagnostic(
    benchmark: str, name: str, file: str, cast_as: str, classes: tuple[str, ...]
) -> Dataset:
    """A diagnostic set, written as the task that it is cast as; T5 has no metric for it."""
    return Dataset(
        texts.choice(cast_as, sorted(_MNLI), classes),
        (),
        f"{benchmark}/{name}",
        f"{benchmark}/{file.partition('.')[0]}",
        _files(test=file),
        published.columns(_MNLI, "label", classes),
        train_split=None,
        evaluation_split="test",
    )


def _anli(number: int) -> Dataset:
    fields = {"hypothesis": "hypothesis", "premise": "premise|context"}
    return Dataset(
        texts.choice("anli", sorted(fields), _NLI),
        (Accuracy(),),
        f"anli/r{number}",
        f"anli_v1.0/R{number}",
        _files(train="train.jsonl", validation="dev.jsonl", test="test.jsonl"),
        published.columns(fields, "label", ("e", "n", "c")),  # the first letters of _NLI
        is_ours=True,
    )


def _arc(level: str) -> Dataset:
    splits = {"train": "Train", "validation": "Dev", "test": "Test"}
    names = {
        split: f"ARC-{level}-{theirs}.jsonl|{split}.jsonl|{split}.json"
        for split, theirs in splits.items()
    }
    return Dataset(
        texts.question_with_choices("arc"),
        (Accuracy(),),
        f"ai2_arc/ARC-{level}",
        f"arc_{level.lower()}",
        _files(**names),
        published.choices,
        is_ours=True,
    )


def _question(tfds: str, folder: str, text, files: Files, rows, **more) -> Dataset:
    """A data set of questions with several right answers."""
    metrics = more.pop("metrics", (Squad(),))
    return Dataset(text, metrics, tfds, folder, files, rows, **more)


def _summaries(
    tfds: str | None, folder: str, text, rows=published.as_it_is, **names
) -> Dataset:
    """A data set of articles and summaries, as lines of JSON or as a table."""
    return Dataset(text, (Rouge(),), tfds, folder, _files(**names), rows)


_MNLI = {"premise": "premise|sentence1", "hypothesis": "hypothesis|sentence2"}
_PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"}
_MRPC = {"sentence1": "sentence1|#1 String", "sentence2": "sentence2|#2 String"}
_QQP = {"question1": "question1", "question2": "question2"}
_COLA_CLASSES = ("unacceptable", "acceptable")
_MRPC_CLASSES = ("not_equivalent", "equivalent")
_QQP_CLASSES = ("not_duplicate", "duplicate")
_CB_CLASSES = ("entailment", "contradiction", "neutral")
_WINOGRANDE = {name: name for name in ("option1", "option2", "sentence")}
_TREC = {
    "DESC": "description",
    "ENTY": "entity",
    "ABBR": "abbreviation",
    "HUM": "human",
    "NUM": "number",
    "LOC": "location",
}

DATASETS = {
    "glue_cola": _glue(
        "cola",
        "CoLA",
        {"sentence": "sentence|3"},
        _COLA_CLASSES,
        (MatthewsCorrelation(_COLA_CLASSES),),
        "label|1",
        _COLA_FILES,
    ),
    "glue_sst2": _glue("sst2", "SST-2", {"sentence": "sentence"}, ("negative", "positive")),
    "glue_mrpc": _glue(
        "mrpc",
        "MRPC",
        _MRPC,
        _MRPC_CLASSES,
        (BinaryF1(_MRPC_CLASSES), Accuracy()),
        "label|Quality",
    ),
    "glue_stsb": Dataset(
        texts.similarity,
        (Pearson(), Spearman()),
        "glue/stsb",
        "glue/STS-B",
        _GLUE_FILES,
        published.similarity,
    ),
    "glue_qqp": _glue(
        "qqp",
        "QQP",
        _QQP,
        _QQP_CLASSES,
        (BinaryF1(_QQP_CLASSES), Accuracy()),
        "label|is_duplicate",
    ),
    "glue_mnli": _glue(
        "mnli",
        "MNLI",
        _MNLI,
        _NLI,
        label="label|gold_label",
        files=_MNLI_FILES,
        evaluation_split="validation_matched",
    ),
    "glue_qnli": _glue(
        "qnli", "QNLI", {"question": "question", "sentence": "sentence"}, _ENTAILMENT
    ),
    "glue_rte": _glue("rte", "RTE", _PAIR, _ENTAILMENT),
    "glue_wnli": _glue("wnli", "WNLI", _PAIR, ("not_entailment", "entailment")),
    "glue_ax": _diagnostic("glue", "ax", "diagnostic.tsv", "mnli", _NLI),
    "super_glue_boolq": _super_glue_classes("boolq", "BoolQ", "passage question", _TRUTH),
    "super_glue_cb": _super_glue_classes(
        "cb", "CB", "hypothesis premise", _CB_CLASSES, (MacroF1(_CB_CLASSES), Accuracy())
    ),
    "super_glue_copa": _super_glue_classes(
        "copa", "COPA", "choice1 choice2 premise question", ("choice1", "choice2")
    ),
    "super_glue_multirc": _super_glue(
        "multirc",
        "MultiRC",
        texts.multirc,
        published.multirc,
        (BinaryF1(_TRUTH), GroupExactMatch()),
    ),
    "super_glue_record": _super_glue(
        "record", "ReCoRD", texts.record, published.record, (Squad(once_per_group=True),)
    ),
    "super_glue_rte": _super_glue_classes("rte", "RTE", "hypothesis premise", _ENTAILMENT),
    "super_glue_wic": _super_glue_classes("wic", "WiC", "sentence1 sentence2 word", _TRUTH),
    "super_glue_wsc_train": _super_glue(
        "wsc.fixed", "WSC", pronouns.wsc_train, published.schema, ()
    ),
    "super_glue_wsc_eval": _super_glue(
        "wsc.fixed", "WSC", pronouns.wsc_eval, published.schema, (ReferentAccuracy(),)
    ),
    "super_glue_axb": _diagnostic("super_glue", "axb", "AX-b.jsonl", "rte", _ENTAILMENT),
    "super_glue_axg": _diagnostic("super_glue", "axg", "AX-g.jsonl", "rte", _ENTAILMENT),
    "dpr": Dataset(
        pronouns.definite_pronouns,
        (Accuracy(),),
        "definite_pronoun_resolution",
        evaluation_split="test",
    ),
    "squad": _question(
        "squad/v1.1",
        "squad",
        texts.squad,
        _files({"rows_in": "data"}, train="train-v1.1.json", validation="dev-v1.1.json"),
        published.squad,
    ),
    "cnn_dailymail": Dataset(
        texts.summary("article", "highlights"),
        (Rouge(),),
        "cnn_dailymail",
        "cnn_dailymail",
        _CNN_FILES,
    ),
    "xsum": _summaries(
        "xsum",
        "xsum",
        texts.summary("document", "summary"),
        **_SUMMARIES,
    ),
    "scitldr": _summaries(
        None,
        "scitldr",
        texts.summary("document", "summaries"),
        published.abstract,
        train="train.jsonl",
        validation="dev.jsonl",
        test="test.jsonl",
    ),
    "anli_r1": _anli(1),
    "anli_r2": _anli(2),
    "anli_r3": _anli(3),
    "arc_easy": _arc("Easy"),
    "arc_challenge": _arc("Challenge"),
    "openbookqa": Dataset(
        texts.question_with_choices("openbookqa"),
        (Accuracy(),),
        "openbookqa",
        "openbookqa",
        _files(
            train="train_complete.jsonl|train.jsonl|train.tsv",
            validation="dev_complete.jsonl|dev.jsonl|dev.tsv",
            test="test_complete.jsonl|test.jsonl|test.tsv",
        ),
        published.choices,
        is_ours=True,
    ),
    "winogrande": Dataset(
        texts.choice("winogrande", sorted(_WINOGRANDE), ("option1", "option2")),
        (Accuracy(),),
        "winogrande",
        "winogrande",
        _files(
            **{f"train_{size}": f"train_{size}.jsonl" for size in ("xs", "s", "m", "l", "xl")},
            validation="dev.jsonl",
            test="test.jsonl",
        ),
        published.columns(_WINOGRANDE, "label|answer", ("1", "2")),
        train_split="train_xl",
        is_ours=True,
    ),
    "trec": Dataset(
        texts.choice("trec", ("question",), tuple(_TREC.values())),
        (Accuracy(),),
        "trec",
        "trec",
        _files(train="train.txt", test="test.txt"),
        published.kind_of_question(tuple(_TREC)),
        evaluation_split="test",
        is_ours=True,
    ),
    "natural_questions_open": _question(
        "natural_questions_open",
        "nq_open",
        texts.closed_book("nq question: ", lambda row: (row["answer"][0], row["answer"])),
        _files(train="NQ-open.train.jsonl", validation="NQ-open.dev.jsonl"),
        published.as_it_is,
        train_split="train[:79168]",
        evaluation_split="train[79168:]",
    ),
    "web_questions": _question(
        "web_questions",
        "web_questions",
        texts.closed_book("wq question: ", lambda row: (row["answers"][0], row["answers"])),
        _files(
            train="webquestions.examples.train.json|trainmodel.json+val.json+devtest.json",
            test="webquestions.examples.test.json|test.json",
        ),
        published.web_question,
        train_split="train[:3417]",
        evaluation_split="train[3417:]",
    ),
    "trivia_qa": _question(
        "trivia_qa/unfiltered.nocontext",
        "triviaqa-unfiltered",
        texts.closed_book(
            "trivia_qa question: ",
            lambda row: (row["answer"]["value"], row["answer"]["aliases"]),
        ),
        _files(
            {"rows_in": "Data"},
            train="unfiltered-web-train.json",
            validation="unfiltered-web-dev.json",
            test="unfiltered-web-test-without-answers.json",
        ),
        published.trivia_question,
        train_split="train[:78785]",
        evaluation_split="train[78785:]",
        metrics=(Squad("trivia_qa"),),
    ),
}
