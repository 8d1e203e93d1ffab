# SPDX-License-Identifier: Apache-2.0
"""Rows as their authors publish them, converted to TFDS's names and values.

A function here takes a row of a file or of TFDS, which may have this form already, and yields
rows for a text function of `texts.py`: a class is its number, -1 if it is not given.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from switchx.data.corpora.raw_files import Row
from switchx.data.downstream.pronouns import fixed_spans
from switchx.data.downstream.texts import UNKNOWN_LABEL
from switchx.fields import require

RowFunction = Callable[[Row], Iterator[Row]]

_CHOICE = re.compile(r"\(([A-E])\) ")
# WebQuestions' list of answers as Lisp.
_DESCRIPTION = re.compile(r'\(description (?:"([^"]+?)"|([^)]+?))\)')


def columns(
    fields: dict[str, str], label: str = "label", classes: Sequence[str] = ()
) -> RowFunction:
    """Rows of texts and one label.

    Args:
        fields: our name -> the file's names, separated by `|`; the first one present counts.
        label: the label's names, likewise; a row without any is of a test set.
        classes: names of classes, if labels are written as such; numbers and truth values are
            taken as they are.
    """

    def rows(row: Row) -> Iterator[Row]:
        texts = {ours: first_of(row, theirs) for ours, theirs in fields.items()}
        present = [row[name] for name in label.split("|") if name in row]
        index = {name: row[name] for name in ("idx",) if name in row}
        yield texts | index | {"label": _class_number(present[0], classes) if present else -1}

    return rows


def _class_number(label: Any, classes: Sequence[str]) -> int:
    if label == "":
        return -1
    if label in classes:
        return list(classes).index(label)
    try:
        return int(label)
    except (TypeError, ValueError):
        raise ValueError(
            f"the label {label!r} is no number and none of {', '.join(classes)}; correct it"
        ) from None


def first_of(row: Row, names: str) -> Any:
    """The value of the first of some names, separated by `|`, that a row has.

    Raises:
        ValueError: the row has none of them.
    """
    for name in names.split("|"):
        if name in row:
            return row[name]
    raise ValueError(
        f"expected the field {names.replace('|', ' or ')}, got the fields {', '.join(row)}; "
        "use the files as they are published"
    )


def similarity(row: Row) -> Iterator[Row]:
    """STS-B: the score as a number, -1 in test sets."""
    yield {
        "sentence1": first_of(row, "sentence1"),
        "sentence2": first_of(row, "sentence2"),
        "label": float(row.get("label", row.get("score", -1))),
    } | {name: row[name] for name in ("idx",) if name in row}


def multirc(row: Row) -> Iterator[Row]:
    """Each answer of each question of a paragraph."""
    if "passage" not in row:
        yield row
        return
    for question in row["passage"]["questions"]:
        for answer in question["answers"]:
            index = {"paragraph": row["idx"], "question": question["idx"]}
            yield {
                "paragraph": row["passage"]["text"],
                "question": question["question"],
                "answer": answer["text"],
                "label": int(answer.get("label", -1)),
                "idx": index | {"answer": answer["idx"]},
            }


def record(row: Row) -> Iterator[Row]:
    """Each query of a passage, entities and answers once each and sorted."""
    if "qas" not in row:
        yield row
        return
    text = row["passage"]["text"]
    entities = {text[span["start"] : span["end"] + 1] for span in row["passage"]["entities"]}
    for query in row["qas"]:
        yield {
            "passage": text,
            "query": query["query"],
            "entities": sorted(entities),
            "answers": sorted({answer["text"] for answer in query.get("answers", ())}),
            "idx": {"passage": row["idx"], "query": query["idx"]},
        }


def schema(row: Row) -> Iterator[Row]:
    """WSC, its spans taken out of `target` and as they occur in the text."""
    spans = row.get("target", {})
    yield fixed_spans(row | spans | {"label": int(row.get("label", -1))})


def squad(row: Row) -> Iterator[Row]:
    """Each question of an article."""
    if "paragraphs" not in row:
        yield row
        return
    for paragraph in row["paragraphs"]:
        for question in paragraph["qas"]:
            answers = [answer["text"] for answer in question["answers"]]
            yield {
                "id": question["id"],
                "question": question["question"],
                "context": paragraph["context"],
                "answers": {"text": answers},
            }


def choices(row: Row) -> Iterator[Row]:
    """ARC and OpenBookQA in their several forms, as question, choices and the right one."""
    question, names, texts = _question_and_choices(row)
    answer = first_of(row, "answerKey|Answer Key")
    require(texts, f"the question {question[:80]!r} has no choices; correct the row")
    require(
        answer in names or answer in ("", -1),
        f"the answer {answer!r} of {question[:80]!r} is none of {names}; correct the row",
    )
    yield {
        "question": question,
        "choices": [text.strip() for text in texts],
        "label": names.index(answer) if answer in names else -1,
        "idx": row.get("id", row.get("ID", "")),
    }


def _question_and_choices(row: Row) -> tuple[str, list, list[str]]:
    """The question, the names that an answer's key may have, and the texts."""
    if "Choices" in row:  # OpenBookQA's table: `(A) the sun (B) ...`
        parts = _CHOICE.split(row["Choices"])
        return first_of(row, "Question Stem"), parts[1::2], parts[2::2]
    question = first_of(row, "question")
    if isinstance(question, str):  # TFDS's ARC
        table = first_of(row, "choices")
        return question, list(table["label"]), list(table["text"])
    if "choices" in question:  # ARC's and OpenBookQA's lines of JSON
        listed = question["choices"]
        return question["stem"], *([each[k] for each in listed] for k in ("label", "text"))
    fields = [f"choice_{letter}" for letter in "ABCDE"]  # TFDS's OpenBookQA, its key a number
    texts = [question[field] for field in fields if field in question]
    return question["stem"], list(range(len(texts))), texts


