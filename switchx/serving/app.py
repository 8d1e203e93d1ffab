# SPDX-License-Identifier: Apache-2.0
"""The routes: `POST /v1/generate`, `/healthz`, `/metrics`, and a page to try it in.

An answer is sent whole, or streamed as server-sent events (https://html.spec.whatwg.org,
section 9.2): `tokens` for new ones, `answer` for what an input got, `done` at the end, `error`
instead of it. A search has no tokens before its end, so it sends answers alone.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import importlib.resources
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette import responses
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from switchx.api import Model
from switchx.data.tokenizers import Vocabulary
from switchx.serving.requests import (
    GenerateRequest,
    Refusal,
    read_body,
    read_request,
    until_disconnected,
)
from switchx.serving.scheduler import Answer, Event, Service

LOG = logging.getLogger(__name__)
PAGE = importlib.resources.files("switchx.serving").joinpath("page.html").read_text("utf-8")
# Nothing that the page loads comes from elsewhere.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# For a client to read what it was sent.
READING_S = 30.0
# Of a client that disconnected before the answer: it is counted, not sent.
DISCONNECTED = 499
# What a vocabulary writes for bytes that are no character yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def make_app(service: Service, token: str | None = None):
    """The ASGI application of a service.

    Args:
        token: that `/v1/generate` and `/metrics` ask for, as `Authorization: Bearer TOKEN`;
            None asks for none.
    """

    def require_token(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refusal(401, "send the server's token, as Authorization: Bearer TOKEN")

    async def show_health(request: Request) -> Response:
        """200 while the worker lives; what it is doing."""
        is_alive, is_ready = service.worker.error is None, service.is_ready
        status = {"alive": is_alive, "ready": is_ready, "draining": service.is_draining}
        return JSONResponse(status, 200 if is_alive else 500)

    async def show_readiness(request: Request) -> Response:
        """200 while requests are taken."""
        return JSONResponse({"ready": service.is_ready}, 200 if service.is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        require_token(request)
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def show_page(request: Request) -> Response:
        return HTMLResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})

    app = Starlette(
        routes=[
            Route("/v1/generate", GenerateEndpoint(service, require_token), methods=["POST"]),
            Route("/healthz", show_health),
            Route("/healthz/ready", show_readiness),
            Route("/metrics", show_metrics),
            Route("/", show_page),
        ],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _no_such_route,
            ClientDisconnect: _disconnected,
            Exception: _failed,
        },
    )

    async def counting(scope, receive, send):
        async def send_and_count(message):
            if message["type"] == "http.response.start":
                service.metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        await app(scope, receive, send_and_count)

    return counting


async def _refused(request: Request, refusal: Refusal) -> Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.status in (401, 408, 413, 415, 429, 503):
        headers["connection"] = "close"  # the rest of the body is not waited for
    return JSONResponse(refusal.as_json(), refusal.status, headers)


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method:.20} {request.url.path:.60}: {error.detail}"
    refusal = Refusal(error.status_code, f"{message}; use POST /v1/generate")
    headers = dict(error.headers or {}) | {"connection": "close"}
    return JSONResponse(refusal.as_json(), refusal.status, headers)


async def _disconnected(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=DISCONNECTED)


async def _failed(request: Request, error: Exception) -> Response:
    LOG.error("a request failed", exc_info=error)
    return await _refused(request, Refusal(500, "the server failed; its log says how"))


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
                # A client that reads too slowly is cut off.
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
        """All answers in one object; stops when the client disconnects."""

        async def all_answers() -> list[Answer]:
            answers = [event async for event in events if isinstance(event, Answer)]
            return sorted(answers, key=lambda answer: answer.number)

        answering = asyncio.ensure_future(all_answers())
        leaving = asyncio.ensure_future(until_disconnected(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=DISCONNECTED)
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
                is_last, which = isinstance(event, Answer), {"input": event.number}
                tokens = event.hypothesis.tokens if is_last else event.tokens
                piece = streams[event.number].piece(tokens, is_last=is_last)
                if piece and not is_search:
                    yield event_bytes("tokens", which | piece)
                if is_last:
                    answers.append(event)
                    yield event_bytes("answer", which | answer_json(model, event))
            yield event_bytes("done", {"usage": usage_json(wanted, answers)})
        except Refusal as refusal:
            yield event_bytes("error", refusal.as_json())


def event_bytes(name: str, content: Any) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encoded(content) + b"\n\n"


def answer_json(model: Model, answer: Answer) -> dict[str, Any]:
    values = dataclasses.asdict(answer.hypothesis)
    vocabulary = model.vocabulary
    return {"text": vocabulary and vocabulary.decode(values["tokens"])} | values


def usage_json(wanted: GenerateRequest, answers: list[Answer]) -> dict[str, int]:
    return {
        "prompt_tokens": sum(map(len, wanted.prompts)),
        "generation_tokens": sum(len(answer.hypothesis.tokens) for answer in answers),
    }


class TextStream:
    """An input's answer in pieces: which tokens and which characters are new.

    The pieces together are the whole. Where a later token changes the text of earlier ones,
    no further text is sent until the end, and the answer has it.
    """

    def __init__(self, vocabulary: Vocabulary | None):
        self._vocabulary = vocabulary
        self._num_tokens, self._text = 0, ""

    def piece(self, tokens: Sequence[int], *, is_last: bool = False) -> dict | None:
        """What is new in all tokens so far, `tokens` and `text`; None where nothing is."""
        new_tokens = list(tokens[self._num_tokens :])
        self._num_tokens = max(self._num_tokens, len(tokens))
        piece = {"tokens": new_tokens, "text": None}
        if self._vocabulary is not None:
            text = self._vocabulary.decode(list(tokens))
            # Half of a character is kept until the other half is there.
            text = text if is_last else text.rstrip(INCOMPLETE)
            is_longer = text.startswith(self._text)
            piece["text"] = text[len(self._text) :] if is_longer else ""
            self._text = text if is_longer else self._text
        return piece if new_tokens or piece["text"] else None


def encoded(content: Any) -> bytes:
    """JSON in UTF-8, half of a surrogate pair as its escape.

    Raises:
        ValueError: there is an infinity or a NaN in it.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    # What cannot be encoded occurs in texts alone, where a backslash escapes it.
    return text.encode("utf-8", errors="backslashreplace")


class JSONResponse(responses.JSONResponse):
    def render(self, content: Any) -> bytes:
        return encoded(content) + b"\n"
