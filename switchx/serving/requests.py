# SPDX-License-Identifier: Apache-2.0
"""A request's body, its JSON and its checks, or its refusal.

A client may be slow, send endlessly, or disconnect, and nothing that it sends is trusted.
The fields of a request are `inputs`, `stream`, `experts`, and the options of `DecodingConfig`.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from switchx.api import Model
from switchx.characters import CharacterError, require_characters
from switchx.fields import FieldError, Option, options
from switchx.inference.config import MAX_INT32, DecodingConfig, with_defaults
from switchx.object_store import is_nested_deeper
from switchx.serving.limits import Limits
from switchx.serving.refusals import Refusal

# Inputs decoded together are pruned together, and drafted or not: the server's choice.
_OWN = "pruning", "prompt_lookup_num_tokens"
OPTIONS = {name: each for name, each in options(DecodingConfig).items() if name not in _OWN}
FIELDS = ("inputs", "model", "stream", "experts", *OPTIONS)
MAX_STOPS = 4
# Limit on nested lists and objects: a request needs three levels.
MAX_DEPTH = 16


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body of a request.

    Raises:
        Refusal: 408, it took too long; 413, it is too big; 415, it is not declared as JSON, or
            is encoded; 400, its length is not a number.
        ClientDisconnect: the client disconnected.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            415,
            f"Content-Type is {kind or 'missing'!r:.60}; send plain JSON, with "
            "Content-Type: application/json",
        )
    if coding := request.headers.get("content-encoding"):
        message = f"Content-Encoding is {coding!r:.60}; send plain JSON, without that header"
        raise Refusal(415, message)
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise Refusal(400, f"Content-Length is {length!r:.40}; expected a number")
    parts, size = [], 0
    # What is left unread of a body is handled by the connection.
    too_big = Refusal(413, f"the body is too big; send {limits.max_body_bytes} bytes at most")
    if int(length[:20]) > limits.max_body_bytes:
        raise too_big
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                parts.append(part)
                if size > limits.max_body_bytes:
                    raise too_big
    except TimeoutError:
        raise Refusal(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s; send it at once"
        ) from None
    return b"".join(parts)


async def until_disconnected(request: Request) -> None:
    """Returns when the client has disconnected; await it only after the body was read."""
    with contextlib.suppress(ClientDisconnect):
        while (await request.receive())["type"] != "http.disconnect":
            pass


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """A request that can be answered.

    Attributes:
        prompts: token ids that the model reads; each input occurs `num_rows` times in a row,
            once for each sample.
        settings: decoding settings of all prompts.
        is_streaming: whether tokens are sent as they come.
        with_experts: whether answers say which experts their tokens chose.
        request_id: name of the request in the log.
        stops: stop strings; a text ends before the first of them.
    """

    prompts: list[list[int]]
    settings: DecodingConfig
    is_streaming: bool
    with_experts: bool = False
    request_id: str = ""
    num_rows: int = 1
    stops: Sequence[str] = ()

    @property
    def decoded(self) -> list[list[int]]:
        """The prompts that get an answer."""
        return self.prompts

    @property
    def wants_tokens(self) -> bool:
        """Whether new tokens are examined before the answer."""
        return self.is_streaming or bool(self.stops)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts[:: self.num_rows]))


def read_request(values: dict[str, Any], model: Model, limits: Limits) -> GenerateRequest:
    """The request in a body's object.

    Raises:
        Refusal: 400; it names the field that is wrong.
    """
    values = fields_of(values, FIELDS)
    if "inputs" not in values:
        raise wrong("inputs", "inputs is missing; give a text, or a list of texts")
    generator = generator_of(values, model, limits)
    is_streaming, with_experts = flag(values, "stream"), flag(values, "experts")
    if with_experts and (fault := fault_of_experts(model)):
        raise wrong("experts", f"experts is true: {fault}; leave it out")
    inputs = values["inputs"]
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(inputs, list):
        raise wrong("inputs", f"inputs is {excerpt(inputs)}; expected a text, or a list")
    settings = generator.decoding
    num_rows, most = settings.num_samples, limits.max_inputs // settings.num_samples
    if not 1 <= len(inputs) <= most:
        each = "" if num_rows == 1 else f", as each has {num_rows} samples"
        expected = f"expected 1 to {most}{each}" if most else "expected fewer samples of each"
        raise wrong("inputs", f"inputs has {len(inputs)} items; {expected}")
    if is_streaming and settings.best_of is not None:
        raise wrong("stream", "stream with best_of, which is known at the end; leave one out")
    prompts = [
        prompt_of(model, limits, generator.fault, f"inputs[{i}]", item)
        for i, item in enumerate(inputs)
    ]
    prompts = [prompt for prompt in prompts for _ in range(num_rows)]
    return GenerateRequest(
        prompts, settings, is_streaming, with_experts, num_rows=num_rows, stops=settings.stop
    )


def fault_of_experts(model: Model) -> str | None:
    """Why answers of a model cannot say which experts their tokens chose; or None."""
    config = model.config
    if config.switch is None or not config.num_sparse_layers_of("decoder"):
        return "the model's decoder has no experts"
    if config.switch.router.has_choosing_experts:
        return "the model's experts choose their tokens, those of a whole batch together"
    if model.experts is not None or model.devices.mesh is not None:
        return "the model's experts are not all on one device"
    return None


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body."""
    if not body:
        raise wrong(None, 'the body is empty; send JSON such as {"inputs": ["a text"]}')
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise wrong(None, f"the body is not UTF-8 at byte {error.start}; encode it") from None
    try:
        values = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise wrong(None, f"the body is not JSON: {str(error)[:200]}") from None
    if is_nested_deeper(values, MAX_DEPTH):
        raise _too_deep()
    if not isinstance(values, dict):
        raise wrong(None, f"the body is {excerpt(values)}; expected a JSON object")
    try:
        for name, value in values.items():
            require_characters(name, "a field's name")
            require_characters(value, name)
    except CharacterError as error:
        raise wrong(error.field[:60], str(error)) from None
    return values


