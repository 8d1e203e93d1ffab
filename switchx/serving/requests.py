# SPDX-License-Identifier: Apache-2.0
"""Why a request is not answered: an HTTP status and a sentence for who sent it.

The body of a request, from a client that may be slow, endless or gone.

What `POST /v1/generate` is asked for: JSON from anybody, read without trust.
"""

import asyncio
import dataclasses
import json
import math
import time
from typing import Any

from starlette.requests import ClientDisconnect, Request

from switchx.api import Model
from switchx.serving.limits import Limits


class Refusal(Exception):
    """What is wrong with a request, or why it cannot be answered now.

    Attributes:
        status: of HTTP.
        message: expected, got, and the way out.
        field: of the request's JSON that is wrong, or None.
        retry_after_s: when to try again; None says nothing.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.retry_after_s = retry_after_s

    def as_json(self) -> dict[str, Any]:
        return {"error": {"status": self.status, "field": self.field, "message": self.message}}


# What is read of a body that is too big, so that its sender gets to read why.
DISCARDED_BYTES, DISCARDING_S = 1 << 26, 2.0


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole of it.

    Raises:
        Refusal: 408, it took too long; 413, it is too big; 415, it is not said to be JSON;
            400, its length is no number.
        ClientDisconnect: the client is gone.
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
    try:
        async with asyncio.timeout(DISCARDING_S):
            while left > 0 and time.monotonic() < end_s:
                message = await request.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
                left -= len(message["body"])
    except TimeoutError:
        pass
    raise Refusal(413, f"the body is too big; send {limits.max_body_bytes} bytes at most")


async def until_gone(request: Request) -> None:
    """Returns when the client has left; to be awaited when the body is read."""
    try:
        while (await request.receive())["type"] != "http.disconnect":
            pass
    except ClientDisconnect:
        pass


FIELDS = (
    "inputs", "stream", "max_new_tokens", "beam_size", "temperature", "top_k", "top_p", "seed",
    "length_penalty",
)  # fmt: skip
# A divisor; below it logits overflow.
LEAST_TEMPERATURE = 0.01
MOST_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class AnswerSettings:
    """How answers are generated; fields of `DecodingConfig`."""

    max_new_tokens: int
    beam_size: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    length_penalty: float = 1.0


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """A request that can be answered.

    Attributes:
        prompts: what the model reads, for each input.
        is_streaming: tokens are sent as they come.
    """

    prompts: list[list[int]]
    settings: AnswerSettings
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
    settings = _settings(values, limits)
    is_streaming = values.get("stream", False)
    if not isinstance(is_streaming, bool):
        raise _wrong("stream", f"stream is {_shown(is_streaming)}; expected true or false")
    inputs = values["inputs"]
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(inputs, list):
        raise _wrong("inputs", f"inputs is {_shown(inputs)}; expected a text, or a list")
    if not 1 <= len(inputs) <= limits.max_inputs:
        raise _wrong(
            "inputs", f"inputs has {len(inputs)} items; expected 1 to {limits.max_inputs}"
        )
    # Read once for all: what a model refuses depends on how much it is to write.
    fault = model.generator(**dataclasses.asdict(settings)).fault
    prompts = [
        _prompt(model, limits, fault, f"inputs[{i}]", item) for i, item in enumerate(inputs)
    ]
    return GenerateRequest(prompts, settings, is_streaming)


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


def _settings(values: dict[str, Any], limits: Limits) -> AnswerSettings:
    wanted = {
        "max_new_tokens": _whole(
            values, "max_new_tokens", limits.default_new_tokens, 1, limits.max_new_tokens
        ),
        "beam_size": _whole(values, "beam_size", 1, 1, limits.max_beam_size),
        "temperature": _real(values, "temperature", 0.0, 0, 100),
        "top_k": _whole(values, "top_k", None, 1, MOST_SEED),
        "top_p": _real(values, "top_p", None, 0, 1),
        "seed": _whole(values, "seed", 0, 0, MOST_SEED),
        "length_penalty": _real(values, "length_penalty", 1.0, -10, 10),
    }
    temperature, top_p = wanted["temperature"], wanted["top_p"]
    if 0 < temperature < LEAST_TEMPERATURE:
        raise _wrong(
            "temperature",
            f"temperature is {temperature}; expected 0 for the likeliest token, or "
            f"{LEAST_TEMPERATURE} to 100",
        )
    if top_p == 0:
        raise _wrong("top_p", "top_p is 0; expected more than 0, up to 1")
    if temperature > 0 and wanted["beam_size"] > 1:
        raise _wrong("beam_size", "beam_size with a temperature; expected one of both")
    for name in ("top_k", "top_p"):
        if wanted[name] is not None and temperature == 0:
            raise _wrong(name, f"{name} without a temperature, so nothing is drawn; set one")
    return AnswerSettings(**wanted)


def _whole(values, name: str, default, low: int, high: int):
    value = values.get(name, default)
    if name not in values:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(
            name, f"{name} is {_shown(value)}; expected a whole number, {low} to {high}"
        )
    return value


def _real(values, name: str, default, low: float, high: float):
    value = values.get(name, default)
    if name not in values:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(_float(value)) or not low <= value <= high:
        raise _wrong(name, f"{name} is {_shown(value)}; expected a number, {low} to {high}")
    return float(value)


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _prompt(model: Model, limits: Limits, fault, name: str, item) -> list[int]:
    """What the model reads of one input, a text or a list of token ids."""
    if isinstance(item, str):
        if not item.strip():
            raise _wrong(name, f"{name} is empty; give a text")
    elif not isinstance(item, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in item
    ):
        raise _wrong(name, f"{name} is {_shown(item)}; expected a text, or a list of token ids")
    elif len(item) > limits.max_input_tokens:
        raise _too_long(name, len(item), limits)
    try:
        (prompt,) = model.prompts([item])
    except ValueError as error:
        raise _wrong(name, f"{name} cannot be read: {str(error)[:200]}") from None
    if len(prompt) > limits.max_input_tokens:
        raise _too_long(name, len(prompt), limits)
    if wrong := fault(prompt):
        raise _wrong(name, f"{name} {wrong}")
    return prompt


def _too_long(name: str, length: int, limits: Limits) -> Refusal:
    return _wrong(
        name, f"{name} has {length} tokens; expected {limits.max_input_tokens} at most"
    )


def _wrong(field: str | None, message: str) -> Refusal:
    return Refusal(400, message, field=field)


def _shown(value) -> str:
    """A value as JSON, cut where it is long."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "", type(None): ""}
    kind = kinds.get(type(value), "a number")
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**30 else "huge"
    text = text if len(text) <= 40 else f"{text[:40]}..."
    return f"{kind} ({text})" if kind else text
