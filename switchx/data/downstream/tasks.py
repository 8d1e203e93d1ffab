# SPDX-License-Identifier: Apache-2.0
"""Downstream tasks: from a published data set to examples with their metrics.

    rows -> splits -> text function -> examples -> ArrayRecord -> slices -> Task

1. *Rows* come from TFDS by name (ArrayRecord or TFRecord, without TensorFlow), or from the
   files of a folder, `manual_dir`, as the data set's authors publish them.
2. A *text function* writes the examples of a row: `inputs` and `targets`, T5's to the byte, and
   under `facts` what else metrics need: all right answers, group, class, choices.
3. A split's examples are written once as ArrayRecord, in their order, under a key of the
   files' names, sizes and times and of `TEXT_VERSION` (`sources.py`).
4. From there on a task is like any other: `InputsToTargets` tokenizes and packs it for
   encoder-decoders and decoders, `train_split` and `evaluation_split` may be slices
   (`corpora/splits.py`), and `evaluation.py` gives its examples and its metrics of predictions.

`Downstream` is a data set of the table in `catalogue.py`; `templates.py` takes any other, with
templates for inputs and targets. Raffel et al. 2020 (arXiv:1910.10683), section 2.4.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from switchx.data.corpora.corpus import CorpusSource
from switchx.data.corpora.raw_files import Row
from switchx.data.downstream.catalogue import DATASETS, Dataset
from switchx.data.downstream.sources import Rows, open_rows, rows_of_files, rows_of_tfds
from switchx.data.downstream.texts import TextExample
from switchx.data.mixtures import Mixture, ProportionalRates
from switchx.data.objectives import InputsToTargets, RecordObjective
from switchx.data.tasks import Task
from switchx.data.tokenizers import Vocabulary
from switchx.fields import at_resume, require


@dataclasses.dataclass(frozen=True)
class Downstream:
    """A data set of the table.

    Attributes:
        dataset: name of the data set in the table.
        manual_dir: folder of its files, or one above it; None reads it from TFDS's folder.
    """

    dataset: str
    manual_dir: str | None = at_resume(None)

    def __post_init__(self):
        require_dataset(self.dataset)

    @property
    def name(self) -> str:
        return self.dataset

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        """Any existing split, as inputs, targets and facts.

        Raises:
            ValueError: there is no such split or no data, or a row lacks the published form.
        """
        found = DATASETS[self.dataset]
        require(
            found.train_split is not None or split != "train",
            f"{self.dataset} is evaluated alone, on {found.evaluation_split!r}; learn another "
            "data set, and name this one in EVALUATED, or in `switchx eval`",
        )
        rows = self._rows(found, split, data_dir)

        def examples(number: int, row: Row) -> Iterator[TextExample]:
            for each in found.rows(row):
                is_named = {"idx", "id"} & each.keys()
                yield from found.text(each if is_named else each | {"idx": number})

        return open_rows(self.dataset, rows, examples, split, data_dir)

    def _rows(self, found: Dataset, split: str, data_dir: str | None) -> Rows:
        if self.manual_dir is None:
            require(
                found.tfds is not None,
                f"{self.dataset} is not in TFDS; set MANUAL_DIR to the folder of its files",
            )
            return rows_of_tfds(found.tfds, data_dir)
        require(
            found.files,
            f"{self.dataset} is read from TFDS' {found.tfds} alone; leave MANUAL_DIR out",
        )
        folder = Path(self.manual_dir).expanduser()
        return rows_of_files(self.dataset, found.files, found.folder, folder, split)


def task(
    dataset: str,
    vocabulary: Vocabulary,
    manual_dir: str | None = None,
    train_split: str | None = None,
    evaluation_split: str | None = None,
    objective: RecordObjective = InputsToTargets(),
    too_long: Literal["drop", "truncate", "error"] = "truncate",
    cache_tokens: bool = False,
) -> Task:
    """The task of a data set of the table, under its name, measured as T5 does.

    Args:
        manual_dir: folder of the files, as in `Downstream`.
        train_split, evaluation_split: splits of the corpus; None takes those of the table.
        objective, too_long, cache_tokens: fields of `Task`; T5 truncates.

    Raises:
        ValueError: there is no such data set.
    """
    found = require_dataset(dataset)
    return Task(
        dataset,
        Downstream(dataset, manual_dir),
        vocabulary,
        objective,
        too_long,
        train_split or found.train_split or "train",
        evaluation_split or found.evaluation_split,
        found.metrics,
        cache_tokens,
    )


def mixture(
    datasets: tuple[str, ...],
    vocabulary: Vocabulary,
    manual_dir: str | None = None,
    rates: tuple[float, ...] | ProportionalRates = ProportionalRates(),
    evaluated: tuple[str, ...] | None = None,
    evaluation_splits: tuple[str, ...] | None = None,
    objective: RecordObjective = InputsToTargets(),
    cache_tokens: bool = False,
) -> Mixture:
    """Data sets of the table learnt together.

    Args:
        evaluated: data sets that are evaluated; None is all that are learnt.
        evaluation_splits: split of each of `evaluated`, in their order; None takes those of the
            table. One data set may be listed several times, with another split each.
        manual_dir, objective, cache_tokens: arguments as in `task`.

    Raises:
        ValueError: there is no such data set, or numbers of splits and tasks differ.
    """
    common = dict(manual_dir=manual_dir, objective=objective, cache_tokens=cache_tokens)
    tasks = tuple(task(name, vocabulary, **common) for name in datasets)
    if evaluated is None:
        require(evaluation_splits is None, "evaluation_splits need `evaluated`; name both")
        return Mixture(tasks, rates)
    splits = evaluation_splits or (None,) * len(evaluated)
    require(
        len(splits) == len(evaluated),
        f"evaluation_splits={evaluation_splits} for evaluated={evaluated}; use one for each",
    )
    others = []
    for name, split in zip(evaluated, splits, strict=True):
        other = task(name, vocabulary, evaluation_split=split, **common)
        label = f"{name}_{split}" if evaluated.count(name) > 1 else name
        others.append(dataclasses.replace(other, name=label))
    return Mixture(tasks, rates, evaluation=tuple(others))


def require_dataset(name: str) -> Dataset:
    """The data set of this name.

    Raises:
        ValueError: there is none.
    """
    require(
        name in DATASETS,
        f"there is no data set {name!r}; use one of {', '.join(DATASETS)}. Any other is read "
        "by templates: configs/tasks/templates.gin, or `switchx tasks tfds:NAME` (or a folder) "
        "with --inputs and --targets",
    )
    return DATASETS[name]
