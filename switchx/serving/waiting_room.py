# SPDX-License-Identifier: Apache-2.0
"""The queue of inputs: bounded, left by whoever lost interest, taken from by groups.

Inputs that one compiled program answers are a group. The oldest input's group is next, so
nobody waits for ever.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from switchx.serving.generate_request import AnswerSettings
from switchx.serving.limits import Limits


@dataclasses.dataclass(frozen=True)
class Group:
    """What inputs of one batch have in common.

    Attributes:
        prompt_length, room: that prompts and answers are padded to.
    """

    prompt_length: int
    room: int
    beam_size: int
    is_sampling: bool

    @classmethod
    def of(cls, prompt: Sequence[int], settings: AnswerSettings, limits: Limits) -> "Group":
        return cls(
            limits.prompt_length(len(prompt)),
            limits.room(settings.max_new_tokens),
            settings.beam_size,
            settings.temperature > 0,
        )


@dataclasses.dataclass(eq=False)
class WaitingInput:
    """One input of a request, in the queue or being answered.

    Attributes:
        number: its place in the request; samples depend on it.
        deliver: called by the worker's thread with what happens to it.
        is_streaming: tokens are delivered as they come.
        arrival_s: of the clock `time.monotonic`.
        is_abandoned: nobody wants the answer any more.
    """

    prompt: list[int]
    settings: AnswerSettings
    number: int
    group: Group
    deliver: Callable[[Any], None]
    is_streaming: bool = False
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    is_abandoned: bool = False


class WaitingRoom:
    """Inputs that wait; any thread may call anything.

    Attributes:
        size: most of them.
        is_closed: nothing is taken any more.
    """

    def __init__(self, size: int, batch_size: int, batch_wait_s: float):
        self.size, self._batch_size, self._batch_wait_s = size, batch_size, batch_wait_s
        self._inputs: list[WaitingInput] = []
        self.is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._inputs)

    def put(self, inputs: Sequence[WaitingInput]) -> bool:
        """Adds all of them or, where they do not fit, none; says which."""
        with self._changed:
            if self.is_closed or len(self._inputs) + len(inputs) > self.size:
                return False
            self._inputs += inputs
            self._changed.notify_all()
            return True

    def abandon(self, inputs: Sequence[WaitingInput]) -> None:
        """Nobody wants these any more: they leave the queue, or are answered no further."""
        with self._changed:
            for each in inputs:
                each.is_abandoned = True
            self._inputs = [each for each in self._inputs if not each.is_abandoned]

    def take(self) -> list[WaitingInput]:
        """The next batch, when it is full or has waited; empty when the room is closed."""
        with self._changed:
            while not self.is_closed:
                if not self._inputs:
                    self._changed.wait()
                    continue
                oldest = self._inputs[0]
                batch = [each for each in self._inputs if each.group == oldest.group]
                wait_s = oldest.arrival_s + self._batch_wait_s - time.monotonic()
                if wait_s <= 0 or len(batch) >= self._batch_size:
                    batch = batch[: self._batch_size]
                    self._inputs = [each for each in self._inputs if each not in batch]
                    return batch
                self._changed.wait(wait_s)
            return []

    def close(self) -> None:
        """Nothing is taken any more."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