def _too_deep() -> Refusal:
    return wrong(None, f"the body is nested more than {MAX_DEPTH} times; send one JSON object")


def fields_of(values: dict[str, Any], names) -> dict[str, Any]:
    """The fields of an object that are not null: null counts as absent."""
    for name in values:
        if name not in names:
            raise wrong(name[:40], f"{name!r:.40} is no field; fields are {', '.join(names)}")
    return {name: value for name, value in values.items() if value is not None}


def flag(values: dict[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise wrong(name, f"{name} is {excerpt(value)}; expected true or false")
    return value


def _without_twins(pairs):
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return values


def _no_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")


def generator_of(values: dict[str, Any], model: Model, limits: Limits):
    """The model's generator with the settings of a request.

    Samples of a request without a seed differ from those of the next request.
    """
    given = {name: value_of(OPTIONS[name], values[name]) for name in OPTIONS if name in values}
    if (number := len(given.get("stop", ()))) > MAX_STOPS:
        raise wrong("stop", f"stop has {number} items; expected {MAX_STOPS} at most")
    settings = with_defaults(limits.defaults(model.decoding), given)
    if settings.get("temperature"):
        settings = {"seed": secrets.randbelow(MAX_INT32 + 1)} | settings
    most = {"max_new_tokens": limits.max_new_tokens, "beam_size": limits.max_beam_size}
    for name, number in most.items():
        if settings.get(name, 1) > number:
            raise wrong(name, f"{name} is {excerpt(settings[name])}; expected 1 to {number}")
        if name in given and given[name] < 1:
            raise wrong(name, f"{name} is {excerpt(given[name])}; expected 1 to {number}")
    try:
        generator = model.generator(**settings)
    except FieldError as error:
        raise wrong(error.field, str(error).removeprefix("DecodingConfig.")) from None
    if refused := limits.refusal(generator.decoding):
        raise wrong(*refused)
    return generator


def value_of(option: Option, value):
    """The value of a field, which may be a list; a single text stands for a list of one."""
    if not option.is_list:
        return number_of(option, value)
    items = [value] if option.type is str and isinstance(value, str) else value
    kind = "texts" if option.type is str else "token ids"
    if not isinstance(items, list) or not all(
        isinstance(item, option.type) and not isinstance(item, bool) and item != ""
        for item in items
    ):
        one = "a text, or " if kind == "texts" else ""
        expected = f"expected {one}a list of {kind}, none of them empty"
        raise wrong(option.name, f"{option.name} is {excerpt(value)}; {expected}")
    return items


def number_of(option: Option, value) -> int | float:
    """The value of a field; its bounds are checked by `DecodingConfig`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if option.type is int and is_whole:
        return value
    # A whole number that does not fit a float is out of all bounds.
    if option.type is float and (is_whole or isinstance(value, float)):
        return value if abs(value) > 2**53 else float(value)
    kind = "a whole number" if option.type is int else "a number"
    expected = f"expected {kind}, {option.range}"
    raise wrong(option.name, f"{option.name} is {excerpt(value)}; {expected}")


class WholePrompt(list):
    """Token ids to which nothing is prepended."""


def prompt_of(model: Model, limits: Limits, fault, name: str, item) -> list[int]:
    """The token ids that the model reads for one input, a text or a list of token ids."""

    def require_short(tokens: list[int]) -> None:
        if len(tokens) > limits.max_input_tokens:
            expected = f"expected {limits.max_input_tokens} at most"
            raise wrong(name, f"{name} has {len(tokens)} tokens; {expected}")

    if isinstance(item, list) and all(type(token) is int for token in item):
        require_short(item)
    elif not isinstance(item, str):
        raise wrong(name, f"{name} is {excerpt(item)}; expected a text, or a list of token ids")
    try:
        (prompt,) = [[*item]] if isinstance(item, WholePrompt) else model.prompts([item])
    except CharacterError as error:
        raise wrong(name, str(error).replace(error.field, name, 1)) from None
    except ValueError as error:
        raise wrong(name, f"{name} cannot be read: {str(error)[:200]}") from None
    require_short(prompt)
    if fault_of_prompt := fault(prompt):
        raise wrong(name, f"{name} {fault_of_prompt}")
    return prompt


def wrong(field: str | None, message: str) -> Refusal:
    return Refusal(400, message, field=field)


def excerpt(value) -> str:
    """A value as JSON, truncated if it is long."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "", type(None): ""}
    kind = kinds.get(type(value), "a number")
    text = json.dumps(value) if not isinstance(value, int) or abs(value) < 10**30 else "huge"
    text = text if len(text) <= 40 else f"{text[:40]}..."
    return f"{kind} ({text})" if kind else text
