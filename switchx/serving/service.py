# SPDX-License-Identifier: Apache-2.0
"""A model at everybody's service: requests in, what happens to them out, as events.

This is the event loop's side; the model runs in the worker's thread.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from switchx.api import Model
from switchx.serving.limits import Limits
from switchx.serving.metrics import Metrics
from switchx.serving.requests import GenerateRequest, Refusal
from switchx.serving.scheduler import (
    Answer,
    Failure,
    Group,
    NewTokens,
    WaitingInput,
    WaitingRoom,
    Worker,
)

Event = NewTokens | Answer | Failure


class Service:
    """Attributes:
    model, limits, metrics: as given.
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
        self._room = WaitingRoom(limits.max_waiting, limits.batch_size, limits.batch_wait_s)
        self.worker = Worker(model, limits, self._room, self.metrics)
        self.metrics.waiting.set_function(lambda: len(self._room))
        self.metrics.running.set_function(lambda: len(self.worker.running))
        self.num_open, self.is_draining = 0, False
        self.worker.start()

    @property
    def is_ready(self) -> bool:
        return self.worker.is_ready and not self.is_draining

    @contextlib.contextmanager
    def admitted(self):
        """A request from its head to its response.

        Raises:
            Refusal: 503; there is nobody to answer it, or not yet, or no more.
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

        Whoever leaves the context before that has lost interest: the model stops.

        Raises:
            Refusal: 429, the queue is full; 500, the model failed.
        """
        queue, loop = asyncio.Queue(), asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            # A loop that is closed has no clients any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, event)

        inputs = [
            WaitingInput(
                prompt,
                request.settings,
                number,
                Group.of(prompt, request.settings, self.limits),
                deliver,
                request.is_streaming,
            )
            for number, prompt in enumerate(request.prompts)
        ]
        if not self._room.put(inputs):
            raise Refusal(
                429,
                f"the queue has {len(self._room)} of {self._room.size} inputs, and "
                f"{len(inputs)} more do not fit; try later",
                retry_after_s=self._seconds_of_queue(),
            )
        unanswered = set(range(len(inputs)))

        async def each_event() -> AsyncIterator[Event]:
            while unanswered:
                event = await queue.get()
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
            self._room.abandon(inputs)
            self.metrics.abandoned.inc(len(unanswered))

    def _seconds_of_queue(self) -> int:
        """A guess: all that waits, at a second a batch."""
        return max(1, math.ceil(len(self._room) / self.limits.batch_size))

    def close(self) -> None:
        """Stops the worker after its batch."""
        self._room.close()
