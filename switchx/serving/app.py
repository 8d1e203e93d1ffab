# SPDX-License-Identifier: Apache-2.0
"""The routes, who may use them, and what is logged about each request.

POST /v1/generate                       texts or token ids in, answers out
POST /v1/completions, GET /v1/models    as OpenAI's clients ask
POST /v1/chat/completions               for models with a chat template
/healthz, /health, /healthz/ready       for probes: no limit and no token applies to them
/metrics, /version, /                   Prometheus's text, versions, a page to try it in
"""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import logging
import re
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from switchx.serving import refusals
from switchx.serving.answers import GenerateForm, JSONResponse
from switchx.serving.chat import ChatForm
from switchx.serving.completions import CompletionForm
from switchx.serving.limits import READING_S
from switchx.serving.models import Models
from switchx.serving.page import page_of
from switchx.serving.refusals import Refusal
from switchx.serving.requests import json_object, read_body, until_disconnected
from switchx.serving.service import Service
from switchx.serving.versions import versions

LOG = logging.getLogger(__name__)
# One line of JSON per request; `switchx serve --access_log` says where they go.
ACCESS_LOG = logging.getLogger("switchx.access")
# Status for a client that disconnected before the answer: it is counted, not sent.
DISCONNECTED = 499
HEALTH = ("/healthz", "/healthz/ready", "/health")
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(
    models: Models,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    num_connections: Callable[[], int] = lambda: 0,
):
    """The ASGI application of some models.

    Args:
        token: bearer token that all routes except health, `/version` and the page require, as
            `Authorization: Bearer TOKEN`; None requires none.
        hosts: names of this server, besides those of only this machine, that a request's
            `Host` may have; None allows any. A server without a token that listens only on
            this machine has to check it: a page in a browser may have a name that leads here
            (DNS rebinding).
        num_connections: function that returns the number of open connections.
    """

    def require_token(request: Request) -> None:
        # The scheme's case is free (RFC 9110, section 11.1).
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if token and not hmac.compare_digest(given.encode(), token.encode()):
            raise Refusal(
                401,
                "send the server's token, as Authorization: Bearer TOKEN",
                code="invalid_api_key",
            )

    async def show_metrics(request: Request) -> Response:
        require_token(request)
        return Response(models.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def show_version(request: Request) -> Response:
        return JSONResponse(versions())

    async def show_page(request: Request) -> Response:
        return page_of(models.first)

    async def show_models(request: Request) -> Response:
        require_token(request)
        data = [_model_json(each) for each in models.services.values()]
        return JSONResponse({"object": "list", "data": data})

    async def show_model(request: Request) -> Response:
        require_token(request)
        return JSONResponse(_model_json(models.named(request.path_params["name"])))

    reader = models.reader
    generate = Endpoint(models, require_token, lambda each: GenerateForm(each.model))

    def form_of(kind: type[CompletionForm]):
        return lambda each: kind(each.model, each.name, each.limits.batch_size, reader)

    complete = Endpoint(models, require_token, form_of(CompletionForm))
    chat = Endpoint(models, require_token, form_of(ChatForm))

    app = Starlette(
        routes=[
            Route("/v1/generate", generate, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", show_models),
            Route("/v1/models/{name:path}", show_model),
            *_health_routes(models),
            Route("/metrics", show_metrics),
            Route("/version", show_version),
            Route("/", show_page),
        ],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _no_such_route,
            ClientDisconnect: _disconnected,
            Exception: _failed,
        },
    )
    return Entrance(app, models, hosts, num_connections)


def _model_json(service: Service) -> dict:
    """A model as `/v1/models` lists it, and the step of its checkpoint."""
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "switchx",
        "step": service.model.step,
    }


def _health_routes(models: Models) -> list[Route]:
    async def show_health(request: Request) -> Response:
        """200 while the workers live; says what they are doing.

        For each model, it lists the compiled programs, with most inputs at a time, and the
        number of shapes whose further programs are compiled without being asked for.
        """
        is_alive = models.is_alive
        status = {"alive": is_alive, "ready": models.is_ready, "draining": models.is_draining}
        status["models"] = {
            name: {
                "compiled": {
                    str(shape): size for shape, size in service.worker.compiled.items()
                },
                "planned": len(service.worker.compiler.planned),
            }
            for name, service in models.services.items()
        }
        return JSONResponse(status, 200 if is_alive else 503)

    async def show_readiness(request: Request) -> Response:
        """200 while requests are taken."""
        return JSONResponse({"ready": models.is_ready}, 200 if models.is_ready else 503)

    views = (show_health, show_readiness, show_health)
    return [Route(path, view) for path, view in zip(HEALTH, views, strict=True)]


