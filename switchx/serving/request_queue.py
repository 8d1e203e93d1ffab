# SPDX-License-Identifier: Apache-2.0
"""The request queue: inputs that wait to join those being decoded. It is bounded."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from switchx.inference.config import DecodingConfig
from switchx.inference.running_batch import Hypothesis
from switchx.serving.limits import Limits

# What happens to an input; `number` is its place in the request, on which samples depend.


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """All tokens of an input's answer so far, with a hypothesis that has log-probabilities."""

    number: int
    tokens: list[int]
    so_far: Hypothesis | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The best hypothesis of an input, and for a search the next best that were asked for."""

    number: int
    hypothesis: Hypothesis
    others: Sequence[Hypothesis] = ()


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an input has no answer: its batch failed, or it cannot be answered."""

    number: int
    message: str = "the model failed; the server's log says how"


Event = NewTokens | Answer | Failure


@dataclasses.dataclass(frozen=True)
class ProgramShape:
    """The sizes and settings for which a batch's programs are compiled, except the row count.

    Attributes:
        prompt_length, answer_length: lengths to which prompts and answers are padded.
        has_processors, num_kept, is_recorded: see `DecodingProgram`.
    """

    prompt_length: int
    answer_length: int
    beam_size: int
    is_sampling: bool
    has_processors: bool = False
    num_kept: int | None = None
    is_recorded: bool = False

    def __str__(self) -> str:
        """`prompts up to 16 tokens, answers up to 64, the likeliest token`."""
        how = "sampled" if self.is_sampling else "the likeliest token"
        how = f"{self.beam_size} beams" if self.beam_size > 1 else how
        how += ", with penalties or forced tokens" if self.has_processors else ""
        how += ", with log-probabilities" if self.num_kept is not None else ""
        how += f" of {self.num_kept} others" if self.num_kept else ""
        how += ", with experts" if self.is_recorded else ""
        lengths = f"prompts up to {self.prompt_length} tokens, answers up to"
        return f"{lengths} {self.answer_length}, {how}"

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        settings: DecodingConfig,
        limits: Limits,
        is_recorded: bool = False,
    ) -> "ProgramShape":
        return cls(
            limits.prompt_length(len(prompt)),
            limits.answer_length(settings.max_new_tokens),
            settings.beam_size,
            settings.is_sampling,
            settings.has_processors,
            settings.num_kept,
            is_recorded,
        )

    @property
    def kind(self) -> tuple:
        """Inputs of one kind can be in one batch; its first item is the number of beams."""
        return dataclasses.astuple(self)[2:]

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of a `DecodingConfig` whose program is the shape's, whatever the model's
        defaults are."""
        return {
            "repetition_penalty": 1.0,
            "forced_prefix": (),
            "min_new_tokens": 0,
            "stop": (),
            "max_new_tokens": self.answer_length,
            "beam_size": self.beam_size,
            "temperature": float(self.is_sampling),
            "no_repeat_ngram_size": int(self.has_processors),
            "logprobs": self.num_kept,
        }

    def joined(self, other: "ProgramShape") -> "ProgramShape":
        """The shape of a batch with inputs of both, which are of one kind."""
        return dataclasses.replace(
            self,
            prompt_length=max(self.prompt_length, other.prompt_length),
            answer_length=max(self.answer_length, other.answer_length),
        )


@dataclasses.dataclass(eq=False)
class QueuedInput:
    """One input of a request, in the request queue or being answered.

    Attributes:
        deliver: function that the worker's thread calls with each event of the input.
        arrival_s: time of arrival in seconds, by the clock `time.monotonic`.
        is_abandoned: whether its client disconnected or ran out of time.
        num_tokens: number of its answer's tokens so far, the end included.
        token_s: time of the newest of these tokens, by the same clock; None before the first
            one, and in beam search.
        answer_s: time of its answer, by the same clock; None before.
        request_id: name of its request in the log.
    """

    prompt: list[int]
    settings: DecodingConfig
    number: int
    shape: ProgramShape
    deliver: Callable[[Event], None]
    is_streaming: bool = False
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    is_abandoned: bool = False
    num_tokens: int = 0
    token_s: float | None = None
    answer_s: float | None = None
    request_id: str = ""


def of_requests(inputs: Sequence[QueuedInput]) -> str:
    """` (request A, B)`, the requests of these inputs, to append to a message about them."""
    ids = list(dict.fromkeys(each.request_id for each in inputs if each.request_id))
    return f" (request {', '.join(ids)})" if ids else ""


class RequestQueue:
    """Inputs that wait to be decoded; any thread may call any method.

    Attributes:
        is_closed: whether inputs are no longer taken.
        num_changes: number of changes that `wait` waits for.
    """

    def __init__(self, limits: Limits):
        self._limits, self._inputs = limits, []
        self.is_closed, self.num_changes = False, 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._inputs)

    def put(self, inputs: Sequence[QueuedInput]) -> bool:
        """Adds all inputs or, if they do not fit, none; returns whether it did."""
        with self._changed:
            if self.is_closed or len(self._inputs) + len(inputs) > self._limits.max_waiting:
                return False
            self._inputs += inputs
            self._note_change()
            return True

    def abandon(self, inputs: Sequence[QueuedInput]) -> None:
        """Takes inputs out of the queue; those in a batch are decoded no further."""
        with self._changed:
            for each in inputs:
                each.is_abandoned = True
            self._inputs = [each for each in self._inputs if not each.is_abandoned]

    def waiting(self) -> list[QueuedInput]:
        """The inputs that wait, the oldest first."""
        with self._changed:
            return list(self._inputs)

    def take(self, inputs: Sequence[QueuedInput]) -> list[QueuedInput]:
        """Takes inputs out of the queue; returns those that were still there."""
        with self._changed:
            taken = [each for each in inputs if each in self._inputs]
            self._inputs = [each for each in self._inputs if each not in taken]
            return taken

    def wait(self, num_changes: int, most_s: float | None) -> None:
        """Waits until inputs come, until `notify` or `close`, or for `most_s` seconds.

        Args:
            num_changes: number of changes that the caller has seen; if there are more, it
                does not wait.
        """
        with self._changed:
            if not self.is_closed and self.num_changes == num_changes:
                self._changed.wait(most_s)

    def wait_left_s(self) -> float:
        """Seconds that the inputs still wait for others, while nothing is being decoded."""
        with self._changed:
            if not 0 < len(self._inputs) < self._limits.batch_size:
                return 0.0
            wait_s = self._limits.batch_wait_ms / 1e3
            return max(0.0, self._inputs[0].arrival_s + wait_s - time.monotonic())

    def notify(self) -> None:
        """Ends the waiting of `wait`."""
        with self._changed:
            self._note_change()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._note_change()

    def _note_change(self) -> None:
        self.num_changes += 1
        self._changed.notify_all()
