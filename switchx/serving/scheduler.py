# SPDX-License-Identifier: Apache-2.0
"""The batches that inputs of the request queue join, and the threads that answer them.

`Worker` is the thread that runs the model, `Compiler` the one that compiles what new groups of
inputs need, while the worker goes on with others. `RequestQueue` stands between them and the
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
from switchx.inference.rows import RowSettings
from switchx.inference.running_batch import Hypothesis, RunningBatch, are_compiled
from switchx.serving.limits import PROMPT_LENGTHS, Limits
from switchx.serving.metrics import ModelMetrics
from switchx.serving.request_queue import (
    Answer,
    Failure,
    Group,
    NewTokens,
    QueuedInput,
    RequestQueue,
    of_requests,
)

LOG = logging.getLogger(__name__)

# Decode steps between two checks for new and abandoned inputs: without streams, and with some.
STEPS = (8, 4)
# What the compiler takes first.
_ENDING, _ASKED, _PLANNED = range(3)
# Inputs that are read at once, so that the others' next tokens do not wait for long.
MOST_JOINING = 8


class Worker(threading.Thread):
    """The thread that answers the inputs in its request queue, until it is closed.

    Inputs of one kind are decoded together, in a batch that they join and leave one by one.
    Inputs whose batch would need programs that are not compiled yet wait until they are, and
    others go before them.

    Attributes:
        queue: the request queue, with the inputs that wait.
        is_ready: whether the first programs are compiled, and inputs are taken.
        asked: number of inputs that were answered, by group.
        error: the error that ended the thread.
        compiler: the thread that compiles the programs that inputs wait for.
        heartbeat_s: time of its last decode steps, by the clock `time.monotonic`.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        metrics: ModelMetrics,
        asked_before: Sequence[Group] = (),
    ):
        """Compiles nothing yet.

        Args:
            asked_before: groups that an earlier server was asked for, the most wanted first;
                their programs are compiled before those of other short prompts.
        """
        super().__init__(name="switchx-worker", daemon=True)
        self._asked_before, self.asked = asked_before, Counter()
        self._model, self._limits, self._metrics = model, limits, metrics
        self.queue, self.compiler = RequestQueue(limits), Compiler(self)
        self._generators: dict[Group, Generator] = {}
        # Batches by kind.
        self._batches: dict[tuple, Batch] = {}
        # The largest batch that the programs of a group are compiled for.
        self._compiled: dict[Group, int] = {}
        # And of groups whose next larger batch could not be compiled, the largest to ask for.
        self._most: dict[Group, int] = {}
        # Groups of which no batch was decoded since they were compiled.
        self._unused: set[Group] = set()
        # Experts outside of the device are moved by one thread at a time.
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
        """Whether all programs are compiled that are without being asked for."""
        return self.is_ready and not self.compiler.planned

    @property
    def compiled(self) -> dict[Group, int]:
        """Groups whose programs are compiled, with most inputs that are decoded together."""
        return {group: size for group, size in list(self._compiled.items()) if size}

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
        """The inputs that may join a batch now, those that go first in front.

        It is where other policies of scheduling differ (bench/inflight.py).
        """
        return self.queue.waiting()

    def _admit(self) -> bool:
        """Takes inputs into batches with free rows and compiled programs; says if any."""
        joining: dict[tuple, list[QueuedInput]] = {}
        groups = {kind: batch.group for kind, batch in self._batches.items()}
        full: set[tuple] = set()
        for each in [] if self.queue.is_closed else self.candidates():
            kind = each.group.kind
            batch, others = self._batches.get(kind), joining.setdefault(kind, [])
            size = len(others) + 1 + (len(batch.inputs) if batch else 0)
            group = groups.get(kind, each.group).joined(each.group)
            if kind in full or size > self._most_inputs(group):
                # No later one goes before it, of a smaller group: it might wait for ever.
                full.add(kind)
                continue
            if self._num_compiled(group) < size:
                self.compiler.ask(group)
                if (larger := self._covering(group, size)) is None:
                    continue
                group = larger
            groups[kind] = group
            others.append(each)
        for kind, batch in self._batches.items():
            batch.is_full = kind in full
        for kind, inputs in joining.items():
            for first in range(0, len(inputs), MOST_JOINING):
                if there := self.queue.take(inputs[first : first + MOST_JOINING]):
                    self._join(kind, there, groups[kind])
        return any(joining.values())

    def _join(self, kind, inputs: list[QueuedInput], group: Group) -> None:
        self._metrics.count_waits(self._metrics.queue_s, inputs)
        self.asked.update(each.group for each in inputs)
        with self._failing(kind, inputs), self._moving_experts():
            if kind not in self._batches:
                self._batches[kind] = Batch(self._running_batch(group), group)
            batch = self._batches[kind]
            batch.group = group
            self._unused.discard(group)
            self._read(batch.running, inputs, group, batch.inputs_by_name)
            self._metrics.batch_size.observe(len(batch.inputs))

    def _read(self, running: RunningBatch, inputs, group: Group, by_name: dict) -> None:
        settings = [each.settings for each in inputs]
        names = running.admit(
            [each.prompt for each in inputs],
            numbers=[each.number for each in inputs],
            token_limits=[each.max_new_tokens for each in settings],
            settings=RowSettings.of(settings),
            length=group.prompt_length,
            places=group.answer_length,
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
        """A context in which experts outside of the device are this thread's alone."""
        return contextlib.nullcontext() if self._model.experts is None else self._moving

    @contextlib.contextmanager
    def _moving_experts_last(self):
        """As `_moving_experts`, for one program that is compiled: batches that wait go next."""
        with self._moving_experts():
            yield
        if self._model.experts is not None:
            time.sleep(0.01)  # a lock is not fair

    def _running_batch(self, group: Group) -> RunningBatch:
        generator = self._generator(group)
        return RunningBatch(
            generator.config,
            generator.params,
            generator.decoding,
            devices=generator.devices,
            experts=generator.experts,
            is_recorded=group.is_recorded,
        )

    def _generator(self, group: Group) -> Generator:
        key = dataclasses.replace(group, prompt_length=0)
        if key not in self._generators:
            # What is each input's own is given with it: one program for all.
            self._generators[key] = self._model.generator(
                batch_size=self._limits.batch_size, **group.settings
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
        """Compiles the first of the programs that are wanted for sure; the compiler goes on.

        They are those of groups that were asked for before, and of the model's own way of
        decoding of short prompts, for all batches and ways to shrink.
        """
        limits = self._limits
        longest = min(limits.warm_up_tokens, limits.prompt_length(limits.max_input_tokens))
        lengths = [length for length in PROMPT_LENGTHS if length <= longest]
        settings = self._model.decoding_config(**limits.warm_up(self._model.decoding))
        groups = [Group.of([0] * length, settings, limits) for length in lengths]
        if groups:  # nothing is compiled ahead with warm_up_tokens=0
            groups = list(dict.fromkeys((*self._asked_before, *groups)))
            while not self._begins_with(groups[0], is_last=len(groups) == 1):
                del groups[0]
        self.compiler.plan(groups)

    def _begins_with(self, group: Group, *, is_last: bool) -> bool:
        """Compiles the first programs of a group; says whether that went well.

        Raises:
            Exception: no program could be compiled, and no other group is left, or it is one of
                the model's own way of decoding.
        """
        LOG.info("compiling for one input: %s", group)
        try:
            self.compile_more(group)
        except Exception:
            if is_last or group not in self._asked_before:
                raise
            # An earlier server may have had more memory.
            LOG.exception("no program could be compiled for %s", group)
            return False
        return True

    def is_whole(self, group: Group) -> bool:
        """Whether no larger batch of a group is to be compiled."""
        return self._compiled.get(group, 0) >= self._most_inputs(group)

    def _most_inputs(self, group: Group) -> int:
        """Most inputs of a group that are decoded together, once that is compiled."""
        return min(self._limits.batch_size, self._most.get(group, self._limits.batch_size))

    def _covering(self, group: Group, size: int) -> Group | None:
        """The smallest group with compiled programs for so many inputs of a group, which are
        padded further; None where there is none."""
        fits = [
            each
            for each in self.compiled
            if each.kind == group.kind and each.joined(group) == each
            and self._num_compiled(each) >= size
        ]  # fmt: skip
        sizes = operator.attrgetter("prompt_length", "answer_length")
        return min(fits, key=sizes, default=None)

    def _num_compiled(self, group: Group) -> int:
        """Number of inputs of a group that the compiled and kept programs take.

        New programs count as kept, so that each compilation is followed by a batch also where
        not even one group's programs can be kept.
        """
        size = self._compiled.get(group, 0)
        if not size or group in self._unused:
            return size
        generator = self._generator(group)
        if not are_compiled(generator, size, group.prompt_length, group.is_recorded):
            size = self._compiled[group] = 0
        return size

    def compile_more(self, group: Group) -> None:
        """Compiles what the next larger batch of a group needs to begin, to be joined by few
        or many inputs, and to shrink; nothing where there is none."""
        generator = self._generator(group)
        # On a mesh they are multiples of the devices that split them.
        sizes = generator.devices.batches(generator.config, BATCHES)
        most = rounded_up(self._most_inputs(group), sizes)
        num_compiled = self._num_compiled(group)
        size = next((size for size in sizes if num_compiled < size <= most), None)
        if size is None:
            return  # it has been compiled since it was asked for
        smaller = (0, *sizes)[: sizes.index(size) + 1]
        # The least inputs of each size that can join one that goes on.
        joining = [each + 1 for each in smaller if each < min(MOST_JOINING, size - 1)]
        longest = min(len(joining) + 2, group.answer_length)
        with self._moving_experts():
            running = self._running_batch(group)
        self._read_ones(running, group, smaller[-1] or 1, longest)
        for number in joining:
            self._read_ones(running, group, number, 1)
            with self._moving_experts_last():
                running.advance(1, is_compacting=False)
        while running.waiting:
            with self._moving_experts_last():
                running.advance(STEPS[0])
        self._compiled[group] = size
        self._most.pop(group, None)
        self._unused.add(group)
        self.queue.notify()

    def _read_ones(self, running: RunningBatch, group: Group, number: int, longest: int):
        """Joins inputs of one token to a batch; one of them has the longest answer."""
        inputs = [
            QueuedInput([1], DecodingConfig(1 if i else longest), i, group, id)
            for i in range(number)
        ]
        for first in range(0, number, MOST_JOINING):
            with self._moving_experts_last():
                self._read(running, inputs[first : first + MOST_JOINING], group, {})

    def give_up(self, group: Group) -> None:
        """Has no larger batch of a group asked for than is compiled.

        Where none is, its inputs fail; the next one is tried again, alone. Smaller groups that
        were to be joined to it are decoded apart.
        """
        size = self._num_compiled(group)
        self._most[group] = max(1, size)
        if size:
            LOG.warning("%d inputs at most are decoded together: %s", size, group)
            return
        for each in self.queue.take([x for x in self.queue.waiting() if x.group == group]):
            each.deliver(Failure(each.number))


@dataclasses.dataclass
class Batch:
    """Inputs that are decoded together.

    Attributes:
        group: the group that the batch's programs are compiled for.
        inputs_by_name: the inputs, by the names that `running` gives them.
        is_full: whether more inputs wait for it than it has free rows.
    """

    running: RunningBatch
    group: Group
    inputs_by_name: dict[int, QueuedInput] = dataclasses.field(default_factory=dict)
    is_full: bool = False

    @property
    def inputs(self) -> list[QueuedInput]:
        return list(self.inputs_by_name.values())

    def abandon(self) -> None:
        """Decodes those no further whose clients left."""
        gone = [name for name, each in self.inputs_by_name.items() if each.is_abandoned]
        self.running.abandon(gone)
        for name in gone:
            del self.inputs_by_name[name]

    def deliver_tokens(self) -> None:
        """Gives streams what they have so far."""
        for name, so_far in self.running.so_far().items():
            each = self.inputs_by_name[name]
            if each.is_streaming and math.isfinite(so_far.score):  # else it gets no answer
                each.deliver(NewTokens(each.number, so_far.tokens, so_far))


class Compiler(threading.Thread):
    """Compiles what inputs wait for, while the worker answers those that have programs.

    A group begins with the programs of one input, and gets those of larger batches when more
    inputs wait than its programs take. While none waits, the groups that are planned get
    theirs, the next larger batch of each in turn.

    Attributes:
        planned: groups whose programs are compiled without being asked for.
    """

    def __init__(self, worker: Worker):
        super().__init__(name="switchx-compiler", daemon=True)
        self._worker = worker
        # The lowest numbers go first; the second ones keep the order of what was put.
        self._wanted: queue.PriorityQueue[tuple[int, int, Group | None]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._asked: set[Group] = set()
        self.planned: set[Group] = set()

    def ask(self, group: Group) -> None:
        """Has the programs of the group's next larger batch compiled, if they are not being."""
        if group not in self._asked:
            self._asked.add(group)
            self._put(_ASKED, group)

    def plan(self, groups: Sequence[Group]) -> None:
        """Has all programs of these groups compiled."""
        self.planned.update(groups)
        for group in groups:
            self._put(_PLANNED, group)

    def close(self) -> None:
        """Ends it after its program."""
        self._put(_ENDING, None)

    def _put(self, priority: int, group: Group | None) -> None:
        self._wanted.put((priority, next(self._count), group))

    def run(self) -> None:
        while (wanted := self._wanted.get())[-1] is not None:
            priority, _, group = wanted
            is_done = self._compile(group)
            if priority == _ASKED:
                self._asked.discard(group)
            elif is_done:
                self.planned.discard(group)
            else:
                self._put(_PLANNED, group)
            self._worker.queue.notify()

    def _compile(self, group: Group) -> bool:
        """Compiles the programs of a group's next larger batch; says whether it is the last."""
        LOG.info("compiling the next program of %s", group)
        try:
            self._worker.compile_more(group)
        except Exception:
            waiting = [x for x in self._worker.queue.waiting() if x.group == group]
            of = of_requests(waiting)
            LOG.exception("no program could be compiled for %s%s", group, of)
            self._worker.give_up(group)
            return True
        return self._worker.is_whole(group)
