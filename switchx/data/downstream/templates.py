# SPDX-License-Identifier: Apache-2.0
"""Any data set as a task: templates for inputs and targets, such as `question: {question}`.

The corpus reads TFDS by name, or a folder with a file for each split.
"""

import dataclasses
import math
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from switchx.data.corpora.corpus import CorpusSource
from switchx.data.corpora.raw_files import Row
from switchx.data.downstream.sources import Rows, open_rows, rows_of_folder, rows_of_tfds
from switchx.data.downstream.texts import TextExample, class_name
from switchx.data.objectives import InputsToTargets, RecordObjective
from switchx.data.tasks import Task
from switchx.data.text_metrics import TextMetric
from switchx.data.tokenizers import Vocabulary
from switchx.fields import at_resume, require

_TFDS = "tfds:"


@dataclasses.dataclass(frozen=True)
class Templates:
    """Any data set, its examples written by templates such as `question: {question}`.

    A template names fields of a row in braces, those of an inner dictionary or list after a
    slash: `{question/stem}`, `{answers/0}`; a literal brace is written twice. A class known to
    TFDS or `datasets` is written by its name, not its number.

    Attributes:
        source: `tfds:NAME`, or a folder with a file for each split, `train.jsonl`, `.json`,
            `.csv`, `.tsv`, packed or not, `.parquet` or `.arrow`, or saved by `datasets`.
        inputs, targets: templates of inputs and of targets.
        answers: field with the list of all right answers, for metrics that take several.
    """

    source: str = at_resume()
    inputs: str
    targets: str
    answers: str | None = None

    def __post_init__(self):
        for name in ("inputs", "targets"):
            fields_of_template(getattr(self, name), f"Templates.{name}")

    @property
    def name(self) -> str:
        return "templates_" + re.sub(r"\W+", "_", self.source.removeprefix(_TFDS)).strip("_")

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Any existing split, as inputs, targets and facts.

        Raises:
            ValueError: there is no such split or data, or a row lacks a field of a template.
        """
        rows = self._rows(data_dir)

        def examples(number: int, row: Row) -> Iterator[TextExample]:
            yield self._example(number, row, rows)

        key = (self.inputs, self.targets, self.answers)
        return open_rows(self.name, rows, examples, split, data_dir, key)

    def _rows(self, data_dir: str | None) -> Rows:
        if self.source.startswith(_TFDS):
            return rows_of_tfds(self.source.removeprefix(_TFDS), data_dir)
        return rows_of_folder(Path(self.source).expanduser())

    def _example(self, number: int, row: Row, rows: Rows) -> TextExample:
        answers = () if self.answers is None else _value(row, self.answers, "Templates.answers")
        require(
            isinstance(answers, list | tuple),
            f"Templates.answers={self.answers!r} is {answers!r}, expected a list; name another",
        )
        inputs, targets = (
            _fill(getattr(self, name), row, rows, f"Templates.{name}")
            for name in ("inputs", "targets")
        )
        return TextExample(inputs, targets, str(number), tuple(map(str, answers)))


def template_task(
    corpus: Templates,
    vocabulary: Vocabulary,
    metrics: tuple[TextMetric, ...] = (),
    train_split: str = "train",
    evaluation_split: str = "validation",
    objective: RecordObjective = InputsToTargets(),
    cache_tokens: bool = False,
) -> Task:
    """A task of templates, named after its source."""
    return Task(
        corpus.name,
        corpus,
        vocabulary,
        objective,
        "truncate",
        train_split,
        evaluation_split,
        metrics,
        cache_tokens,
    )


def fields_of_template(template: str, where: str) -> list[str]:
    """Fields that a template names, in order.

    Raises:
        ValueError: braces do not match, or hold something that is not a field.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"{where}={template!r}: {error}; write fields as {{name}}, a brace as {{{{"
        ) from error
    for _, field, spec, conversion in parts:
        is_field = field is None or (field.strip("/") and not spec and not conversion)
        require(is_field, f"{where}={template!r}: write fields as {{name}} or {{name/inner}}")
    return [field for _, field, _, _ in parts if field is not None]


def _fill(template: str, row: Row, rows: Rows, where: str) -> str:
    pieces = []
    for literal, field, _, _ in string.Formatter().parse(template):
        pieces.append(literal)
        if field is not None:
            pieces.append(_text(row, field, rows, where))
    return "".join(pieces)


def _text(row: Row, field: str, rows: Rows, where: str) -> str:
    value = _value(row, field, where)
    place = "/".join(name for name in field.split("/") if not name.isdecimal())
    if place in rows.class_names and not isinstance(value, list | dict):
        return class_name(value, rows.class_names[place])
    require(
        isinstance(value, str | int | float),
        f"{where}: the field {field!r} is a {type(value).__name__}; name a text or a number in "
        f"it, as {{{field}/0}} or {{{field}/inner}}",
    )
    require(
        not isinstance(value, float) or math.isfinite(value),
        f"{where}: the field {field!r} is {value}, which stands for no number; take the row "
        "out, or write what is meant",
    )
    return str(value)


def _value(row: Row, field: str, where: str) -> Any:
    value, path = row, []
    for name in field.split("/"):
        keys = list(value) if isinstance(value, dict) else ()
        keys = range(len(value)) if isinstance(value, list) else keys
        key = int(name) if isinstance(value, list) and name.isdecimal() else name
        require(
            key in keys,
            f"{where}: there is no field {field!r}; {'/'.join(path) or 'the row'} has "
            f"{', '.join(map(str, keys)) or 'nothing'}",
        )
        value, path = value[key], [*path, name]
    return value
