# SPDX-License-Identifier: Apache-2.0
"""The request queue, the batches that are taken from it, and the thread that decodes them.

`Worker` is the thread that runs the model. `RequestQueue` stands between it and the event loop
(service.py): it is bounded, and a batch is of inputs that one compiled program answers, the
oldest input's first.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from switchx.api import Model
from switchx.inference.config import BATCHES, DecodingConfig, rounded_up
from switchx.inference.generate import Generator
from switchx.inference.running_batch import Hypothesis, RunningBatch
from switchx.inference.sampling import RowSettings
from switchx.serving.limits import PROMPT_LENGTHS, Limits
from switchx.serving.metrics import Metrics

LOG = logging.getLogger(__name__)

# Decoding steps between two looks at who disconnected: without streams, and with some.
STEPS = (16, 4)


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

    def __init__(self, limits: Limits):
        self._limits, self._inputs = limits, []
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
        """The next batch, when it is full or has waited; empty when the queue is closed."""
        with self._changed:
            while not self.is_closed:
                limits = self._limits
                if not self._inputs:
                    self._changed.wait()
                    continue
                oldest = self._inputs[0]
                batch = [each for each in self._inputs if each.group == oldest.group]
                wait_s = oldest.arrival_s + limits.batch_wait_ms / 1e3 - time.monotonic()
                if wait_s <= 0 or len(batch) >= limits.batch_size:
                    batch = batch[: limits.batch_size]
                    self._inputs = [each for each in self._inputs if each not in batch]
                    return batch
                self._changed.wait(wait_s)
            return []

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


class Worker(threading.Thread):
    """Answers what is in a queue, until it is closed.

    Attributes:
        is_ready: the programs of short prompts are compiled.
        error: why it is not alive any more.
        running: the inputs being answered.
        heartbeat_s: when it last did a step of them, of the clock `time.monotonic`.
    """

    def __init__(self, model: Model, limits: Limits, queue: RequestQueue, metrics: Metrics):
        super().__init__(name="switchx-worker", daemon=True)
        self._model, self._limits, self._queue = model, limits, queue
        self._metrics = metrics
        self._generators: dict[Group, Generator] = {}
        self.is_ready, self.error = False, None
        self.running: Sequence[QueuedInput] = ()
        self.heartbeat_s = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether a step takes longer than any should."""
        waited_s = time.monotonic() - self.heartbeat_s
        return bool(self.running) and waited_s > self._limits.worker_timeout_s

    def run(self) -> None:
        try:
            self._warm_up()
            self.is_ready = not self._queue.is_closed
            while batch := self._queue.take():
                self.heartbeat_s, self.running = time.monotonic(), batch
                try:
                    self._answer(batch)
                except Exception:
                    LOG.exception("a batch of %d inputs failed", len(batch))
                    for each in batch:
                        each.deliver(Failure(each.number))
                self.running = ()
        except BaseException as error:
            self.error = error
            LOG.exception("the worker ended")
        finally:
            self.is_ready, self.running = False, ()

    def _answer(self, batch: list[QueuedInput]) -> None:
        self._metrics.batch_size.observe(len(batch))
        self._observe_seconds(self._metrics.queue_s, batch)
        running = self._start(batch)
        # A search has no first token before its end.
        is_search = batch[0].group.beam_size > 1
        has_streams = any(each.is_streaming for each in batch)
        if not is_search:
            running.tokens_so_far()  # waits for the device
            self._observe_seconds(self._metrics.first_token_s, batch)
        first_s = time.monotonic()
        while running.waiting:
            self.heartbeat_s = time.monotonic()
            running.abandon(i for i, each in enumerate(batch) if each.is_abandoned)
            if has_streams and not is_search:
                for i, tokens in running.tokens_so_far().items():
                    if batch[i].is_streaming:
                        batch[i].deliver(NewTokens(batch[i].number, tokens))
            for i, hypotheses in running.advance(STEPS[has_streams]).items():
                if is_search:
                    self._observe_seconds(self._metrics.first_token_s, [batch[i]])
                self._deliver_answer(batch[i], hypotheses[0])
                if not is_search:
                    self._observe_tokens(hypotheses[0], time.monotonic() - first_s)

    def _start(self, batch: Sequence[QueuedInput]) -> RunningBatch:
        group, settings = batch[0].group, [each.settings for each in batch]
        generator, all_tokens = self._generator(group), self._model.config.vocab_size
        return RunningBatch(
            generator.config,
            generator.params,
            generator.decoding,
            [each.prompt for each in batch],
            numbers=[each.number for each in batch],
            token_limits=[each.max_new_tokens for each in settings],
            settings=RowSettings(
                np.array([each.seed for each in settings], np.int32),
                np.array([each.temperature for each in settings], np.float32),
                np.array([each.top_k or all_tokens for each in settings], np.int32),
                np.array([each.top_p or 1.0 for each in settings], np.float32),
                np.array([each.length_penalty for each in settings], np.float32),
            ),
            length=group.prompt_length,
            devices=generator.devices,
            experts=generator.experts,
        )

    def _generator(self, group: Group) -> Generator:
        key = dataclasses.replace(group, prompt_length=0)
        if key not in self._generators:
            # What is each input's own is given with it: one program for all.
            self._generators[key] = self._model.generator(
                batch_size=self._limits.batch_size,
                max_new_tokens=group.answer_length,
                beam_size=group.beam_size,
                temperature=float(group.is_sampling),
            )
        return self._generators[key]

    def _observe_seconds(self, histogram, inputs: Sequence[QueuedInput]) -> None:
        """Counts how long ago each input arrived."""
        now_s = time.monotonic()
        for each in inputs:
            histogram.observe(now_s - each.arrival_s)

    def _observe_tokens(self, best: Hypothesis, seconds: float) -> None:
        """Counts the time between an answer's tokens, each with their mean."""
        later = len(best.tokens) - 1 + best.is_finished
        for _ in range(later):
            self._metrics.inter_token_s.observe(seconds / later)

    def _deliver_answer(self, each: QueuedInput, best: Hypothesis) -> None:
        reason = "stop" if best.is_finished else "length"
        self._metrics.count_answer(each, len(best.tokens), reason)
        each.deliver(Answer(each.number, best))

    def _warm_up(self) -> None:
        """Compiles greedy decoding of short prompts, for all batches and ways to shrink."""
        limits = self._limits
        lengths = [length for length in PROMPT_LENGTHS if length <= limits.warm_up_tokens]
        sizes = [size for size in BATCHES if size <= rounded_up(limits.batch_size, BATCHES)]
        answer, total = limits.answer_length(limits.default_new_tokens), len(lengths)
        for number, length in enumerate(lengths, 1):
            LOG.info("compiling for prompts up to %d tokens (%d of %d)", length, number, total)
            group = Group(length, answer, 1, is_sampling=False)
            for size in sizes:
                for left in [0, *(other for other in sizes if other < size)]:
                    if self._queue.is_closed:
                        return
                    self._run_down(group, size, left)

    def _run_down(self, group: Group, size: int, left: int) -> None:
        """A batch of `size` of which all but `left` end at once, and those soon after."""
        longest = min(2, group.answer_length)
        batch = [
            QueuedInput([1], DecodingConfig(1 if 0 < left <= i else longest), i, group, id)
            for i in range(size)
        ]
        running = self._start(batch)
        running.tokens_so_far()
        while running.waiting:
            running.advance(STEPS[0])
