# SPDX-License-Identifier: Apache-2.0
"""An asynchronous client of `switchx serve`: answers, streams, retries, deadlines.

    async with Client("http://127.0.0.1:8000") as client:
        answer = await client.generate("import <extra_id_0>", max_new_tokens=16)
        async for event in client.stream("import <extra_id_0>"):
            ...

Settings are the fields of `POST /v1/generate` (docs/serving.md). It needs httpx2, of the extra
`client`, and no JAX.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import email.utils
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2

Inputs = str | Sequence[str] | Sequence[Sequence[int]]
# HTTP status of a server that cannot answer now, and may later.
BUSY = (429, 503)
# Waits between attempts where the server gives none: doubled, up to the largest.
FIRST_WAIT_S, MOST_WAIT_S = 0.25, 8.0


class ServerError(Exception):
    """The server refused a request, or could not answer it.

    Attributes:
        status: HTTP status.
        message: message of the server: expected, got, and the way out.
        field: field of the request that is wrong, or None.
        retry_after_s: seconds after which the server says to try again, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(f"{status}: {message}")
        self.status, self.message, self.field = status, message, field
        self.retry_after_s = retry_after_s


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The new tokens in the answer to an input.

    Attributes:
        input: index of the input in the request.
        text: text of the tokens; None from a model without a vocabulary.
        sample: index of the sample among the input's samples, from 0 on.
    """

    input: int
    tokens: list[int]
    text: str | None
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to an input, or one of several.

    Attributes:
        input: index of the input in the request.
        text: text of the tokens; None from a model without a vocabulary.
        score: log-probability over length ** length_penalty, the end included.
        is_finished: whether the output reached its end; otherwise it was cut off.
        more: further fields that the server sends, by name.
        sample: index of the answer among the input's, from 0 on, with `num_return_sequences`
            above 1; in a search and with `best_of`, the first one is the best.
    """

    input: int
    text: str | None
    tokens: list[int]
    score: float
    is_finished: bool
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    sample: int = 0


class Client:
    """Sends requests to a server, any number of them at a time.

    A request for which the server is too busy (429, or 503 with `Retry-After`) or cannot be
    reached is sent again when the server says so, or after waits that double. Nothing else is
    sent again.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        deadline_s: float = 120.0,
        max_connections: int = 64,
        **options,
    ):
        """A client without connections; use it as an asynchronous context, or `close` it.

        Args:
            url: URL of the server, such as `http://127.0.0.1:8000`.
            token: token that the server requires.
            deadline_s: default deadline of a call in seconds, including waits between attempts.
            max_connections: largest number of connections at a time; further calls wait.
            options: options of `httpx2.AsyncClient`, such as `verify` or `proxy`.
        """
        if not deadline_s > 0:
            raise ValueError(f"deadline_s={deadline_s}; use more than 0")
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(f"url={url!r} has no scheme; use http://HOST:PORT or https://HOST")
        self._deadline_s = deadline_s
        headers = dict(options.pop("headers", None) or {})
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx2.AsyncClient(
            base_url=url.rstrip("/") + "/",
            headers=headers,
            timeout=None,  # the deadline is the call's
            limits=httpx2.Limits(max_connections=max_connections),
            **options,
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self, inputs: Inputs, *, deadline_s: float | None = None, **settings
    ) -> Answer | list[Answer] | list[list[Answer]]:
        """Returns the answer to a text, or the answers to a list in its order.

        With `num_return_sequences` above 1 each input has a list of `Answer`s.

        Args:
            inputs: a text, or a list of texts or of lists of token ids.
            deadline_s: deadline of this call in seconds; None takes the client's.
            settings: fields of the request, such as `max_new_tokens=16, beam_size=4`.

        Raises:
            ServerError: the server refused the request; the message says why.
            TimeoutError: there was no answer before the deadline.
            httpx2.TransportError: the connection was lost.
        """
        deadline = self._deadline(deadline_s)
        body = {"inputs": inputs, **settings}
        response = await self._send(body, deadline)
        async with _until(deadline):
            content = await response.aread()
        try:
            results = json.loads(content)["results"]
            answers = [_result(number, each) for number, each in enumerate(results)]
            if len(answers) != (1 if isinstance(inputs, str) else len(inputs)):
                raise ValueError("another number of answers")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _error(response.status_code, content) from None
        return answers[0] if isinstance(inputs, str) else answers

    async def stream(
        self, inputs: Inputs, *, deadline_s: float | None = None, **settings
    ) -> AsyncIterator[NewTokens | Answer]:
        """Yields new tokens as they arrive, and each input's answer when it is complete.

        A search has no tokens before its end. With `num_return_sequences` above 1 an input has
        several answers, each an event. If the iteration is left early, close the iterator
        (`contextlib.aclosing`), so that the server stops decoding.

        Args, Raises: as `generate`; ServerError also if the stream ends without all answers.
        """
        deadline = self._deadline(deadline_s)
        response = await self._send({"inputs": inputs, "stream": True, **settings}, deadline)
        try:
            missing = set(range(1 if isinstance(inputs, str) else len(inputs)))
            events = aiter(httpx2.EventSource(response))
            while True:
                try:
                    async with _until(deadline):
                        event = await anext(events, None)
                except httpx2.SSEError as error:  # from a proxy
                    raise ServerError(response.status_code, str(error)) from None
                if event is None or event.event == "done" and missing:
                    raise ServerError(response.status_code, "the stream ended without its end")
                if event.event == "done":
                    return
                try:
                    values = event.json()
                    if event.event == "error":
                        raise _error(values["error"]["status"], event.data.encode())
                    found = _found(event.event, values)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise _error(response.status_code, event.data.encode()) from None
                for each in found:
                    missing -= {each.input} if isinstance(each, Answer) else set()
                    yield each
        finally:
            await response.aclose()

    async def wait_until_ready(self, *, deadline_s: float | None = None) -> None:
        """Returns when the server takes requests.

        Raises:
            TimeoutError: the server took no requests before the deadline.
        """
        async with _until(self._deadline(deadline_s)):
            while True:
                try:
                    if (await self._http.get("healthz/ready")).status_code == 200:
                        return
                except httpx2.TransportError:
                    pass  # it is not listening yet
                await asyncio.sleep(FIRST_WAIT_S)

    def _deadline(self, deadline_s: float | None) -> float:
        """The deadline of a call, by the event loop's clock."""
        own_s = self._deadline_s if deadline_s is None else deadline_s
        return asyncio.get_running_loop().time() + own_s

    async def _send(self, body: dict[str, Any], deadline: float) -> httpx2.Response:
        """The response, its body not yet read, after as many attempts as it takes."""
        clock, wait_s = asyncio.get_running_loop().time, FIRST_WAIT_S
        while True:
            try:
                async with _until(deadline):
                    request = self._http.build_request("POST", "v1/generate", json=body)
                    response = await self._http.send(request, stream=True)
                    if response.status_code == 200:
                        return response
                    content = await response.aread()
                    await response.aclose()
                failed = _error(response.status_code, content, response.headers)
                again_s = failed.retry_after_s
                if failed.status not in BUSY or again_s is None and failed.status != 429:
                    raise failed
            except httpx2.ConnectError as error:
                failed, again_s = error, None
            if not (again_s or 0) >= FIRST_WAIT_S:  # no time given, or now, or long past
                again_s = wait_s * random.uniform(0.5, 1.0)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
            if clock() + again_s >= deadline:
                raise failed
            await asyncio.sleep(again_s)


