# SPDX-License-Identifier: Apache-2.0
"""The routes: `POST /v1/generate`, `/healthz`, `/metrics`, and a page to try it in."""

import hmac
import importlib.resources
import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from switchx.serving import metrics
from switchx.serving.generate_endpoint import GenerateEndpoint
from switchx.serving.json_response import JSONResponse
from switchx.serving.refusal import Refusal
from switchx.serving.service import Service

LOG = logging.getLogger(__name__)
PAGE = importlib.resources.files("switchx.serving").joinpath("page.html").read_text("utf-8")
# Nothing that the page loads comes from elsewhere.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Of who left before the answer: nobody reads it, it is counted.
GONE = 499


def make_app(service: Service, token: str | None = None):
    """The ASGI application of a service.

    Args:
        token: that `/v1/generate` and `/metrics` ask for, as `Authorization: Bearer TOKEN`;
            None asks for none.
    """

    def require_token(request: Request) -> None:
        given = request.headers.get("authorization", "")
        wanted = f"Bearer {token}"
        if token and not hmac.compare_digest(given.encode(), wanted.encode()):
            raise Refusal(401, "send the server's token, as Authorization: Bearer TOKEN")

    async def show_health(request: Request) -> Response:
        """200 while the worker lives; what it is doing."""
        is_alive = service.worker.error is None
        status = {
            "alive": is_alive,
            "ready": service.is_ready,
            "draining": service.is_draining,
        }
        return JSONResponse(status, 200 if is_alive else 500)

    async def show_readiness(request: Request) -> Response:
        """200 while requests are taken."""
        return JSONResponse({"ready": service.is_ready}, 200 if service.is_ready else 503)

    async def show_metrics(request: Request) -> Response:
        require_token(request)
        text = service.metrics.text()
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

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
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )
    return _counting(app, service.metrics)


def _counting(app, counted: metrics.Metrics):
    async def counting(scope, receive, send):
        async def send_and_count(message):
            if message["type"] == "http.response.start":
                counted.responses.labels(str(message["status"])).inc()
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


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    LOG.error("a request failed", exc_info=error)
    refusal = Refusal(500, "the server failed; its log says how")
    return JSONResponse(refusal.as_json(), refusal.status)