def kind_of_question(classes: Sequence[str]) -> RowFunction:
    """TREC: `NUM:dist How far ...`, or TFDS's `label-coarse`.

    Args:
        classes: the coarse kinds as the file names them, by TFDS's numbers.
    """

    def rows(row: Row) -> Iterator[Row]:
        if "label-coarse" in row:
            yield {"question": row["text"], "label": row["label-coarse"]}
            return
        kind, _, question = row["text"].partition(" ")
        coarse = kind.partition(":")[0]
        require(
            coarse in classes and question,
            f"the line {row['text'][:80]!r} does not begin with one of {', '.join(classes)}, a "
            "colon and a finer kind; correct it",
        )
        yield {"question": question, "label": list(classes).index(coarse)}

    return rows


def web_question(row: Row) -> Iterator[Row]:
    """WebQuestions with a list of answers, or as its authors write them, `(list ...)`."""
    answers = row.get("answers")
    if answers is None:
        found = _DESCRIPTION.findall(first_of(row, "targetValue"))
        answers = [quoted or bare for quoted, bare in found]
    question = first_of(row, "question|qText|utterance")
    require(answers, f"the question {question!r} has no answer; correct the row")
    yield {"question": question, "answers": answers, "id": first_of(row, "url|qId")}


def trivia_question(row: Row) -> Iterator[Row]:
    """TriviaQA's `Data`, or TFDS's rows."""
    if "Question" not in row:
        yield row | {"id": row.get("question_id", "")}
        return
    answer = row.get("Answer", {"Value": UNKNOWN_LABEL, "Aliases": []})
    aliases = [alias.strip() for alias in answer["Aliases"]]
    yield {
        "question": row["Question"],
        "answer": {"value": answer["Value"].strip(), "aliases": aliases},
        "id": row["QuestionId"],
    }


def abstract(row: Row) -> Iterator[Row]:
    """SciTLDR: the sentences of an abstract as one text, and its summaries."""
    yield {
        "document": " ".join(first_of(row, "source")),
        "summaries": list(first_of(row, "target")),
        "id": row.get("paper_id", ""),
    }


def as_it_is(row: Row) -> Iterator[Row]:
    """A row that has TFDS's form in all its sources."""
    yield row