def generate(url: str, inputs: Inputs, *, token: str | None = None, **settings):
    """`Client.generate` for a program without an event loop; opens a connection each time."""

    async def ask():
        async with Client(url, token=token) as client:
            return await client.generate(inputs, **settings)

    return asyncio.run(ask())


@contextlib.asynccontextmanager
async def _until(deadline: float):
    """Raises TimeoutError when the event loop's clock is past the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise TimeoutError(
            "there was no answer before the deadline; give a later deadline_s, or ask for less"
        ) from None


def _result(number: int, values: dict[str, Any]) -> Answer | list[Answer]:
    """The answer to an input, or a list of several; raises KeyError where it is neither."""
    if "hypotheses" in values:
        return [_answer(number, i, each) for i, each in enumerate(values["hypotheses"])]
    return _answer(number, 0, values)


def _answer(number: int, sample: int, values: dict[str, Any]) -> Answer:
    own = {name: values.pop(name) for name in ("text", "tokens", "score", "is_finished")}
    return Answer(number, **own, more=values, sample=sample)


def _found(name: str, values: dict[str, Any]) -> Sequence[NewTokens | Answer]:
    """Tokens or an answer from an event of a stream; nothing from events of other names."""
    if name not in ("tokens", "answer"):
        return ()
    number, sample = values.pop("input"), values.pop("sample", 0)
    if name == "tokens":
        return [NewTokens(number, values["tokens"], values.get("text"), sample)]
    if "hypotheses" in values:
        return _result(number, values)
    return [_answer(number, sample, values)]


def _error(status: int, content: bytes, headers=None) -> ServerError:
    """The error in a response without an answer; a proxy's response need not be JSON."""
    after_s = _seconds((headers or {}).get("retry-after"))
    try:
        error = json.loads(content)["error"]
        return ServerError(status, error["message"], error.get("field"), after_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        text = content.decode("utf-8", errors="replace").strip()
        return ServerError(status, f"no answer of switchx: {text:.200}", None, after_s)


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After`: seconds, or a date (RFC 9110, section 10.2.3)."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(retry_after))
    with contextlib.suppress(ValueError):
        date = email.utils.parsedate_to_datetime(retry_after)
        return max(0.0, (date - datetime.datetime.now(date.tzinfo)).total_seconds())
    return None
