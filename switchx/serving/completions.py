# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions` and `/v1/models` as OpenAI's clients ask (its API reference, Completions).

What the server has no means for is refused by name, never read over. Beside OpenAI's fields
there are three of `/v1/generate`: `top_k`, `beam_size`, `length_penalty`. A completion is what
`/v1/generate` gives with the same settings; its defaults are OpenAI's: 16 tokens, sampled at
temperature 1.
"""

import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from switchx.api import Model
from switchx.serving.answers import GrowingText, encoded, tokens_of
from switchx.serving.limits import Limits
from switchx.serving.request_queue import Answer, Event
from switchx.serving.requests import (
    OPTIONS,
    GenerateRequest,
    Refusal,
    fields_of,
    flag,
    generator_of,
    number_of,
    prompt_of,
    shown,
    wrong,
)
from switchx.serving.service import Events

DEFAULT_TOKENS, MAX_STOPS = 16, 4
OWN_FIELDS = ("top_k", "beam_size", "length_penalty")
# A field, its values that ask for nothing, and what to do instead of another one.
UNSUPPORTED = {
    "logprobs": ((), "there are no log-probabilities of tokens; a `score` of /v1/generate is "
                     "that of a whole answer"),
    "suffix": (("",), "texts are not completed in their middle; leave it out"),
    "best_of": ((1,), "no samples are dropped; ask for n of them"),
    "presence_penalty": ((0,), "tokens have no penalties; leave it out"),
    "frequency_penalty": ((0,), "tokens have no penalties; leave it out"),
    "logit_bias": (({},), "logits have no biases; leave it out"),
}  # fmt: skip
FIELDS = (
    "model", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream",
    "stream_options", "echo", "user", *UNSUPPORTED, *OWN_FIELDS,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CompletionRequest(GenerateRequest):
    """A request whose inputs are its prompts, each `num_choices` times in a row.

    Attributes:
        stops: a text ends before the first of these.
        echoes: what stands before each text: the prompt, or nothing.
        has_usage: a stream ends with counts of tokens.
        created: seconds of the epoch.
    """

    stops: Sequence[str] = ()
    echoes: Sequence[str] = ()
    num_choices: int = 1
    has_usage: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def wants_tokens(self) -> bool:
        return self.is_streaming or bool(self.stops)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts[:: self.num_choices]))


class CompletionForm:
    """How `/v1/completions` is asked and answered.

    Args:
        name: that clients call the model by.
    """

    def __init__(self, model: Model, name: str):
        self._model, self._name = model, name

    def read(self, values: dict[str, Any], limits: Limits) -> CompletionRequest:
        """The request in a body's object.

        Raises:
            Refusal: 400, it names the field that is wrong.
        """
        if self._model.vocabulary is None:
            raise wrong(None, "the model came without a vocabulary; use /v1/generate")
        values = fields_of(values, FIELDS)
        num_choices = _count(values, "n", 1, limits.max_inputs)
        for name, (neutral, way_out) in UNSUPPORTED.items():
            value = values.get(name)
            is_neutral = any(value == each for each in neutral) or value is None
            if not is_neutral and (name, value) != ("best_of", num_choices):
                raise wrong(name, f"{name} is {shown(value)}; {way_out}")
        if not isinstance(values.get("user", ""), str):
            raise wrong("user", f"user is {shown(values['user'])}; expected a text")
        generator = generator_of(_settings(values, limits), self._model, limits)
        stops, is_streaming = _stops(values), flag(values, "stream")
        if stops and generator.decoding.beam_size > 1:
            raise wrong("stop", "stop with beam_size above 1; a search is not stopped by texts")
        texts = _prompts(values, limits.max_inputs // num_choices)
        prompts = [
            prompt_of(self._model, limits, generator.fault, f"prompt[{i}]", text)
            for i, text in enumerate(texts)
        ]
        has_echo = flag(values, "echo")
        echoes = [self._text(text) if has_echo else "" for text in texts]
        return CompletionRequest(
            [prompt for prompt in prompts for _ in range(num_choices)],
            generator.decoding,
            is_streaming,
            stops=stops,
            echoes=[echo for echo in echoes for _ in range(num_choices)],
            num_choices=num_choices,
            has_usage=_has_usage(values, is_streaming),
        )

    async def whole(self, wanted: CompletionRequest, events: Events) -> dict[str, Any]:
        """All choices in one object."""
        choices = self._choices(wanted)
        async for event in events:
            choices[event.number].grow(event, events)
        return self._json(
            wanted,
            [
                choice.json(i, wanted.echoes[i] + choice.text)
                for i, choice in enumerate(choices)
            ],
        ) | {"usage": _usage_json(wanted, events)}

    async def stream(self, wanted: CompletionRequest, events: Events) -> AsyncIterator[bytes]:
        """A chunk for each piece of a text, its end with the last one; then `[DONE]`."""
        choices = self._choices(wanted)
        # OpenAI's form: null in all chunks but the last one, where `include_usage` asks for it.
        usage = {"usage": None} if wanted.has_usage else {}
        try:
            for i, echo in enumerate(wanted.echoes):
                if echo:
                    yield _data(self._json(wanted, [choices[i].json(i, echo)]) | usage)
            async for event in events:
                choice = choices[event.number]
                if (new := choice.grow(event, events)) or choice.finish_reason:
                    yield _data(self._json(wanted, [choice.json(event.number, new)]) | usage)
            if wanted.has_usage:
                yield _data(self._json(wanted, []) | {"usage": _usage_json(wanted, events)})
        except Refusal as refusal:
            yield _data(refusal.as_json())
        yield b"data: [DONE]\n\n"

    def _choices(self, wanted: CompletionRequest) -> list["_Choice"]:
        return [
            _Choice(GrowingText(self._model.vocabulary, wanted.stops)) for _ in wanted.prompts
        ]

    def _json(self, wanted: CompletionRequest, choices: list) -> dict[str, Any]:
        return {
            "id": f"cmpl-{wanted.request_id}",
            "object": "text_completion",
            "created": wanted.created,
            "model": self._name,
            "choices": choices,
        }

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._model.vocabulary.decode(prompt)


@dataclasses.dataclass
class _Choice:
    """One completion while it grows; `finish_reason` is None until its end."""

    growing: GrowingText
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return self.growing.text

    def grow(self, event: Event, events: Events) -> str:
        """The new piece of its text; a stop string ends the decoding."""
        tokens, is_last = tokens_of(event), isinstance(event, Answer)
        new = self.growing.grow(tokens, is_last=is_last)
        if self.growing.is_stopped:
            self.finish_reason = "stop"
            events.stop(event.number, self.growing.num_tokens(tokens))
        elif is_last:
            self.finish_reason = "stop" if event.hypothesis.is_finished else "length"
        return new

    def json(self, index: int, text: str) -> dict[str, Any]:
        end = self.finish_reason
        return {"index": index, "text": text, "logprobs": None, "finish_reason": end}


def _data(content: Any) -> bytes:
    return b"data: " + encoded(content) + b"\n\n"


def _usage_json(wanted: CompletionRequest, events: Events) -> dict[str, int]:
    read, written = wanted.num_prompt_tokens, events.num_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _count(values: dict[str, Any], name: str, default: int, most: int) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        expected = f"expected a whole number, 1 to {most}"
        raise wrong(name, f"{name} is {shown(value)}; {expected}")
    return value


def _settings(values: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """OpenAI's fields as those of `/v1/generate`."""
    given = {name: values[name] for name in OPTIONS if name in values}
    for name in given:
        number_of(OPTIONS[name], given[name])
    is_search = given.get("beam_size", 1) > 1
    given.setdefault("temperature", 0.0 if is_search else 1.0)
    # Of one token, the likeliest, none is cut off, whatever the probability is.
    for name in ("top_k", "top_p"):
        if given["temperature"] == 0 or (name == "top_p" and given.get(name) == 1):
            given.pop(name, None)
    most = limits.max_new_tokens
    return given | {
        "max_new_tokens": _count(values, "max_tokens", min(DEFAULT_TOKENS, most), most)
    }