class Entrance:
    """An ASGI application around the routes, through which all requests and responses pass.

    A request gets an id, its own `X-Request-Id` or a new one, and is counted and logged.
    Without one of the allowed hosts, or with too many connections, it gets no further. A
    connection whose request was not read to its end closes with the response, since what comes
    next on it is the rest of a body.
    """

    def __init__(self, app, models: Models, hosts, num_connections: Callable[[], int]):
        self._app, self._models = app, models
        self._hosts, self._num_connections = hosts, num_connections

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, is_health = Headers(scope=scope), scope["path"] in HEALTH
        given_id = headers.get("x-request-id", "")
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex,
            "client": ":".join(map(str, scope.get("client") or ())),
            "method": scope["method"][:20],
            "path": scope["path"][:200],
            "status": DISCONNECTED,
            "bytes": 0,
            "is_complete": False,
        }
        scope.setdefault("state", {})["record"] = record
        start_s = time.monotonic()
        has_length = headers.get("content-length", "0") != "0"
        has_body = has_length or "transfer-encoding" in headers
        is_read = not has_body

        async def receive_and_note():
            nonlocal is_read
            message = await receive()
            is_read |= message["type"] == "http.request" and not message.get("more_body")
            return message

        async def send_and_note(message):
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                self._models.metrics.responses.labels(str(message["status"])).inc()
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = record["request_id"]
                if not is_read or self._models.is_draining:
                    sent["connection"] = "close"
            else:
                record["bytes"] += len(message.get("body", b""))
                record["is_complete"] = not message.get("more_body", False)
            await send(message)

        try:
            refusal = None if is_health else self._refusal(headers)
            app = self._app
            if refusal is not None:
                app = await _refused(Request(scope), refusal)
            await app(scope, receive_and_note, send_and_note)
        finally:
            if not is_health and ACCESS_LOG.isEnabledFor(logging.INFO):
                record["seconds"] = round(time.monotonic() - start_s, 6)
                ACCESS_LOG.info("%s", json.dumps(record))

    def _refusal(self, headers: Headers) -> Refusal | None:
        """The reason why a request may not pass, or None."""
        if self._hosts is not None:
            host = _host_name(headers.get("host", ""))
            if not is_loopback(host) and host not in self._hosts:
                return Refusal(
                    403,
                    f"Host is {host!r:.80}, which is no name of this server; ask 127.0.0.1, or "
                    "start it with --allowed_hosts, or with a token",
                )
        most = self._models.limits.max_connections
        if self._num_connections() > most:
            return refusals.too_many_connections(most)
        return None


def _host_name(header: str) -> str:
    """The name or address in a `Host` header, without its port."""
    try:
        return urllib.parse.urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


async def _refused(request: Request, refusal: Refusal) -> Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(refusal.as_json(), refusal.status, headers)


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method:.20} {request.url.path:.60}: {error.detail}"
    refusal = Refusal(error.status_code, f"{message}; use POST /v1/generate or /v1/completions")
    return JSONResponse(refusal.as_json(), refusal.status, error.headers)


async def _disconnected(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=DISCONNECTED)


async def _failed(request: Request, error: Exception) -> Response:
    request_id = getattr(request.state, "record", {}).get("request_id", "unknown")
    LOG.error("request %s failed", request_id, exc_info=error)
    return await _refused(request, Refusal(500, "the server failed; its log says how"))


class Endpoint:
    """An ASGI application that answers texts; see `Route`.

    Args:
        make_form: function that makes a service's form, which reads bodies and sends answers,
            whole or as a stream.
    """

    def __init__(
        self,
        models: Models,
        require_token: Callable[[Request], None],
        make_form: Callable[[Service], GenerateForm | CompletionForm],
    ):
        self._models, self._require_token, self._make_form = models, require_token, make_form

    async def __call__(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        self._require_token(request)
        with self._models.admitted():
            body = await read_body(request, self._models.limits)
            # Off the event loop, so that a long text does not keep others waiting.
            values = await run_in_threadpool(json_object, body)
            # From here on the request is this service's, even if another takes its name.
            service = self._models.named(values.get("model"))
            with service.admitted():
                await self._answer(request, values, service, send)

    async def _answer(self, request: Request, values: dict, service: Service, send) -> None:
        form = self._make_form(service)
        wanted = await run_in_threadpool(form.read, values, service.limits)
        wanted = dataclasses.replace(wanted, request_id=request.state.record["request_id"])
        async with service.events(wanted) as events:
            if wanted.is_streaming:
                response = StreamingResponse(
                    form.stream(wanted, events),
                    headers={"cache-control": "no-store"},
                    media_type="text/event-stream",
                )
            else:
                response = await self._whole(request, form.whole(wanted, events))
            try:
                # A client that reads too slowly is cut off.
                async with asyncio.timeout_at(events.deadline_s + READING_S):
                    await response(request.scope, request.receive, send)
            finally:
                request.state.record |= {
                    "model": service.name,
                    "inputs": len(wanted.prompts),
                    "prompt_tokens": sum(map(len, wanted.prompts)),
                    "generation_tokens": events.num_tokens,
                }

    async def _whole(self, request: Request, answers) -> Response:
        """All answers in one object; stops when the client disconnects."""
        answering = asyncio.ensure_future(answers)
        leaving = asyncio.ensure_future(until_disconnected(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=DISCONNECTED)
            return JSONResponse(answering.result())
        finally:
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Refusal):
                    await task
