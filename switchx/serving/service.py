# SPDX-License-Identifier: Apache-2.0
"""A model that answers requests, seen from the event loop: requests in, events out.

`Service` admits requests and puts their inputs into the queue whose worker (scheduler.py)
answers them; `Events` is what one of them gets back. models.py has a server's services.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from switchx.api import Model
from switchx.fields import require
from switchx.serving import refusals
from switchx.serving.limits import Limits
from switchx.serving.metrics import Metrics
from switchx.serving.refusals import Refusal
from switchx.serving.request_queue import Answer, Event, Failure, ProgramShape, QueuedInput
from switchx.serving.requests import GenerateRequest
from switchx.serving.scheduler import Worker


class Service:
    """A model that answers requests, under a name.

    Attributes:
        created: time of its start, in seconds since the epoch.
        num_open: number of its requests that are being read or answered.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        name: str = "switchx",
        metrics: Metrics | None = None,
        asked_before: Sequence[ProgramShape] = (),
    ):
        """Starts the worker, which compiles first.

        Args:
            metrics: the server's metrics; None makes new ones.
            asked_before: see `Worker`.

        Raises:
            ValueError: the model cannot generate.
        """
        beams = model.generator().decoding.beam_size
        require(
            beams <= limits.max_beam_size,
            f"the model's own beam_size is {beams}, max_beam_size={limits.max_beam_size}; use "
            f"--max_beam_size={beams}",
        )
        self.model, self.limits, self.name, self.created = model, limits, name, int(time.time())
        self.metrics = (metrics or Metrics()).of(name)
        self.worker = Worker(model, limits, self.metrics, asked_before)
        self._queue = self.worker.queue
        self.num_open = 0
        self._open: set[Events] = set()
        self.worker.start()
        self.worker.compiler.start()

    @property
    def num_waiting(self) -> int:
        """Number of inputs in the queue."""
        return len(self._queue)

    @contextlib.contextmanager
    def admitted(self):
        """A request of this model, until its response.

        Raises:
            Refusal: 503; the worker ended, or it is still compiling.
        """
        self._require_worker()
        if not self.worker.is_ready:
            raise refusals.compiling()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    @contextlib.asynccontextmanager
    async def events(self, request: GenerateRequest) -> AsyncIterator["Events"]:
        """The events of a request's inputs, until each has its answer.

        If the context is left before that, the inputs are abandoned: they leave the request
        queue, or are decoded no further.

        Raises:
            Refusal: 429, the queue is full; 503, the worker ended.
        """
        self._require_worker()
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            # A closed loop has no more clients.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put, event)

        settings, inputs = request.settings, []
        for number, prompt in enumerate(request.decoded):
            shape = ProgramShape.of(prompt, settings, self.limits, request.with_experts)
            has_events = request.wants_tokens
            each = QueuedInput(prompt, settings, number, shape, deliver, has_events)
            each.request_id = request.request_id
            inputs.append(each)

        def end(number: int, num_tokens: int, reason: str) -> None:
            """Counts an answer; the input is decoded no further."""
            self._queue.abandon([inputs[number]])
            self.metrics.count_answer(inputs[number], num_tokens, reason)

        events = Events(len(inputs), self.limits.request_timeout_s, end)
        if not self._queue.put(inputs):
            raise refusals.full_queue(len(self._queue), len(inputs), self.limits)
        self._open.add(events)
        try:
            yield events
        finally:
            self._open.discard(events)
            self._queue.abandon(inputs)
            self.metrics.abandoned.inc(len(events.unanswered))

    def _require_worker(self) -> None:
        """Raises Refusal if nothing is answered any more."""
        if self.worker.error is not None:
            raise Refusal(503, "the model is not running any more; the server's log says why")

    def refuse_open(self, message: str) -> None:
        """Ends every request that is not answered yet with 503."""
        for events in self._open:
            events.refuse(Refusal(503, message, retry_after_s=10))

    def close(self) -> None:
        """Stops the worker after its batches, and the compiler after its program."""
        self._queue.close()
        self.worker.compiler.close()


class Events:
    """An asynchronous iterator over the events of a request's inputs, for one event loop.

    A later event of an input replaces an unread earlier one, whose contents it includes. So at
    most one event per input waits for a client that reads slowly.

    Attributes:
        unanswered: numbers of the inputs without an answer.
        num_tokens: number of the answers' tokens, as their reader counts them.
        deadline_s: deadline in seconds, by the event loop's clock.
    """

    def __init__(self, size: int, timeout_s: float, on_end: Callable[[int, int, str], None]):
        self.unanswered, self.num_tokens = set(range(size)), 0
        self._timeout_s = timeout_s
        self.deadline_s = asyncio.get_running_loop().time() + timeout_s
        self._waiting: dict[int, Event] = {}
        self._has_news, self._on_end = asyncio.Event(), on_end
        self._refusal: Refusal | None = None

    def put(self, event: Event) -> None:
        # An input whose batch fails after its answer keeps its answer.
        is_answered = isinstance(self._waiting.get(event.number), Answer)
        if event.number in self.unanswered and not is_answered:
            self._waiting[event.number] = event
            self._has_news.set()

    def refuse(self, refusal: Refusal) -> None:
        """Refuses whatever is not answered."""
        self._refusal = refusal
        self._has_news.set()

    def end(self, number: int, num_tokens: int, reason: str) -> None:
        """Ends an input from which the reader needs nothing more, answered or not.

        Args:
            num_tokens: number of tokens that the reader took.
            reason: `stop` at an end or a stop string, `length` if it was cut off.
        """
        self.unanswered.discard(number)
        self._waiting.pop(number, None)
        self.num_tokens += num_tokens
        self._on_end(number, num_tokens, reason)

    def __aiter__(self) -> "Events":
        return self

    async def __anext__(self) -> Event:
        """Raises Refusal: the model failed, it took too long, or the request was refused."""
        while self.unanswered:
            if self._waiting:
                number = next(iter(self._waiting))
                event = self._waiting.pop(number)
                if isinstance(event, Failure):
                    raise Refusal(500, event.message)
                if isinstance(event, Answer):
                    self.unanswered.discard(number)
                return event
            if self._refusal is not None:
                raise self._refusal
            self._has_news.clear()
            try:
                async with asyncio.timeout_at(self.deadline_s):
                    await self._has_news.wait()
            except TimeoutError:
                message = f"there was no answer within {self._timeout_s:g} s"
                way_out = "ask for less, or later, when its program is compiled (/healthz)"
                raise Refusal(504, f"{message}; {way_out}") from None
        raise StopAsyncIteration
