# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/generate`: the whole answer at its end, or its tokens as they come.

A stream is of server-sent events (https://html.spec.whatwg.org, section 9.2): `tokens` for
new ones, `answer` for what an input got, `done` at the end, `error` instead of it. A search
has no tokens before its end, so it sends answers alone.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from switchx.api import Model
from switchx.serving.generate_request import GenerateRequest, read_request
from switchx.serving.json_response import JSONResponse, encoded
from switchx.serving.refusal import Refusal
from switchx.serving.request_body import read_body, until_gone
from switchx.serving.service import Event, Service
from switchx.serving.text_stream import TextStream
from switchx.serving.worker import Answer

# For a client to read what it was sent.
READING_S = 30.0
GONE = 499


class GenerateEndpoint:
    """An ASGI application; see `Route`."""

    def __init__(self, service: Service, require_token: Callable[[Request], None]):
        self._service, self._require_token = service, require_token

    async def __call__(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        self._require_token(request)
        service = self._service
        with service.admitted():
            body = await read_body(request, service.limits)
            # Beside the loop: a long text does not keep others waiting.
            wanted = await run_in_threadpool(read_request, body, service.model, service.limits)
            deadline_s = asyncio.get_running_loop().time() + service.limits.request_timeout_s
            async with service.events(wanted) as events:
                events = self._until(deadline_s, events)
                if wanted.is_streaming:
                    response = StreamingResponse(
                        self._stream(events, wanted),
                        headers={"cache-control": "no-store"},
                        media_type="text/event-stream",
                    )
                else:
                    response = await self._whole(request, events, wanted)
                # Who reads too slowly is cut off.
                async with asyncio.timeout_at(deadline_s + READING_S):
                    await response(scope, receive, send)

    async def _until(self, deadline_s: float, events) -> AsyncIterator[Event]:
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                seconds = self._service.limits.request_timeout_s
                raise Refusal(
                    504, f"there was no answer within {seconds:g} s; ask for less, or later"
                ) from None
            yield event

    async def _whole(
        self, request: Request, events: AsyncIterator[Event], wanted: GenerateRequest
    ) -> Response:
        """All answers in one object; stops when the client leaves."""

        async def all_answers() -> list[Answer]:
            answers = [event async for event in events if isinstance(event, Answer)]
            return sorted(answers, key=lambda answer: answer.number)

        answering = asyncio.ensure_future(all_answers())
        leaving = asyncio.ensure_future(until_gone(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=GONE)
            answers = answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Refusal):
                    await task
        results = [answer_json(self._service.model, answer) for answer in answers]
        return JSONResponse({"results": results, "usage": usage_json(wanted, answers)})

    async def _stream(
        self, events: AsyncIterator[Event], wanted: GenerateRequest
    ) -> AsyncIterator[bytes]:
        model = self._service.model
        streams = [TextStream(model.vocabulary) for _ in wanted.prompts]
        is_search, answers = wanted.settings.beam_size > 1, []
        try:
            async for event in events:
                is_last = isinstance(event, Answer)
                tokens = event.hypothesis.tokens if is_last else event.tokens
                piece = streams[event.number].piece(tokens, is_last=is_last)
                if piece and not is_search:
                    yield event_bytes("tokens", {"input": event.number} | piece)
                if is_last:
                    answers.append(event)
                    yield event_bytes(
                        "answer", {"input": event.number} | answer_json(model, event)
                    )
            yield event_bytes("done", {"usage": usage_json(wanted, answers)})
        except Refusal as refusal:
            yield event_bytes("error", refusal.as_json())


def event_bytes(name: str, content: Any) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encoded(content) + b"\n\n"


def answer_json(model: Model, answer: Answer) -> dict[str, Any]:
    values = dataclasses.asdict(answer.hypothesis)
    if model.vocabulary is None:
        return {"text": None} | values
    return {"text": model.vocabulary.decode(answer.hypothesis.tokens)} | values


def usage_json(wanted: GenerateRequest, answers: list[Answer]) -> dict[str, int]:
    return {
        "prompt_tokens": sum(map(len, wanted.prompts)),
        "generation_tokens": sum(len(answer.hypothesis.tokens) for answer in answers),
    }
