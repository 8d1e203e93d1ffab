# SPDX-License-Identifier: Apache-2.0
"""Readers: the examples of one task, as one row of the batch reads them.

Dims: L
"""

import numpy as np

from switchx.data.features import Example
from switchx.data.stream_plan import START, StreamPlan


class TextReader:
    """Chunks of a task's documents, tokenized and joined, as one row reads them."""

    def __init__(self, plan: StreamPlan, index: int, row: int):
        self._plan = plan
        self._open = plan.tasks[index]
        self._index = index
        self._documents = plan.records[index]
        self._first_lane = row * plan.num_lanes
        self._tokens = {}  # lane -> (number of the document, its tokens)

    def read(self, cursor, rng: np.random.Generator) -> Example | None:
        task = self._open.task
        chunk_L = self._chunk(cursor, int(rng.integers(self._plan.num_lanes)))
        # At the end of a finite stream, less than an example may be left.
        if len(chunk_L) < task.objective.min_tokens:
            return None
        return task.objective.example(chunk_L, task.vocabulary, self._plan.features, rng)

    def _chunk(self, cursor, lane: int) -> np.ndarray:
        document, offset = cursor["document"], cursor["offset"]
        parts, missing, num_empty = [], self._open.chunk_length, 0
        while missing and not self._is_at_end(document[lane]):
            tokens_L = self._document(lane, int(document[lane]))
            parts.append(tokens_L[offset[lane] : offset[lane] + missing])
            missing -= len(parts[-1])
            offset[lane] += len(parts[-1])
            if offset[lane] == len(tokens_L):
                document[lane] += 1
                offset[lane] = 0
            num_empty = 0 if len(tokens_L) else num_empty + 1
            if num_empty > self._plan.patience(self._index):
                raise ValueError(
                    f"task {self._open.task.name!r}: {num_empty} documents in a row have no "
                    "text; use another corpus"
                )
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _is_at_end(self, document: int) -> bool:
        return self._plan.is_finite and document >= len(self._open.records)

    def _document(self, lane: int, number: int) -> np.ndarray:
        if self._tokens.get(lane, (None,))[0] != number:
            self._tokens[lane] = (number, self._tokenize(lane, number))
        return self._tokens[lane][1]

    def _tokenize(self, lane: int, number: int) -> np.ndarray:
        plan, task = self._plan, self._open.task
        stream = self._first_lane + lane
        text = self._documents[stream + number * plan.num_rows * plan.num_lanes]["text"]
        tokens = task.vocabulary.encode(text)
        if tokens and task.objective.joins_with_eos:
            tokens.append(task.vocabulary.eos_id)
        # Streams begin somewhere in their first document. With fewer documents than
        # streams, many would otherwise read the same in step.
        if tokens and number == 0 and not plan.is_finite:
            rng = plan.generator(START, self._index, stream)
            tokens = tokens[rng.integers(len(tokens)) :]
        return np.array(tokens, np.int32)


class PairReader:
    """Records that are examples already, as one row reads them."""

    def __init__(self, plan: StreamPlan, index: int, row: int):
        self._plan = plan
        self._open = plan.tasks[index]
        self._index = index
        self._records = plan.records[index]
        self._row = row

    def read(self, cursor, rng: np.random.Generator) -> Example | None:
        del rng
        task, features = self._open.task, self._plan.features
        for _ in range(self._plan.patience(self._index)):
            number = int(cursor["document"][0])
            if self._plan.is_finite and number >= len(self._open.records):
                return None
            record = self._records[self._row + number * self._plan.num_rows]
            cursor["document"][0] += 1
            example = task.objective.example(record, task.vocabulary)
            size = features.size(example)
            if all(used <= have for used, have in zip(size, features.capacity, strict=True)):
                return example
            if task.too_long == "truncate":
                cursor["truncated"] += 1
                return features.truncate(example, task.vocabulary.eos_id)
            if task.too_long == "error":
                raise ValueError(
                    f"task {task.name!r}: an example of {size} tokens, a row holds "
                    f"{features.capacity}: {str(record)[:200]}; use longer features, or "
                    "too_long='truncate' or 'drop' for the task"
                )
            cursor["dropped"] += 1
        raise ValueError(
            f"task {task.name!r}: {self._plan.patience(self._index)} examples in a row are too "
            f"long for a row of {features.capacity} tokens; use longer features, or "
            "too_long='truncate'"
        )