def _prompts(values: dict[str, Any], most: int) -> list[str | list[int]]:
    """The prompts of a request: a text or token ids, or a list of such."""
    prompt = values.get("prompt")
    if prompt is None:
        raise wrong("prompt", "prompt is missing; give a text, or a list of texts")
    is_one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)
    )
    prompts = [prompt] if is_one else prompt
    if not isinstance(prompts, list):
        raise wrong("prompt", f"prompt is {shown(prompt)}; expected a text, or a list")
    if not 1 <= len(prompts) <= most:
        raise wrong("prompt", f"prompt has {len(prompts)} items; expected 1 to {most}, over n")
    return prompts


def _stops(values: dict[str, Any]) -> tuple[str, ...]:
    stop = values.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise wrong("stop", f"stop is {shown(stop)}; expected a text, or a list of texts")
    if len(stops) > MAX_STOPS:
        raise wrong("stop", f"stop has {len(stops)} items; expected {MAX_STOPS} at most")
    return tuple(stops)


def _has_usage(values: dict[str, Any], is_streaming: bool) -> bool:
    asked = values.get("stream_options")
    if asked is None:
        return False
    if not isinstance(asked, dict) or not is_streaming:
        raise wrong(
            "stream_options", "stream_options is for streams; give an object with stream"
        )
    return flag(fields_of(asked, ("include_usage",)), "include_usage")
