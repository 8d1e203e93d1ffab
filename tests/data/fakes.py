# SPDX-License-Identifier: Apache-2.0
"""A corpus, a vocabulary and streams of them, small enough to work with by hand."""

import dataclasses

import numpy as np

from switchx.data.corpora.corpus import CorpusSource
from switchx.data.features import DecoderOnlyFeatures
from switchx.data.streams import ExampleStream, StreamPlan
from switchx.data.tasks import Task, open_task


@dataclasses.dataclass(frozen=True)
class NumberVocabulary:
    """Text is numbers, `12 5`; each is its own id. Sentinels: 999, 998, ..."""

    num_sentinels: int = 100
    size: int = 1000
    pad_id: int = 0
    eos_id: int = 1
    unk_id: int = 2
    start_id: int | None = 0

    def sentinel_id(self, index: int) -> int:
        return self.size - 1 - index

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def fingerprint(self) -> str:
        return f"numbers {self.num_sentinels} {self.size}"


@dataclasses.dataclass(frozen=True)
class ListCorpus:
    """The same records in each of its splits."""

    records: tuple[tuple[str, ...], ...]
    fields: tuple[str, ...] = ("text",)
    name: str = "list"

    def open(self, split: str, data_dir: str | None) -> CorpusSource:
        records = [
            {f: value.encode() for f, value in zip(self.fields, record, strict=True)}
            for record in self.records
        ]
        return CorpusSource(f"{self.name}/{split}", str(len(records)), self.fields, records)


def text_corpus(*documents: str) -> ListCorpus:
    return ListCorpus(tuple((document,) for document in documents))


def pair_corpus(*pairs: tuple[str, str], name: str = "list") -> ListCorpus:
    return ListCorpus(pairs, ("inputs", "targets"), name)


def numbers(first: int, count: int) -> str:
    return " ".join(str(first + i) for i in range(count))


VOCABULARY = NumberVocabulary()


def make_task(name, corpus, objective, **options) -> Task:
    return Task(name, corpus, VOCABULARY, objective, **options)


def make_plan(*tasks, features=DecoderOnlyFeatures(8), probabilities=None, seed=0, **options):
    opened = tuple(open_task(task, "train", None, features) for task in tasks)
    return StreamPlan(opened, np.array(probabilities or [1.0]), features, seed, **options)


def stream_of(plan, row=0) -> ExampleStream:
    return ExampleStream(plan, row, plan.new_cursor())


def take(stream, count) -> list:
    return [stream.take() for _ in range(count)]
