# SPDX-License-Identifier: Apache-2.0
"""A request's body, its JSON and its checks, or its refusal.

A client may be slow, send without end, or disconnect, and nothing that it sends is trusted.
The fields of a request are `inputs`, `stream`, and the options of `DecodingConfig`.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request

from switchx.api import Model
from switchx.fields import FieldError, Option, options
from switchx.inference.config import DecodingConfig
from switchx.serving.limits import Limits

# What is decoded together is pruned together: the server's choice.
OPTIONS = {name: each for name, each in options(DecodingConfig).items() if name != "pruning"}
FIELDS = ("inputs", "stream", *OPTIONS)
# What is read of a body that is too big, so that its sender gets to read why.
DISCARDED_BYTES, DISCARDING_S = 1 << 26, 2.0


@dataclasses.dataclass(eq=False)
class Refusal(Exception):
    """What is wrong with a request, or why it cannot be answered now.

    Attributes:
        status: of HTTP.
        message: expected, got, and the way out.
        field: of the request's JSON that is wrong, or None.
        retry_after_s: when to try again; None says nothing.
    """

    status: int
    message: str
    field: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    def as_json(self) -> dict[str, Any]:
        return {"error": {"status": self.status, "field": self.field, "message": self.message}}


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body of a request.

    Raises:
        Refusal: 408, it took too long; 413, it is too big; 415, it is not said to be JSON;
            400, its length is no number.
        ClientDisconnect: the client disconnected.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding"):
        raise Refusal(
            415,
            f"Content-Type is {kind or 'missing'!r:.60}; send plain JSON, with "
            "Content-Type: application/json",
        )
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise Refusal(400, f"Content-Length is {length!r:.40}; expected a number")
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            if int(length[:20]) > limits.max_body_bytes:
                await _refuse_size(request, limits)
            async for part in request.stream():
                size += len(part)
                parts.append(part)
                if size > limits.max_body_bytes:
                    await _refuse_size(request, limits)
    except TimeoutError:
        raise Refusal(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s; send it at once"
        ) from None
    return b"".join(parts)


async def _refuse_size(request: Request, limits: Limits) -> None:
    end_s, left = time.monotonic() + DISCARDING_S, DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARDING_S):
            while left > 0 and time.monotonic() < end_s:
                message = await request.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
                left -= len(message["body"])
    raise Refusal(413, f"the body is too big; send {limits.max_body_bytes} bytes at most")


async def until_disconnected(request: Request) -> None:
    """Returns when the client has disconnected; to be awaited when the body is read."""
    with contextlib.suppress(ClientDisconnect):
        while (await request.receive())["type"] != "http.disconnect":
            pass


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """A request that can be answered.

    Attributes:
        prompts: what the model reads, for each input.
        settings: how all of them are answered.
        is_streaming: tokens are sent as they come.
    """

    prompts: list[list[int]]
    settings: DecodingConfig
    is_streaming: bool


def read_request(body: bytes, model: Model, limits: Limits) -> GenerateRequest:
    """The request in a body.

    Raises:
        Refusal: 400; it names the field that is wrong.
    """
    values = _object(body)
    for name in values:
        if name not in FIELDS:
            raise _wrong(name[:40], f"{name!r:.40} is no field; fields are {', '.join(FIELDS)}")
    # An optional field that is null is as if it were not there.
    values = {name: value for name, value in values.items() if value is not None}
    if "inputs" not in values:
        raise _wrong("inputs", "inputs is missing; give a text, or a list of texts")
    generator = _generator(values, model, limits)
    is_streaming = values.get("stream", False)
    if not isinstance(is_streaming, bool):
        raise _wrong("stream", f"stream is {_shown(is_streaming)}; expected true or false")
    inputs = values["inputs"]
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(inputs, list):
        raise _wrong("inputs", f"inputs is {_shown(inputs)}; expected a text, or a list")
    if not 1 <= len(inputs) <= limits.max_inputs:
        expected = f"expected 1 to {limits.max_inputs}"
        raise _wrong("inputs", f"inputs has {len(inputs)} items; {expected}")
    prompts = [
        _prompt(model, limits, generator.fault, f"inputs[{i}]", item)
        for i, item in enumerate(inputs)
    ]
    return GenerateRequest(prompts, generator.decoding, is_streaming)


def _object(body: bytes) -> dict[str, Any]:
    if not body:
        raise _wrong(None, 'the body is empty; send JSON such as {"inputs": ["a text"]}')
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _wrong(None, f"the body is not UTF-8 at byte {error.start}; encode it") from None
    try:
        values = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_no_constant)
    except RecursionError:
        raise _wrong(None, "the body is nested too deeply; send one JSON object") from None
    except ValueError as error:
        raise _wrong(None, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise _wrong(None, f"the body is {_shown(values)}; expected a JSON object")
    return values


def _without_twins(pairs):
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return values


def _no_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")


def _generator(values: dict[str, Any], model: Model, limits: Limits):
    """The model's generator with the settings of a request."""
    given = {name: _number(OPTIONS[name], values[name]) for name in OPTIONS if name in values}
    settings = {"max_new_tokens": limits.default_new_tokens} | given
    most = {"max_new_tokens": limits.max_new_tokens, "beam_size": limits.max_beam_size}
    for name, number in most.items():
        if settings.get(name, 1) > number:
            raise _wrong(name, f"{name} is {_shown(settings[name])}; expected 1 to {number}")
    try:
        generator = model.generator(**settings)
    except FieldError as error:
        raise _wrong(error.field, str(error).removeprefix("DecodingConfig.")) from None
    if refused := limits.refusal(generator.decoding):
        raise _wrong(*refused)
    return generator


def _number(option: Option, value) -> int | float:
    """The value of a field; its bounds are checked by `DecodingConfig`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if option.type is int and is_whole:
        return value
    # A whole number that no float holds is out of all bounds.
    if option.type is float and (is_whole or isinstance(value, float)):
        return value if abs(value) > 2**53 else float(value)
    kind = "a whole number" if option.type is int else "a number"
    expected = f"expected {kind}, {option.range}"
    raise _wrong(option.name, f"{option.name} is {_shown(value)}; {expected}")


def _prompt(model: Model, limits: Limits, fault, name: str, item) -> list[int]:
    """What the model reads of one input, a text or a list of token ids."""

    def require_short(tokens: list[int]) -> None:
        if len(tokens) > limits.max_input_tokens:
            expected = f"expected {limits.max_input_tokens} at most"
            raise _wrong(name, f"{name} has {len(tokens)} tokens; {expected}")

    if isinstance(item, str):
        if not item.strip():
            raise _wrong(name, f"{name} is empty; give a text")
    elif not isinstance(item, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in item
    ):
        raise _wrong(name, f"{name} is {_shown(item)}; expected a text, or a list of token ids")
    else:
        require_short(item)
    try:
        (prompt,) = model.prompts([item])
    except ValueError as error:
        raise _wrong(name, f"{name} cannot be read: {str(error)[:200]}") from None
    require_short(prompt)
    if wrong := fault(prompt):
        raise _wrong(name, f"{name} {wrong}")
    return prompt


def _wrong(field: str | None, message: str) -> Refusal:
    return Refusal(400, message, field=field)


def _shown(value) -> str:
    """A value as JSON, cut where it is long."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "", type(None): ""}
    kind = kinds.get(type(value), "a number")
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**30 else "huge"
    text = text if len(text) <= 40 else f"{text[:40]}..."
    return f"{kind} ({text})" if kind else text
