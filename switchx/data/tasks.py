# SPDX-License-Identifier: Apache-2.0
"""Tasks: a corpus, read by a vocabulary, learnt by an objective.

Also `TextFormat`: how a text becomes the token ids that a model of such tasks learnt to read.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal, Self

from switchx.data.corpora.corpus import Corpus, CorpusSource
from switchx.data.corpora.splits import open_split, parse_split
from switchx.data.features import Features
from switchx.data.objectives import OBJECTIVES, Objective, TextObjective
from switchx.data.text_metrics import TextMetric
from switchx.data.token_cache import Encoded, Tokenizer, open_tokens
from switchx.data.tokenizers import Vocabulary
from switchx.fields import at_resume, check_choices, from_description, require

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclasses.dataclass(frozen=True)
class Task:
    """The learning task of one corpus.

    Attributes:
        name: name of the task in metrics and in the loader's state.
        corpus: source of the examples.
        vocabulary: vocabulary of the token ids.
        objective: how inputs and targets are made from the corpus.
        too_long: treatment of an example of a `RecordObjective` that fits in no row: `drop` and
            `truncate` are counted (`TrainLoader.counts`), `error` stops. (T5X truncates
            silently.) Text is cut into chunks that fit.
        train_split, evaluation_split: splits for training and evaluation: the corpus's names,
            slices of them or several, such as `train[:90%]` (`corpora/splits.py`).
        metrics: metrics of the texts that a model generates for the inputs, against the
            targets.
        cache_tokens: whether tokens are made once and kept on disk (`token_cache.py`), for
            corpora whose tokenization is slow; the examples are the same either way.
    """

    name: str
    corpus: Corpus
    vocabulary: Vocabulary = at_resume()
    objective: Objective
    too_long: Literal["drop", "truncate", "error"] = "drop"
    train_split: str = "train"
    evaluation_split: str = "validation"
    metrics: tuple[TextMetric, ...] = at_resume(())
    cache_tokens: bool = at_resume(False)

    def __post_init__(self):
        check_choices(self)
        parse_split(self.train_split)
        parse_split(self.evaluation_split)
        require(
            not self.metrics or self.objective.has_texts,
            f"task {self.name!r}: metrics compare texts with targets, and the objective "
            f"{type(self.objective).__name__} has no texts for targets; use InputsToTargets, "
            "or no metrics",
        )
        for metric in self.metrics:
            require(
                hasattr(metric, "names") and hasattr(metric, "results"),
                f"task {self.name!r}: {type(metric).__name__} is no TextMetric; give it "
                "`results`, and their `names`",
            )


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """A task with one opened split of its corpus.

    Attributes:
        chunk_length: number of tokens of raw text in an example; None for a `RecordObjective`.
        tokens: token ids of each record.
    """

    task: Task
    records: CorpusSource
    chunk_length: int | None
    tokens: Encoded

    @property
    def description(self) -> dict[str, str]:
        """The properties that must stay the same for the stream of examples to be the same."""
        return {
            "corpus": f"{self.records.name} {self.records.fingerprint}",
            "objective": repr(self.task.objective),
            "vocabulary": self.task.vocabulary.fingerprint(),
            "too_long": self.task.too_long,
        }


def open_task(task: Task, split: str, data_dir: str | None, features: Features) -> OpenTask:
    """Opens a split of the task's corpus and checks that everything fits together.

    Raises:
        ValueError: the objective does not suit the features or the corpus's records, or
            there are no records.
    """
    is_text = isinstance(task.objective, TextObjective)
    chunk_length = task.objective.chunk_length(features) if is_text else None
    records = open_split(task.corpus, split, data_dir)
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
    tokens = Tokenizer(records, task.objective, task.vocabulary)
    kept = open_tokens(tokens, data_dir) if task.cache_tokens else tokens
    return OpenTask(task, records, chunk_length, kept)


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """The changes that the tasks of a model's training make to the texts that they read.

    Attributes:
        inputs_end_with_eos: whether inputs end with EOS, as in span corruption and inputs to
            targets; a prefix ends anywhere.
        is_prompt_bidirectional: whether a decoder-only model's inputs attend to all inputs,
            if the objective says so.
        names_sentinels: whether `<extra_id_0>` in a text is sentinel 0, not its characters.
    """

    inputs_end_with_eos: bool
    is_prompt_bidirectional: bool
    names_sentinels: bool

    @classmethod
    def of_training(cls, source: Any, *, is_encoder_decoder: bool) -> Self:
        """The format of a task or a mixture, by its description in `config.json`.

        If its tasks differ: with eos if one of them writes it, and with a bidirectional prompt
        if one of them has it. If nothing is known about them (a model from elsewhere): T5's
        format for a model with an encoder, a causal language model's for one without.

        Raises:
            ValueError: a user's own objective cannot be imported.
        """
        found = list(_objectives(source))
        if not found:
            return cls(is_encoder_decoder, False, is_encoder_decoder)
        return cls(
            any(each.ends_inputs_with_eos for each in found),
            not is_encoder_decoder and any(each.is_prefix_bidirectional for each in found),
            any(each.has_sentinels for each in found),
        )

    def inputs(self, vocabulary: Vocabulary, text: str) -> list[int]:
        """Token ids that an encoder reads, or that a decoder-only model continues."""
        tokens = self._tokens(vocabulary, text)
        return tokens + [vocabulary.eos_id] if self.inputs_end_with_eos else tokens

    def targets(self, vocabulary: Vocabulary, text: str) -> list[int]:
        """A whole text that a model may write, its end included."""
        return [*self._tokens(vocabulary, text), vocabulary.eos_id]

    def _tokens(self, vocabulary: Vocabulary, text: str) -> list[int]:
        parts = _SENTINEL.split(text)  # odd ones are numbers of sentinels
        if not self.names_sentinels or len(parts) == 1 or not vocabulary.num_sentinels:
            return vocabulary.encode(text)
        if vocabulary.sentinel_id(0) in vocabulary.encode("<extra_id_0>"):
            return vocabulary.encode(text)  # sentinels are pieces of its model
        tokens, n = [], vocabulary.num_sentinels
        for part in parts[1::2]:
            has = f"the model has <extra_id_0> to <extra_id_{n - 1}>; use these"
            require(int(part) < n, f"<extra_id_{part}> in a text: {has}")
        for i, part in enumerate(parts):
            tokens += [vocabulary.sentinel_id(int(part))] if i % 2 else vocabulary.encode(part)
        return tokens


def _objectives(source: Any) -> Iterator[Objective]:
    """All objectives in the description of a task or a mixture."""
    if isinstance(source, list):
        for item in source:
            yield from _objectives(item)
    elif isinstance(source, dict):
        objective = source.get("objective")
        if isinstance(objective, dict):
            cls = OBJECTIVES.get(name := objective.get("type", ""), Objective)
            require(
                cls is not Objective or "." in name,
                f"config.json names the objective {name!r}; expected one of "
                f"{', '.join(OBJECTIVES)}, or a class with its module",
            )
            yield from_description(cls, objective, "config.json")
        for item in source.values():
            yield from _objectives(item)
