# SPDX-License-Identifier: Apache-2.0
"""The batches that inputs of the request queue join, and the threads that answer them.

`Worker` is the thread that runs the model, `Compiler` the one that compiles what new shapes of
inputs need, while the worker goes on with others. `RequestQueue` is between them and the
event loop (service.py).
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import operator
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence

from switchx.api import Model
from switchx.inference.config import BATCHES, DecodingConfig, rounded_up
from switchx.inference.generate import NO_ANSWER, Generator
from switchx.inference.logits_processors import RowSettings
from switchx.inference.running_batch import Hypothesis, RunningBatch, are_compiled
from switchx.serving.limits import PROMPT_LENGTHS, Limits
from switchx.serving.metrics import ModelMetrics
from switchx.serving.request_queue import (
    Answer,
    Failure,
    NewTokens,
    ProgramShape,
    QueuedInput,
    RequestQueue,
    of_requests,
)

LOG = logging.getLogger(__name__)

# Decode steps between two checks for new and abandoned inputs: without streams, and with some.
STEPS = (8, 4)
# What the compiler takes first.
_ENDING, _ASKED, _PLANNED = range(3)
# Maximum number of inputs read at once, so that the others' next tokens do not wait long.
MOST_JOINING = 8


class Worker(threading.Thread):
    """The thread that answers the inputs in its request queue, until it is closed.

    Inputs of one kind are decoded together, in a batch that they join and leave one by one.
    Inputs whose batch would need programs that are not compiled yet wait until they are, and
    others go before them.

    Attributes:
        queue: request queue, with the inputs that wait.
        is_ready: whether the first programs are compiled, and inputs are taken.
        asked: number of inputs that were answered, by shape.
        error: error that ended the thread.
        compiler: thread that compiles the programs that inputs wait for.
        heartbeat_s: time of its last decode steps, by the clock `time.monotonic`.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        metrics: ModelMetrics,
        asked_before: Sequence[ProgramShape] = (),
    ):
        """Compiles nothing yet.

        Args:
            asked_before: shapes that an earlier server was asked for, the most wanted first;
                their programs are compiled before those of other short prompts.
        """
        super().__init__(name="switchx-worker", daemon=True)
        self._asked_before, self.asked = asked_before, Counter()
        self._model, self._limits, self._metrics = model, limits, metrics
        self.queue, self.compiler = RequestQueue(limits), Compiler(self)
        self._generators: dict[ProgramShape, Generator] = {}
        # Batches by kind.
        self._batches: dict[tuple, Batch] = {}
        # The largest batch for which the programs of a shape are compiled.
        self._compiled: dict[ProgramShape, int] = {}
        # For shapes whose next larger batch could not be compiled, the largest to ask for.
        self._most: dict[ProgramShape, int] = {}
        # Shapes with no batch decoded since they were compiled.
        self._unused: set[ProgramShape] = set()
        # Experts outside the device are moved by one thread at a time.
        self._moving = threading.Lock()
        self.is_ready, self.error = False, None
        self.heartbeat_s = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether some steps take longer than any should."""
        waited_s = time.monotonic() - self.heartbeat_s
        return bool(self._batches) and waited_s > self._limits.worker_timeout_s

    @property
    def running(self) -> list[QueuedInput]:
        """The inputs being answered."""
        return [each for batch in list(self._batches.values()) for each in batch.inputs]

    @property
    def is_warm(self) -> bool:
        """Whether all programs that are compiled without being asked for are done."""
        return self.is_ready and not self.compiler.planned

    @property
    def compiled(self) -> dict[ProgramShape, int]:
        """Shapes whose programs are compiled, with the most inputs decoded together."""
        return {shape: size for shape, size in list(self._compiled.items()) if size}

    def run(self) -> None:
        try:
            self._warm_up()
            self.is_ready = not self.queue.is_closed
            while self._batches or not self.queue.is_closed:
                self.heartbeat_s = time.monotonic()
                num_changes, is_idle = self.queue.num_changes, not self._batches
                wait_left_s = self.queue.wait_left_s() if is_idle else 0
                has_admitted = not wait_left_s and self._admit()
                for kind, batch in list(self._batches.items()):
                    self._advance(kind, batch)
                if is_idle and not has_admitted:
                    self.queue.wait(num_changes, wait_left_s or None)
        except BaseException as error:
            self.error = error
            LOG.exception("the worker ended%s", of_requests(self.running))
        finally:
            self.is_ready = False
            self._batches.clear()

    def candidates(self) -> list[QueuedInput]:
        """The inputs that may join a batch now, in order of priority.

        This is where other scheduling policies differ (bench/continuous_batching.py).
        """
        return self.queue.waiting()

    def _admit(self) -> bool:
        """Takes inputs into batches with free rows and compiled programs; says if any."""
        joining: dict[tuple, list[QueuedInput]] = {}
        shapes = {kind: batch.shape for kind, batch in self._batches.items()}
        full: set[tuple] = set()
        for each in [] if self.queue.is_closed else self.candidates():
            kind = each.shape.kind
            batch, others = self._batches.get(kind), joining.setdefault(kind, [])
            size = len(others) + 1 + (len(batch.inputs) if batch else 0)
            shape = shapes.get(kind, each.shape).joined(each.shape)
            if kind in full or size > self._most_inputs(shape):
                # No later input of a smaller shape goes before it: it might wait forever.
                full.add(kind)
                continue
            if self._num_compiled(shape) < size:
                self.compiler.ask(shape)
                if (larger := self._covering(shape, size)) is None:
                    continue
                shape = larger
            shapes[kind] = shape
            others.append(each)
        for kind, batch in self._batches.items():
            batch.is_full = kind in full
        for kind, inputs in joining.items():
            for first in range(0, len(inputs), MOST_JOINING):
                if taken := self.queue.take(inputs[first : first + MOST_JOINING]):
                    self._join(kind, taken, shapes[kind])
        return any(joining.values())

    def _join(self, kind, inputs: list[QueuedInput], shape: ProgramShape) -> None:
        self._metrics.count_waits(self._metrics.queue_s, inputs)
        self.asked.update(each.shape for each in inputs)
        with self._failing(kind, inputs), self._moving_experts():
            if kind not in self._batches:
                self._batches[kind] = Batch(self._running_batch(shape), shape)
            batch = self._batches[kind]
            batch.shape = shape
            self._unused.discard(shape)
            self._read(batch.running, inputs, shape, batch.inputs_by_name)
            self._metrics.batch_size.observe(len(batch.inputs))

    def _read(self, running: RunningBatch, inputs, shape: ProgramShape, by_name: dict) -> None:
        settings = [each.settings for each in inputs]
        names = running.admit(
            [each.prompt for each in inputs],
            numbers=[each.number for each in inputs],
            token_limits=[each.max_new_tokens for each in settings],
            settings=RowSettings.of(settings),
            length=shape.prompt_length,
            places=shape.answer_length,
        )
        by_name.update(zip(names, inputs, strict=True))

    def _advance(self, kind, batch: "Batch") -> None:
        """Some steps of a batch, and what they give."""
        batch.abandon()
        # A search has no first token before its end.
        is_search = kind[0] > 1
        has_streams = any(each.is_streaming for each in batch.inputs)
        with self._failing(kind):
            with self._moving_experts():
                steps, is_full = STEPS[has_streams], batch.is_full
                begun_s, num_steps = time.monotonic(), batch.running.num_steps
                ended = batch.running.advance(steps, is_compacting=not is_full)
            if not is_search:
                num_steps = batch.running.num_steps - num_steps
                for name, each in batch.inputs_by_name.items():
                    self._metrics.count_tokens(each, num_steps, ended.get(name), begun_s)
                if has_streams:
                    batch.deliver_tokens()
            for name, hypotheses in ended.items():
                each = batch.inputs_by_name[name]
                if is_search:
                    self._metrics.count_waits(self._metrics.first_token_s, [each])
                self._deliver_answer(each, hypotheses)
                del batch.inputs_by_name[name]
        if not batch.running.waiting:
            self._batches.pop(kind, None)

    @contextlib.contextmanager
    def _failing(self, kind, joining: Sequence[QueuedInput] = ()):
        """A context in which an exception ends one batch, with the inputs that were joining."""
        try:
            yield
        except Exception:
            batch = self._batches.pop(kind, None)
            inputs = [*(batch.inputs if batch else ()), *joining]
            LOG.exception("a batch of %d inputs failed%s", len(inputs), of_requests(inputs))
            for each in inputs:
                each.deliver(Failure(each.number))

    def _moving_experts(self):
        """A context in which only this thread moves experts outside the device."""
        return contextlib.nullcontext() if self._model.experts is None else self._moving

    @contextlib.contextmanager
    def _moving_experts_last(self):
        """As `_moving_experts`, for one program being compiled: waiting batches go next."""
        with self._moving_experts():
            yield
        if self._model.experts is not None:
            time.sleep(0.01)  # a lock is not fair

    def _running_batch(self, shape: ProgramShape) -> RunningBatch:
        generator = self._generator(shape)
        return RunningBatch(
            generator.config,
            generator.params,
            generator.decoding,
            devices=generator.devices,
            experts=generator.experts,
            is_recorded=shape.is_recorded,
        )

    def _generator(self, shape: ProgramShape) -> Generator:
        key = dataclasses.replace(shape, prompt_length=0)
        if key not in self._generators:
            # Settings of single inputs are passed with them: one program serves all.
            self._generators[key] = self._model.generator(
                batch_size=self._limits.batch_size, **shape.settings
            )
        return self._generators[key]

    def _deliver_answer(self, each: QueuedInput, hypotheses: list[Hypothesis]) -> None:
        if not hypotheses:
            LOG.error(
                "an input of %d tokens %s%s", len(each.prompt), NO_ANSWER, of_requests([each])
            )
            each.deliver(Failure(each.number, f"an input {NO_ANSWER}"))
            return
        best, *others = hypotheses[: each.settings.num_return_sequences]
        each.answer_s = time.monotonic()
        each.deliver(Answer(each.number, best, others))

    def _warm_up(self) -> None:
        """Compiles the first of the programs that are surely wanted; the compiler goes on.

        They are those of shapes that were asked for before, and of the model's own decoding
        method for short prompts, for all batches and ways to shrink.
        """
        limits = self._limits
        longest = min(limits.warm_up_tokens, limits.prompt_length(limits.max_input_tokens))
        lengths = [length for length in PROMPT_LENGTHS if length <= longest]
        settings = self._model.decoding_config(**limits.warm_up(self._model.decoding))
        shapes = [ProgramShape.of([0] * length, settings, limits) for length in lengths]
        if shapes:  # with warm_up_tokens=0 nothing is compiled ahead
            shapes = list(dict.fromkeys((*self._asked_before, *shapes)))
            while not self._begins_with(shapes[0], is_last=len(shapes) == 1):
                del shapes[0]
        self.compiler.plan(shapes)

    def _begins_with(self, shape: ProgramShape, *, is_last: bool) -> bool:
        """Compiles the first programs of a shape; returns whether that succeeded.

        Raises:
            Exception: no program could be compiled, and no other shape is left, or it is one of
                the model's own decoding method.
        """
        LOG.info("compiling for one input: %s", shape)
        try:
            self.compile_more(shape)
        except Exception:
            if is_last or shape not in self._asked_before:
                raise
            # An earlier server may have had more memory.
            LOG.exception("no program could be compiled for %s", shape)
            return False
        return True

    def is_whole(self, shape: ProgramShape) -> bool:
        """Whether no larger batch of a shape remains to be compiled."""
        return self._compiled.get(shape, 0) >= self._most_inputs(shape)

    def _most_inputs(self, shape: ProgramShape) -> int:
        """The most inputs of a shape that are decoded together once that is compiled."""
        return min(self._limits.batch_size, self._most.get(shape, self._limits.batch_size))

    def _covering(self, shape: ProgramShape, size: int) -> ProgramShape | None:
        """The smallest shape with compiled programs for `size` inputs of a shape, which are
        padded further; None if there is none."""
        fits = [
            each
            for each in self.compiled
            if each.kind == shape.kind
            and each.joined(shape) == each
            and self._num_compiled(each) >= size
        ]
        sizes = operator.attrgetter("prompt_length", "answer_length")
        return min(fits, key=sizes, default=None)

    def _num_compiled(self, shape: ProgramShape) -> int:
        """Number of inputs of a shape that the compiled and kept programs take.

        New programs count as kept, so that each compilation is followed by a batch even if not
        even one shape's programs can be kept.
        """
        size = self._compiled.get(shape, 0)
        if not size or shape in self._unused:
            return size
        generator = self._generator(shape)
        if not are_compiled(generator, size, shape.prompt_length, shape.is_recorded):
            size = self._compiled[shape] = 0
        return size

    def compile_more(self, shape: ProgramShape) -> None:
        """Compiles what the next larger batch of a shape needs to begin, to be joined by few
        or many inputs, and to shrink; nothing if there is none."""
        generator = self._generator(shape)
        # On a mesh they are multiples of the devices that split them.
        sizes = generator.devices.batches(generator.config, BATCHES)
        most = rounded_up(self._most_inputs(shape), sizes)
        num_compiled = self._num_compiled(shape)
        size = next((size for size in sizes if num_compiled < size <= most), None)
        if size is None:
            return  # it was compiled after it was asked for
        smaller = (0, *sizes)[: sizes.index(size) + 1]
        # The fewest inputs of each size that can join a running batch.
        joining = [each + 1 for each in smaller if each < min(MOST_JOINING, size - 1)]
        longest = min(len(joining) + 2, shape.answer_length)
        with self._moving_experts():
            running = self._running_batch(shape)
        self._read_ones(running, shape, smaller[-1] or 1, longest)
        for number in joining:
            self._read_ones(running, shape, number, 1)
            with self._moving_experts_last():
                running.advance(1, is_compacting=False)
        while running.waiting:
            with self._moving_experts_last():
                running.advance(STEPS[0])
        self._compiled[shape] = size
        self._most.pop(shape, None)
        self._unused.add(shape)
        self.queue.notify()

    def _read_ones(self, running: RunningBatch, shape: ProgramShape, number: int, longest: int):
        """Joins one-token inputs to a batch; one of them has the longest answer."""
        inputs = [
            QueuedInput([1], DecodingConfig(1 if i else longest), i, shape, id)
            for i in range(number)
        ]
        for first in range(0, number, MOST_JOINING):
            with self._moving_experts_last():
                self._read(running, inputs[first : first + MOST_JOINING], shape, {})

    def give_up(self, shape: ProgramShape) -> None:
        """Lets no larger batch of a shape be asked for than is compiled.

        If none is, its inputs fail; the next one is tried again, alone. Smaller shapes that
        were to be joined to it are decoded separately.
        """
        size = self._num_compiled(shape)
        self._most[shape] = max(1, size)
        if size:
            LOG.warning("%d inputs at most are decoded together: %s", size, shape)
            return
        for each in self.queue.take([x for x in self.queue.waiting() if x.shape == shape]):
            each.deliver(Failure(each.number))


@dataclasses.dataclass
class Batch:
    """Inputs that are decoded together.

    Attributes:
        shape: shape for which the batch's programs are compiled.
        inputs_by_name: inputs, by the names that `running` gives them.
        is_full: whether more inputs wait for it than it has free rows.
    """

    running: RunningBatch
    shape: ProgramShape
    inputs_by_name: dict[int, QueuedInput] = dataclasses.field(default_factory=dict)
    is_full: bool = False

    @property
    def inputs(self) -> list[QueuedInput]:
        return list(self.inputs_by_name.values())

    def abandon(self) -> None:
        """Stops decoding the inputs whose clients left."""
        gone = [name for name, each in self.inputs_by_name.items() if each.is_abandoned]
        self.running.abandon(gone)
        for name in gone:
            del self.inputs_by_name[name]

    def deliver_tokens(self) -> None:
        """Gives streams the tokens that they have so far."""
        for name, so_far in self.running.so_far().items():
            each = self.inputs_by_name[name]
            if each.is_streaming and math.isfinite(so_far.score):  # else it gets no answer
                each.deliver(NewTokens(each.number, so_far.tokens, so_far))


class Compiler(threading.Thread):
    """Compiles what inputs wait for, while the worker answers those that have programs.

    A shape begins with the programs of one input, and gets those of larger batches when more
    inputs wait than its programs take. While none waits, the planned shapes get theirs, the
    next larger batch of each in turn.

    Attributes:
        planned: shapes whose programs are compiled without being asked for.
    """

    def __init__(self, worker: Worker):
        super().__init__(name="switchx-compiler", daemon=True)
        self._worker = worker
        # The lowest numbers go first; the second numbers keep the order of insertion.
        self._wanted: queue.PriorityQueue[tuple[int, int, ProgramShape | None]] = (
            queue.PriorityQueue()
        )
        self._count = itertools.count()
        self._asked: set[ProgramShape] = set()
        self.planned: set[ProgramShape] = set()

    def ask(self, shape: ProgramShape) -> None:
        """Requests the programs of the shape's next larger batch, unless already requested."""
        if shape not in self._asked:
            self._asked.add(shape)
            self._put(_ASKED, shape)

    def plan(self, shapes: Sequence[ProgramShape]) -> None:
        """Requests that all programs of these shapes be compiled."""
        self.planned.update(shapes)
        for shape in shapes:
            self._put(_PLANNED, shape)

    def close(self) -> None:
        """Ends the thread after its current program."""
        self._put(_ENDING, None)

    def _put(self, priority: int, shape: ProgramShape | None) -> None:
        self._wanted.put((priority, next(self._count), shape))

    def run(self) -> None:
        while (wanted := self._wanted.get())[-1] is not None:
            priority, _, shape = wanted
            is_done = self._compile(shape)
            if priority == _ASKED:
                self._asked.discard(shape)
            elif is_done:
                self.planned.discard(shape)
            else:
                self._put(_PLANNED, shape)
            self._worker.queue.notify()

    def _compile(self, shape: ProgramShape) -> bool:
        """Compiles the programs of a shape's next larger batch; returns whether it was last."""
        LOG.info("compiling the next program of %s", shape)
        try:
            self._worker.compile_more(shape)
        except Exception:
            waiting = [x for x in self._worker.queue.waiting() if x.shape == shape]
            waiting_for = of_requests(waiting)
            LOG.exception("no program could be compiled for %s%s", shape, waiting_for)
            self._worker.give_up(shape)
            return True
        return self._worker.is_whole(shape)
