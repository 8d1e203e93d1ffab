# SPDX-License-Identifier: Apache-2.0
"""Tasks: a corpus, read by a vocabulary, learnt by an objective."""

import dataclasses
from typing import Literal

from switchx.data.corpora.corpus import Corpus, CorpusSource
from switchx.data.features import Features
from switchx.data.objectives import Objective, TextObjective
from switchx.data.text_metrics import TextMetric
from switchx.data.tokenizers import Vocabulary
from switchx.fields import at_resume, check_choices, require


@dataclasses.dataclass(frozen=True)
class Task:
    """What there is to learn from one corpus.

    Attributes:
        name: stands in metrics and in the loader's state.
        too_long: what becomes of an example of a `RecordObjective` that no row holds:
            `drop` and `truncate` are counted (`TrainLoader.counts`), `error` stops. (T5X
            truncates and does not say so.) Text is cut into chunks that fit.
        train_split, evaluation_split: the corpus' names for what is trained and evaluated
            on.
        metrics: of the texts that a model writes to the inputs, against the targets.
    """

    name: str
    corpus: Corpus
    vocabulary: Vocabulary = at_resume()
    objective: Objective
    too_long: Literal["drop", "truncate", "error"] = "drop"
    train_split: str = "train"
    evaluation_split: str = "validation"
    metrics: tuple[TextMetric, ...] = at_resume(())

    def __post_init__(self):
        check_choices(self)
        require(
            not self.metrics or self.objective.has_texts,
            f"task {self.name!r}: metrics compare texts with targets, and the objective "
            f"{type(self.objective).__name__} has no texts for targets; use InputsToTargets, "
            "or no metrics",
        )


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """A task with one split of its corpus at hand.

    Attributes:
        chunk_length: tokens of raw text an example is made of; None for a `RecordObjective`.
    """

    task: Task
    records: CorpusSource
    chunk_length: int | None

    @property
    def description(self) -> dict[str, str]:
        """What has to stay the same for a stream of examples to be the same."""
        return {
            "corpus": f"{self.records.name} {self.records.fingerprint}",
            "objective": repr(self.task.objective),
            "vocabulary": self.task.vocabulary.fingerprint(),
            "too_long": self.task.too_long,
        }


def open_task(task: Task, split: str, data_dir: str | None, features: Features) -> OpenTask:
    """Opens a split of the task's corpus and checks that everything fits together.

    Raises:
        ValueError: the objective does not suit the features or the corpus' records, or
            there are none.
    """
    is_text = isinstance(task.objective, TextObjective)
    chunk_length = task.objective.chunk_length(features) if is_text else None
    records = task.corpus.open(split, data_dir)
    require(
        len(records) > 0,
        f"task {task.name!r}: split {split!r} of {task.corpus} is empty; name another split or "
        "give it data",
    )
    missing = set(task.objective.reads) - set(records.fields)
    better = "InputsToTargets" if is_text else "SpanCorruption, PrefixLM or CausalLM"
    require(
        not missing,
        f"task {task.name!r}: {type(task.objective).__name__} reads {sorted(missing)}, the "
        f"records of {task.corpus} have {sorted(records.fields)}; use the objective {better}, "
        "or another corpus",
    )
    return OpenTask(task, records, chunk_length)
