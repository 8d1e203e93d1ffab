# SPDX-License-Identifier: Apache-2.0
"""The request queue: inputs that wait, in groups that one compiled program answers.

It is bounded. A batch is of one group; inputs whose group has no compiled program yet wait
until it has, and others go before them.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from switchx.inference.config import DecodingConfig
from switchx.inference.running_batch import Hypothesis
from switchx.serving.limits import Limits

# What happens to an input; `number` is its place in the request, on which samples depend.


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """All tokens of an input's answer so far."""

    number: int
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The best hypothesis of an input."""

    number: int
    hypothesis: Hypothesis


@dataclasses.dataclass(frozen=True)
class Failure:
    """The model failed on an input's batch; the log says how."""

    number: int


Event = NewTokens | Answer | Failure


@dataclasses.dataclass(frozen=True)
class Group:
    """What inputs of one batch have in common.

    Attributes:
        prompt_length, answer_length: that prompts and answers are padded to.
    """

    prompt_length: int
    answer_length: int
    beam_size: int
    is_sampling: bool

    @classmethod
    def of(cls, prompt: Sequence[int], settings: DecodingConfig, limits: Limits) -> "Group":
        return cls(
            limits.prompt_length(len(prompt)),
            limits.answer_length(settings.max_new_tokens),
            settings.beam_size,
            settings.is_sampling,
        )


@dataclasses.dataclass(eq=False)
class QueuedInput:
    """One input of a request, in the queue or being answered.

    Attributes:
        deliver: called by the worker's thread with what happens to it.
        arrival_s: of the clock `time.monotonic`.
        is_abandoned: its client disconnected or ran out of time.
    """

    prompt: list[int]
    settings: DecodingConfig
    number: int
    group: Group
    deliver: Callable[[Event], None]
    is_streaming: bool = False
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    is_abandoned: bool = False


class RequestQueue:
    """Inputs that wait to be decoded; any thread may call anything.

    Attributes:
        is_closed: nothing is taken any more.
    """

    def __init__(self, limits: Limits, compiled: Callable[[Group], int] | None = None):
        """An empty queue.

        Args:
            compiled: how many inputs of a group the compiled programs decode together; 0 where
                there are none. None is any number of any group.
        """
        self._limits, self._inputs = limits, []
        self._compiled = compiled or (lambda group: limits.batch_size)
        self.is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._inputs)

    def put(self, inputs: Sequence[QueuedInput]) -> bool:
        """Adds all of them or, where they do not fit, none; says which."""
        with self._changed:
            if self.is_closed or len(self._inputs) + len(inputs) > self._limits.max_waiting:
                return False
            self._inputs += inputs
            self._changed.notify_all()
            return True

    def abandon(self, inputs: Sequence[QueuedInput]) -> None:
        """Takes inputs out of the queue; those in a batch are decoded no further."""
        with self._changed:
            for each in inputs:
                each.is_abandoned = True
            self._inputs = [each for each in self._inputs if not each.is_abandoned]

    def take(self) -> list[QueuedInput]:
        """The next batch, when it is full or has waited; empty when the queue is closed.

        It is of the group of the oldest input that has programs.
        """
        with self._changed:
            while not self.is_closed:
                limits, most, oldest = self._limits, 0, None
                for group, inputs in self._groups().items():
                    if most := min(self._compiled(group), limits.batch_size):
                        batch, oldest = inputs[:most], inputs[0]
                        break
                if oldest is None:
                    self._changed.wait()
                    continue
                wait_s = oldest.arrival_s + limits.batch_wait_ms / 1e3 - time.monotonic()
                if wait_s <= 0 or len(batch) >= most:
                    self._inputs = [each for each in self._inputs if each not in batch]
                    return batch
                self._changed.wait(wait_s)
            return []

    def next_to_compile(self) -> tuple[Group, int] | None:
        """A group of which more inputs wait than programs take, and how many these take; waits
        for one. None when the queue is closed."""
        with self._changed:
            while not self.is_closed:
                for group, inputs in self._groups().items():
                    most = self._compiled(group)
                    if most < min(len(inputs), self._limits.batch_size):
                        return group, most
                self._changed.wait()
            return None

    def look_again(self) -> None:
        """Says that other programs are compiled now."""
        with self._changed:
            self._changed.notify_all()

    def drop(self, group: Group) -> list[QueuedInput]:
        """Takes all inputs of a group out of the queue."""
        with self._changed:
            gone = [each for each in self._inputs if each.group == group]
            self._inputs = [each for each in self._inputs if each.group != group]
            return gone

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _groups(self) -> dict[Group, list[QueuedInput]]:
        """The inputs by their groups, the oldest first."""
        groups: dict[Group, list[QueuedInput]] = {}
        for each in self._inputs:
            groups.setdefault(each.group, []).append(each)
        return groups
