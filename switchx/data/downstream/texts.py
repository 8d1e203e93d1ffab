# SPDX-License-Identifier: Apache-2.0
"""Downstream examples as texts: what T5 writes for a row of a data set, byte for byte.

Raffel et al. 2020 (arXiv:1910.10683), section 2.4 and appendix D, as published in
`t5.data.preprocessors`; for closed-book questions Roberts et al. 2020 (arXiv:2002.08910),
`t5_cbqa.preprocessors`. A row has TFDS's names and values (a class is its number, -1 if it is
not given); a text function yields the examples of a row: none, one, or several.
"""

import dataclasses
import json
import numbers
import re
import string
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from switchx.data.corpora.raw_files import Row
from switchx.fields import require

UNKNOWN_LABEL = "<unk>"

TextFunction = Callable[[Row], Iterator["TextExample"]]

_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_SPACES = re.compile(r"[\t\n\f\r ]+")  # RE2's \s
_HIGHLIGHT_AFTER_END = re.compile(r"(\.|\?|\!|\"|\')\n@highlight\n")


@dataclasses.dataclass(frozen=True)
class TextExample:
    """The inputs and targets of an example, and further fields that metrics read.

    Attributes:
        example_id: name of the example in the data set.
        answers: all right answers, if there are several; `targets` is the first.
        group: name of a group of examples that are measured together (MultiRC) or once
            (ReCoRD).
        label: number of the class; None if targets are not classes.
        choices: texts among which `label` is the right one, to be ranked by score.
    """

    inputs: str
    targets: str
    example_id: str = ""
    answers: tuple[str, ...] = ()
    group: str = ""
    label: int | None = None
    choices: tuple[str, ...] = ()

    def record(self) -> dict[str, str]:
        """Texts for a corpus: `inputs`, `targets`, and the rest as JSON under `facts`."""
        facts = dataclasses.asdict(self)
        texts = {name: facts.pop(name) for name in ("inputs", "targets")}
        given = {name: value for name, value in facts.items() if value not in ("", (), None)}
        return texts | {"facts": json.dumps(given, ensure_ascii=False, sort_keys=True)}


def choice(name: str, fields: Sequence[str], classes: Sequence[str]) -> TextFunction:
    """`qqp question1: ... question2: ...`, and the name of the class (T5's `glue`).

    Args:
        name: name of the benchmark, which begins the inputs.
        fields: fields of a row, in the order in which they are written.
        classes: names of the classes, by number.
    """

    def examples(row: Row) -> Iterator[TextExample]:
        inputs = " ".join([name, *(part for f in fields for part in (f"{f}:", row[f]))])
        label = row["label"]
        yield TextExample(
            inputs, class_name(label, classes), _id_of(row), label=label, choices=tuple(classes)
        )

    return examples


def class_name(label: int, classes: Sequence[str]) -> str:
    """The class of a number, `<unk>` for -1, which test sets have.

    Raises:
        ValueError: there is no class of this number.
    """
    require(
        isinstance(label, numbers.Integral) and -1 <= label < len(classes),
        f"the label {label} is none of -1 to {len(classes) - 1}, {', '.join(classes)}; correct "
        "the row",
    )
    return UNKNOWN_LABEL if label == -1 else classes[label]


def similarity(row: Row) -> Iterator[TextExample]:
    """STS-B: the score as text, to the nearest fifth in single precision (T5's `stsb`)."""
    score = np.round(np.float32(row["label"]) * np.float32(5)) / np.float32(5)
    inputs = f"stsb sentence1: {row['sentence1']} sentence2: {row['sentence2']}"
    yield TextExample(inputs, f"{score:.1f}", _id_of(row))


def multirc(row: Row) -> Iterator[TextExample]:
    """MultiRC: one answer to a question, right or not; markup is removed."""
    fields, index = ("question", "answer", "paragraph"), row["idx"]
    (example,) = choice("multirc", fields, ("False", "True"))(row)
    yield dataclasses.replace(
        example,
        inputs=re.sub("<(/)?b>", "", example.inputs.replace("<br>", " ")),
        example_id=f"{index['paragraph']}/{index['question']}/{index['answer']}",
        group=str(index["question"]),
    )


def record(row: Row) -> Iterator[TextExample]:
    """ReCoRD: an example for each right entity; its group is the query."""
    passage = _HIGHLIGHT_AFTER_END.sub(r"\1 ", row["passage"]).replace("\n@highlight\n", ". ")
    entities, answers = ", ".join(row["entities"]), tuple(row["answers"])
    inputs = f"record query: {row['query']} entities: {entities} passage: {passage}"
    index = f"{row['idx']['passage']}/{row['idx']['query']}"
    for answer in answers or (UNKNOWN_LABEL,):
        yield TextExample(inputs, answer, index, answers, group=index)


def summary(article: str, highlights: str) -> TextFunction:
    """`summarize: ...`, from the two named fields."""

    def examples(row: Row) -> Iterator[TextExample]:
        wanted = row[highlights]
        several = tuple(wanted) if isinstance(wanted, list) else ()
        targets = several[0] if several else wanted
        yield TextExample(f"summarize: {row[article]}", targets, _id_of(row), several)

    return examples


def squad(row: Row) -> Iterator[TextExample]:
    """`question: ... context: ...`, with spaces around punctuation in all texts."""
    answers = tuple(map(pad_punctuation, row["answers"]["text"]))
    question, context = pad_punctuation(row["question"]), pad_punctuation(row["context"])
    inputs = _SPACES.sub(" ", f"question: {question} context: {context}")
    require(answers, f"the question {row['id']!r} has no answer; SQuAD 1.1 has one or more")
    yield TextExample(inputs, answers[0], row["id"], answers)


def pad_punctuation(text: str) -> str:
    """A space on both sides of each ASCII punctuation mark; runs of spaces become one."""
    return _SPACES.sub(" ", _PUNCTUATION.sub(r" \1 ", text))


def closed_book(
    prefix: str, answers: Callable[[Row], tuple[str, Sequence[str]]]
) -> TextFunction:
    """`nq question: ...`: a question without a text that contains the answer.

    Args:
        answers: function of a row that returns the target and all right answers.
    """

    def examples(row: Row) -> Iterator[TextExample]:
        target, right = answers(row)
        yield TextExample(f"{prefix}{row['question']}", target, _id_of(row), tuple(right))

    return examples


def question_with_choices(name: str) -> TextFunction:
    """`arc question: ... choices: (A) ... (B) ...`, and the text of the right one.

    T5's authors have published no text for these data sets; this one is ours.
    """

    def examples(row: Row) -> Iterator[TextExample]:
        choices, label = tuple(row["choices"]), row["label"]
        listed = " ".join(f"({chr(ord('A') + i)}) {each}" for i, each in enumerate(choices))
        yield TextExample(
            f"{name} question: {row['question']} choices: {listed}",
            class_name(label, choices),
            _id_of(row),
            label=label,
            choices=choices,
        )

    return examples


def _id_of(row: Row) -> str:
    return str(row.get("idx", row.get("id", "")))
