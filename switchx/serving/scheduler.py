# SPDX-License-Identifier: Apache-2.0
"""The queue of inputs: bounded, left by whoever lost interest, taken from by groups.

Inputs that one compiled program answers are a group. The oldest input's group is next, so
nobody waits for ever.

The one thread that runs the model: takes batches from the queue, delivers what is said.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from switchx.api import Model
from switchx.inference.generate import Generator
from switchx.inference.running_batch import BATCHES, Hypothesis, RunningBatch, rounded_up
from switchx.inference.sampling import RowSettings
from switchx.serving.limits import PROMPT_LENGTHS, Limits
from switchx.serving.metrics import Metrics
from switchx.serving.requests import AnswerSettings


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


LOG = logging.getLogger(__name__)

# Between two looks at who is gone; fewer where somebody reads along.
STEPS, STEPS_OF_STREAMS = 16, 4


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


class Worker(threading.Thread):
    """Answers what is in a waiting room, until it is closed.

    Attributes:
        is_ready: the programs of short prompts are compiled.
        error: why it is not alive any more.
        running: the inputs being answered.
    """

    def __init__(self, model: Model, limits: Limits, room: WaitingRoom, metrics: Metrics):
        super().__init__(name="switchx-worker", daemon=True)
        self._model, self._limits, self._room = model, limits, room
        self._metrics = metrics
        self._generators: dict[Group, Generator] = {}
        self.is_ready, self.error = False, None
        self.running: Sequence[WaitingInput] = ()

    def run(self) -> None:
        try:
            self._warm_up()
            self.is_ready = not self._room.is_closed
            while batch := self._room.take():
                self._answer_or_fail(batch)
        except BaseException as error:
            self.error = error
            LOG.exception("the worker ended")
        finally:
            self.is_ready = False

    def _answer_or_fail(self, batch: list[WaitingInput]) -> None:
        self.running = batch
        try:
            self._answer(batch)
        except Exception:
            LOG.exception("a batch of %d inputs failed", len(batch))
            for each in batch:
                each.deliver(Failure(each.number))
        finally:
            self.running = ()

    def _answer(self, batch: list[WaitingInput]) -> None:
        start_s = time.monotonic()
        self._metrics.batch_size.observe(len(batch))
        for each in batch:
            self._metrics.queue_s.observe(start_s - each.arrival_s)
        group = batch[0].group
        running = self._start(
            [each.prompt for each in batch],
            [each.settings for each in batch],
            [each.number for each in batch],
            group,
        )
        steps = STEPS_OF_STREAMS if any(each.is_streaming for each in batch) else STEPS
        # A search has no first token before its end.
        is_search = group.beam_size > 1
        if not is_search:
            running.tokens_so_far()  # waits for the device
            self._observe_first_token(batch)
        while running.waiting:
            running.abandon(i for i, each in enumerate(batch) if each.is_abandoned)
            if not is_search:
                self._deliver_tokens(batch, running)
            for i, hypotheses in running.advance(steps).items():
                if is_search:
                    self._observe_first_token([batch[i]])
                self._deliver_answer(batch[i], hypotheses[0])

    def _start(
        self,
        prompts: Sequence[list[int]],
        settings: Sequence[AnswerSettings],
        numbers: Sequence[int],
        group: Group,
    ) -> RunningBatch:
        generator = self._generator(group)
        all_tokens = self._model.config.vocab_size
        return RunningBatch(
            generator.config,
            generator.params,
            generator.decoding,
            prompts,
            numbers=numbers,
            rooms=[each.max_new_tokens for each in settings],
            settings=RowSettings(
                np.array([each.seed for each in settings], np.int32),
                np.array([each.temperature for each in settings], np.float32),
                np.array([each.top_k or all_tokens for each in settings], np.int32),
                np.array([each.top_p or 1.0 for each in settings], np.float32),
                np.array([each.length_penalty for each in settings], np.float32),
            ),
            length=group.prompt_length,
            devices=generator.devices,
        )

    def _generator(self, group: Group) -> Generator:
        key = dataclasses.replace(group, prompt_length=0)
        if key not in self._generators:
            # What is each input's own is given with it: one program for all.
            self._generators[key] = self._model.generator(
                batch_size=self._limits.batch_size,
                max_new_tokens=group.room,
                beam_size=group.beam_size,
                temperature=float(group.is_sampling),
            )
        return self._generators[key]

    def _observe_first_token(self, inputs: Sequence[WaitingInput]) -> None:
        now_s = time.monotonic()
        for each in inputs:
            self._metrics.first_token_s.observe(now_s - each.arrival_s)

    def _deliver_tokens(self, batch: list[WaitingInput], running: RunningBatch) -> None:
        if not any(each.is_streaming for each in batch):
            return
        for i, tokens in running.tokens_so_far().items():
            if batch[i].is_streaming:
                batch[i].deliver(NewTokens(batch[i].number, tokens))

    def _deliver_answer(self, each: WaitingInput, best: Hypothesis) -> None:
        self._metrics.latency_s.observe(time.monotonic() - each.arrival_s)
        self._metrics.prompt_tokens.inc(len(each.prompt))
        self._metrics.generation_tokens.inc(len(best.tokens))
        self._metrics.success.labels("stop" if best.is_finished else "length").inc()
        each.deliver(Answer(each.number, best))

    def _warm_up(self) -> None:
        """Compiles greedy decoding of short prompts, for all batches and ways to shrink."""
        limits, start_s = self._limits, time.monotonic()
        lengths = [length for length in PROMPT_LENGTHS if length <= limits.warm_up_tokens]
        sizes = [size for size in BATCHES if size <= rounded_up(limits.batch_size, BATCHES)]
        room = limits.room(limits.default_new_tokens)
        for number, length in enumerate(lengths, 1):
            LOG.info("compiling for prompts of up to %d tokens (%d of %d)", length, number,
                     len(lengths))  # fmt: skip
            group = Group(length, room, 1, is_sampling=False)
            for size in sizes:
                for left in [0, *(other for other in sizes if other < size)]:
                    if self._room.is_closed:
                        return
                    self._run_down(group, size, left)
        LOG.info("compiled in %.0f s", time.monotonic() - start_s)

    def _run_down(self, group: Group, size: int, left: int) -> None:
        """A batch of `size` of which all but `left` end at once, and those soon after."""
        settings = [AnswerSettings(min(2, group.room))] * (left or size)
        settings += [AnswerSettings(1)] * (size - len(settings))
        running = self._start([[1]] * size, settings, range(size), group)
        running.tokens_so_far()
        while running.waiting:
            running.advance(STEPS)
