# SPDX-License-Identifier: Apache-2.0
"""The batches that are taken from the request queue, and the threads that answer them.

`Service` is the event loop's side: requests in, what happens to them out, as events. `Worker`
is the thread that runs the model, `Compiler` the one that compiles what new groups of inputs
need, while the worker goes on with others. `RequestQueue` stands between them.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence

from switchx.api import Model
from switchx.inference.config import BATCHES, DecodingConfig, rounded_up
from switchx.inference.generate import Generator
from switchx.inference.running_batch import Hypothesis, RunningBatch, are_compiled
from switchx.inference.sampling import RowSettings
from switchx.serving.limits import PROMPT_LENGTHS, Limits
from switchx.serving.metrics import Metrics
from switchx.serving.request_queue import (
    Answer,
    Event,
    Failure,
    Group,
    NewTokens,
    QueuedInput,
    RequestQueue,
)
from switchx.serving.requests import GenerateRequest, Refusal

LOG = logging.getLogger(__name__)

# Decoding steps between two looks at who disconnected: without streams, and with some.
STEPS = (16, 4)


class Service:
    """A model that answers requests.

    Attributes:
        num_open: requests that are being read or answered.
        is_draining: no new ones are taken.
    """

    def __init__(self, model: Model, limits: Limits):
        """Starts the worker, which compiles first.

        Raises:
            ValueError: the model cannot generate.
        """
        model.generator()
        self.model, self.limits, self.metrics = model, limits, Metrics()
        self.worker = Worker(model, limits, self.metrics)
        self._queue, self.compiler = self.worker.queue, Compiler(self.worker)
        self.metrics.waiting.set_function(lambda: len(self._queue))
        self.metrics.running.set_function(lambda: len(self.worker.running))
        self.num_open, self.is_draining = 0, False
        self.worker.start()
        self.compiler.start()

    @property
    def is_ready(self) -> bool:
        return self.worker.is_ready and not self.is_draining

    @contextlib.contextmanager
    def admitted(self):
        """A request from its head to its response.

        Raises:
            Refusal: 503; the server stops, the worker ended, or it is still compiling.
        """
        if self.is_draining:
            raise Refusal(503, "the server is stopping; ask another one", retry_after_s=10)
        if self.worker.error is not None:
            raise Refusal(503, "the model is not running any more; the server's log says why")
        if not self.worker.is_ready:
            raise Refusal(503, "the server is still compiling; try later", retry_after_s=5)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextlib.asynccontextmanager
    async def events(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[Event]]:
        """What happens to a request's inputs, until each has its answer.

        On leaving the context before that the inputs are abandoned: they leave the queue, or
        are decoded no further.

        Raises:
            Refusal: 429, the queue is full; 500, the model failed.
        """
        events, loop = asyncio.Queue(), asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            # A loop that is closed has no clients any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        settings, inputs = request.settings, []
        for number, prompt in enumerate(request.prompts):
            group = Group.of(prompt, settings, self.limits)
            is_streaming = request.is_streaming
            inputs.append(QueuedInput(prompt, settings, number, group, deliver, is_streaming))
        if not self._queue.put(inputs):
            waiting = len(self._queue)
            raise Refusal(
                429,
                f"the queue has {waiting} of {self.limits.max_waiting} inputs, and "
                f"{len(inputs)} more do not fit; try later",
                # A guess: all that waits, at a second a batch.
                retry_after_s=max(1, math.ceil(waiting / self.limits.batch_size)),
            )
        unanswered = set(range(len(inputs)))

        async def each_event() -> AsyncIterator[Event]:
            while unanswered:
                event = await events.get()
                if event.number not in unanswered:
                    continue  # its batch failed after it had its answer
                if isinstance(event, Failure):
                    raise Refusal(500, "the model failed; the server's log says how")
                if isinstance(event, Answer):
                    unanswered.discard(event.number)
                yield event

        try:
            yield each_event()
        finally:
            self._queue.abandon(inputs)
            self.metrics.abandoned.inc(len(unanswered))

    def close(self) -> None:
        """Stops the worker after its batch, and the compiler after its program."""
        self._queue.close()


class Worker(threading.Thread):
    """Answers what is in its queue, until it is closed.

    Attributes:
        queue: of the inputs that wait.
        is_ready: the programs of short prompts are compiled.
        error: why it is not alive any more.
        running: the inputs being answered.
    """

    def __init__(self, model: Model, limits: Limits, metrics: Metrics):
        super().__init__(name="switchx-worker", daemon=True)
        self._model, self._limits, self._metrics = model, limits, metrics
        self.queue = RequestQueue(limits, self._num_compiled)
        self._generators: dict[Group, Generator] = {}
        # The largest batch that the programs of a group are compiled for.
        self._compiled: dict[Group, int] = {}
        # Groups of which no batch was decoded since they were compiled.
        self._unused: set[Group] = set()
        # Experts outside of the device are moved for one batch at a time.
        self._moving = threading.Lock()
        self.is_ready, self.error = False, None
        self.running: Sequence[QueuedInput] = ()

    def run(self) -> None:
        try:
            self._warm_up()
            self.is_ready = not self.queue.is_closed
            while batch := self.queue.take():
                self.running = batch
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
        with self._alone():
            self._decode(batch)

    def _alone(self):
        """A context in which experts outside of the device are this thread's alone."""
        return contextlib.nullcontext() if self._model.experts is None else self._moving

    def _decode(self, batch: list[QueuedInput]) -> None:
        self._unused.discard(batch[0].group)
        running = self._start(batch)
        # A search has no first token before its end.
        is_search = batch[0].group.beam_size > 1
        has_streams = any(each.is_streaming for each in batch)
        if not is_search:
            running.tokens_so_far()  # waits for the device
            self._observe_seconds(self._metrics.first_token_s, batch)
        while running.waiting:
            running.abandon(i for i, each in enumerate(batch) if each.is_abandoned)
            if has_streams and not is_search:
                for i, tokens in running.tokens_so_far().items():
                    if batch[i].is_streaming:
                        batch[i].deliver(NewTokens(batch[i].number, tokens))
            for i, hypotheses in running.advance(STEPS[has_streams]).items():
                if is_search:
                    self._observe_seconds(self._metrics.first_token_s, [batch[i]])
                self._deliver_answer(batch[i], hypotheses[0])

    def _start(self, batch: Sequence[QueuedInput]) -> RunningBatch:
        group, settings = batch[0].group, [each.settings for each in batch]
        generator = self._generator(group)
        return RunningBatch(
            generator.config,
            generator.params,
            generator.decoding,
            [each.prompt for each in batch],
            numbers=[each.number for each in batch],
            token_limits=[each.max_new_tokens for each in settings],
            settings=RowSettings.of(settings),
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

    def _deliver_answer(self, each: QueuedInput, best: Hypothesis) -> None:
        self._observe_seconds(self._metrics.latency_s, [each])
        self._metrics.prompt_tokens.inc(len(each.prompt))
        self._metrics.generation_tokens.inc(len(best.tokens))
        self._metrics.success.labels("stop" if best.is_finished else "length").inc()
        each.deliver(Answer(each.number, best))

    def _warm_up(self) -> None:
        """Compiles greedy decoding of short prompts, for all batches and ways to shrink."""
        limits = self._limits
        lengths = [length for length in PROMPT_LENGTHS if length <= limits.warm_up_tokens]
        answer, total = limits.answer_length(limits.default_new_tokens), len(lengths)
        for number, length in enumerate(lengths, 1):
            LOG.info("compiling for prompts up to %d tokens (%d of %d)", length, number, total)
            group = Group(length, answer, 1, is_sampling=False)
            while self._compiled.get(group, 0) < limits.batch_size:
                if self.queue.is_closed:
                    return
                self.compile_more(group)

    def _num_compiled(self, group: Group) -> int:
        """How many inputs of a group the programs that are compiled, and kept, take.

        Those that are new count as kept, so that each compilation is followed by a batch
        also where not even one group's programs can be kept.
        """
        size = self._compiled.get(group, 0)
        if not size or group in self._unused:
            return size
        if not are_compiled(self._generator(group), size, group.prompt_length):
            size = self._compiled[group] = 0
        return size

    def compile_more(self, group: Group) -> None:
        """Compiles what the next larger batch of a group needs."""
        sizes = BATCHES[: BATCHES.index(rounded_up(self._limits.batch_size, BATCHES)) + 1]
        size = next(size for size in sizes if size > self._num_compiled(group))
        # All but one end at once, and it soon after: the batch shrinks to all smaller sizes.
        longest = min(2, group.answer_length)
        batch = [
            QueuedInput([1], DecodingConfig(1 if i else longest), i, group, id)
            for i in range(size)
        ]
        with self._alone():
            running = self._start(batch)
            while running.waiting:
                running.advance(STEPS[0])
        self._compiled[group] = size
        self._unused.add(group)
        self.queue.look_again()


class Compiler(threading.Thread):
    """Compiles what inputs wait for, while the worker answers those that have programs.

    A group begins with the programs of one input, and gets those of larger batches when more
    inputs wait than its programs take.
    """

    def __init__(self, worker: Worker):
        super().__init__(name="switchx-compiler", daemon=True)
        self._worker, self._queue = worker, worker.queue

    def run(self) -> None:
        while (wanted := self._queue.next_to_compile()) is not None:
            group, most = wanted
            LOG.info("compiling for batches of more than %d of %s", most, group)
            try:
                self._worker.compile_more(group)
            except Exception:
                LOG.exception("no program could be compiled for %s", group)
                for each in self._queue.drop(group):
                    each.deliver(Failure(each.number))
