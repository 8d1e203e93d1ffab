# SPDX-License-Identifier: Apache-2.0
"""`/v1/completions` and `/v1/models` as OpenAI's clients ask (its API reference, Completions).

What the server does not support is refused by name, never ignored. Besides OpenAI's fields
there are those of `/v1/generate` in `OWN_FIELDS`. A completion is what `/v1/generate` gives
with the same settings, written as the continuation of its prompt; its defaults are OpenAI's:
16 tokens, sampled at temperature 1.
"""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from typing import Any

from starlette.concurrency import run_in_threadpool

from switchx.api import Model
from switchx.data.tokenizers import Vocabulary
from switchx.inference.config import LEAST_TEMPERATURE, MAX_INT32
from switchx.inference.generate import text_of
from switchx.inference.running_batch import Hypothesis
from switchx.inference.score import Score
from switchx.inference.stop_strings import StopStrings
from switchx.serving.answers import (
    Behind,
    GrowingAnswer,
    encoded,
    joined_logprobs,
    logprobs_json,
    reason_of,
)
from switchx.serving.limits import Limits
from switchx.serving.refusals import Refusal
from switchx.serving.requests import (
    MAX_STOPS,
    OPTIONS,
    GenerateRequest,
    excerpt,
    fields_of,
    flag,
    generator_of,
    prompt_of,
    value_of,
    wrong,
)
from switchx.serving.service import Events

DEFAULT_TOKENS = 16
# Sizes of chunks with an `obfuscation` are multiples of this.
CHUNK_BYTES = 64
OWN_FIELDS = (
    "top_k",
    "beam_size",
    "length_penalty",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "forced_prefix",
)
# A field, its values that ask for nothing, and what to do instead of giving another value.
UNSUPPORTED = {
    "suffix": (("",), "texts are not completed in their middle; leave it out"),
    "presence_penalty": ((0,), "use repetition_penalty, which divides logits; leave it out"),
    "frequency_penalty": ((0,), "use repetition_penalty, which divides logits; leave it out"),
    "logit_bias": (({},), "logits have no biases; leave it out"),
}
FIELDS = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "best_of",
    "stop",
    "logprobs",
    "seed",
    "stream",
    "stream_options",
    "echo",
    "user",
    *UNSUPPORTED,
    *OWN_FIELDS,
)


@dataclasses.dataclass(frozen=True)
class CompletionRequest(GenerateRequest):
    """A request whose inputs are its prompts.

    Attributes:
        echoes: text in front of the completions of each prompt: the prompt, or empty.
        scored: prompts whose tokens also get log-probabilities; without a start token.
        num_choices: completions of each prompt, the best of `num_rows` if those are more.
        logprobs: number of top tokens beside each token; None gives no log-probabilities.
        has_usage: whether a stream ends with counts of tokens.
        is_padded: whether chunks of a stream have an `obfuscation`, which hides their sizes.
        is_empty: whether `max_tokens` is 0: nothing is decoded, prompts may be echoed and
            scored.
        created: time of the request in seconds since the epoch.
    """

    echoes: Sequence[str] = ()
    scored: Sequence[list[int]] = ()
    num_choices: int = 1
    logprobs: int | None = None
    has_usage: bool = False
    is_padded: bool = False
    is_empty: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def decoded(self) -> list[list[int]]:
        return [] if self.is_empty else self.prompts


class CompletionForm:
    """The form of the requests and answers of `/v1/completions`.

    Args:
        name: the model's name in requests.
        batch_size: maximum number of prompts that are scored at once.
        reader: executor with one thread, which scores the prompts.
    """

    def __init__(self, model: Model, name: str, batch_size: int, reader: Executor):
        self._model, self._name = model, name
        self._batch_size, self._reader = batch_size, reader

    def read(self, values: dict[str, Any], limits: Limits) -> CompletionRequest:
        """The request in a body's object.

        Raises:
            Refusal: 400, it names the field that is wrong.
        """
        if self._model.vocabulary is None:
            raise wrong(None, "the model came without a vocabulary; use /v1/generate")
        values = fields_of(values, FIELDS)
        try:
            return self._read(values, limits)
        except Refusal as refusal:  # in the terms of these routes
            message = refusal.message.replace("max_new_tokens", "max_tokens")
            raise dataclasses.replace(refusal, message=message) from None

    def _read(self, values: dict[str, Any], limits: Limits) -> CompletionRequest:
        for name, (neutral, way_out) in UNSUPPORTED.items():
            value = values.get(name)
            if value is not None and not any(value == each for each in neutral):
                raise wrong(name, f"{name} is {excerpt(value)}; {way_out}")
        if not isinstance(values.get("user", ""), str):
            raise wrong("user", f"user is {excerpt(values['user'])}; expected a text")
        is_streaming, has_echo = flag(values, "stream"), flag(values, "echo")
        settings = _settings(values, limits)
        is_search = settings.get("beam_size", 1) > 1
        stops = tuple(_stops(values, () if is_search else self._model.decoding.get("stop", ())))
        num_choices, num_rows = _numbers(values, limits.max_inputs, is_streaming=is_streaming)
        if is_search:
            if stops:
                what = f"stop is {excerpt(list(stops))} with beam_size above 1; a search is not"
                raise wrong("stop", f"{what} stopped by texts: leave it out")
            num_rows, settings["num_return_sequences"] = 1, num_choices
        elif num_rows > num_choices and stops:
            settings.setdefault("logprobs", 0)  # needed for the scores that are compared
        generator = generator_of(settings, self._model, limits)
        texts = _prompts(values, limits.max_inputs // num_rows)
        prompts = [
            prompt_of(self._model, limits, generator.fault, f"prompt[{i}]", text)
            for i, text in enumerate(texts)
        ]
        logprobs = values.get("logprobs")
        scored = []
        if has_echo and logprobs is not None:
            self._require_scores()
            scored = list(map(self._model.without_start, prompts))
        return CompletionRequest(
            [prompt for prompt in prompts for _ in range(num_rows)],
            generator.decoding,
            is_streaming,
            num_rows=num_rows,
            stops=stops,
            echoes=[self._text(text) if has_echo else "" for text in texts],
            scored=scored,
            num_choices=num_choices,
            logprobs=logprobs,
            has_usage=_stream_option(values, "include_usage", is_streaming),
            is_padded=_stream_option(values, "include_obfuscation", is_streaming),
            is_empty=values.get("max_tokens") == 0,
        )

    async def whole(self, wanted: CompletionRequest, events: Events) -> dict[str, Any]:
        """All choices in one object."""
        rows = self._rows(wanted)
        scored = await self._scored(wanted, events)
        async for event in events:
            rows[event.number].grow(event, events)
        # Off the event loop: texts of single tokens take a while.
        choices = await run_in_threadpool(self._choices, wanted, rows, scored)
        return self._json(wanted, choices) | {"usage": _usage_json(wanted, events)}

    def _choices(self, wanted: CompletionRequest, rows, scored) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        for number, (echo, echoed) in enumerate(zip(wanted.echoes, scored, strict=True)):
            if wanted.is_empty:
                kept = echoed and joined_logprobs(echoed, None)
                for _ in range(wanted.num_choices):
                    choices.append(_choice(len(choices), echo, kept, "length"))
                continue
            first = number * wanted.num_rows
            found = sum((row.hypotheses for row in rows[first : first + wanted.num_rows]), [])
            vocabulary = rows[first].vocabulary
            stops = StopStrings(vocabulary, wanted.stops) if wanted.stops else None
            if wanted.num_rows > wanted.num_choices:
                found.sort(key=lambda each: -each.score)
            for i, each in enumerate(found[: wanted.num_choices]):
                text = echo + text_of(each, vocabulary, stops)
                kept = _logprobs(wanted, vocabulary, each, len(echo), echoed)
                index = number * wanted.num_choices + i  # a search may find fewer
                choices.append(_choice(index, text, kept, reason_of(each)))
        return choices

    async def stream(self, wanted: CompletionRequest, events: Events) -> AsyncIterator[bytes]:
        """A chunk for each piece of a text, its end with the last one; then `[DONE]`."""
        rows, num_choices = self._rows(wanted), wanted.num_choices
        # OpenAI's form: null in all chunks except the last, if `include_usage` asks for it.
        usage = {"usage": None} if wanted.has_usage else {}

        def chunk(*choice) -> bytes:
            content = self._json(wanted, [_choice(*choice)]) | usage
            return data_of(padded(content) if wanted.is_padded else content)

        try:
            scored = await self._scored(wanted, events)
            for i, echo in enumerate(wanted.echoes):
                kept = scored[i] and joined_logprobs(scored[i], None)
                reason = "length" if wanted.is_empty else None
                for choice in range(num_choices) if echo or wanted.is_empty else ():
                    yield chunk(i * num_choices + choice, echo, kept, reason)
            async for event in events:
                row, echo = rows[event.number], wanted.echoes[event.number // wanted.num_rows]
                first, (added, new) = row.num_tokens, row.grow(event, events)
                if wanted.settings.beam_size > 1:
                    for i, each in enumerate(row.hypotheses):
                        text = text_of(each, row.vocabulary, None)
                        kept = _logprobs(wanted, row.vocabulary, each, len(echo))
                        index = event.number * num_choices + i
                        yield chunk(index, text, kept, reason_of(each))
                elif new or row.hypotheses or (wanted.logprobs is not None and added.tokens):
                    kept = _logprobs(
                        wanted, row.vocabulary, row.hypothesis, len(echo), first=first
                    )
                    reason = reason_of(row.hypothesis) if row.hypotheses else None
                    yield chunk(event.number, new, kept, reason)
            if wanted.has_usage:
                yield data_of(self._json(wanted, []) | {"usage": _usage_json(wanted, events)})
        except Refusal as refusal:
            yield data_of(refusal.as_json())
        yield b"data: [DONE]\n\n"

    def _rows(self, wanted: CompletionRequest) -> list[GrowingAnswer]:
        return [GrowingAnswer(self._behind(prompt), wanted) for prompt in wanted.prompts]

    def _behind(self, prompt: list[int]) -> Vocabulary | Behind:
        """The decoder of the answer to a prompt: its text follows the prompt's, except in an
        encoder-decoder, where it is a text of its own."""
        vocabulary = self._model.vocabulary
        is_apart = self._model.config.is_encoder_decoder
        return vocabulary if is_apart else Behind(vocabulary, prompt)

    def _require_scores(self) -> None:
        """Raises Refusal if tokens of a prompt have no log-probabilities."""
        model, why = self._model, None
        if model.config.is_encoder_decoder:
            why = "this model's encoder reads the prompt, and predicts no token of it"
        elif model.text_format.is_prompt_bidirectional:
            why = "this model's prompts see themselves whole, so no token of one is predicted"
        elif model.experts is not None:
            why = "this server has experts outside of the device, which answers move alone"
        if why is not None:
            raise wrong("logprobs", f"logprobs with echo: {why}; leave one of the two out")

    async def _scored(self, wanted: CompletionRequest, events: Events) -> list[dict | None]:
        """Returns the log-probabilities of each prompt's tokens, or None."""
        if not wanted.scored:
            return [None] * len(wanted.echoes)
        scorer = self._model.scorer(batch_size=self._batch_size, logprobs=wanted.logprobs)
        # An empty prompt has no predicted token, nor has a first token without a start.
        least = 1 if self._model.ids.start_id is not None else 2
        numbers = [i for i, tokens in enumerate(wanted.scored) if len(tokens) >= least]
        found = scorer([([], wanted.scored[number]) for number in numbers])
        scores = {i: Score(0.0, 0, [None] * len(x)) for i, x in enumerate(wanted.scored)}
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(events.deadline_s):
                # One batch at a time: others go in between, and none begins after the deadline.
                while pair := await loop.run_in_executor(self._reader, next, found, None):
                    scores[numbers[pair[0]]] = pair[1]
        except TimeoutError:
            message = "the prompts were not scored in time; ask for less, or later"
            raise Refusal(504, message) from None
        return await run_in_threadpool(
            lambda: [
                logprobs_json(self._model.vocabulary, tokens, scores[number], wanted.logprobs)
                for number, tokens in enumerate(wanted.scored)
            ]
        )

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


def _logprobs(
    wanted: CompletionRequest, vocabulary, output: Hypothesis, offset: int, echoed=None, first=0
):
    """OpenAI's `logprobs` of a choice, from its token `first` on; or None.

    Args:
        vocabulary: decoder of its tokens.
        offset: offset of the answer in the text.
        echoed: the prompt's `logprobs`, or None.
    """
    if wanted.logprobs is None:
        return None
    kept = logprobs_json(vocabulary, output.tokens, output, wanted.logprobs, offset, first)
    return joined_logprobs(echoed, kept)


def _choice(index: int, text: str, logprobs: dict | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def data_of(content: Any) -> bytes:
    return b"data: " + encoded(content) + b"\n\n"


def padded(content: dict[str, Any]) -> dict[str, Any]:
    """A copy with an `obfuscation` that makes all chunks of a size class equally long."""
    missing = -len(encoded(content)) % CHUNK_BYTES
    return content | {"obfuscation": secrets.token_hex(CHUNK_BYTES)[:missing]}


def _usage_json(wanted: CompletionRequest, events: Events) -> dict[str, int]:
    read, written = wanted.num_prompt_tokens, events.num_tokens
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _count(
    values: dict[str, Any], name: str, default: int, most: int, *, least: int = 1
) -> int:
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        expected = f"expected a whole number, {least} to {most}"
        raise wrong(name, f"{name} is {excerpt(value)}; {expected}")
    return value


def _settings(values: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """OpenAI's fields as those of `/v1/generate`."""
    own = OPTIONS.keys() - {"stop", "best_of"}
    given = {name: value_of(OPTIONS[name], values[name]) for name in own if name in values}
    is_search = given.get("beam_size", 1) > 1
    given.setdefault("temperature", 0.0 if is_search else 1.0)
    if 0 < given["temperature"] < LEAST_TEMPERATURE:
        given["temperature"] = 0.0  # equivalent: only the most likely token is ever drawn
    if "seed" in given:
        given["seed"] %= MAX_INT32 + 1  # clients draw 64 bits, also negative ones
    # The most likely token is never cut off, so these have no effect at temperature 0.
    for name in ("top_k", "top_p"):
        if given["temperature"] == 0 or (name == "top_p" and given.get(name) == 1):
            value = given.pop(name, None)
            if value is not None and not OPTIONS[name].allows(value):
                raise wrong(name, f"{name} is {excerpt(value)}; use {OPTIONS[name].range}")
    most = limits.max_new_tokens
    number = _count(values, "max_tokens", min(DEFAULT_TOKENS, most), most, least=0)
    return given | {"max_new_tokens": max(1, number), "stop": []}


def _numbers(values: dict[str, Any], most: int, *, is_streaming: bool) -> tuple[int, int]:
    """The number of choices of each prompt, and how many there are to choose from."""
    number = _count(values, "n", 1, most)
    beams = values.get("beam_size", 1)
    is_search = isinstance(beams, int) and beams > 1
    if is_search and number > beams:
        raise wrong("n", f"n is {number} with beam_size={beams}; expected 1 to {beams}")
    best_of = _count(values, "best_of", number, most)
    if best_of == number:
        return number, number
    way_out = None
    if best_of < number:
        way_out = f"expected n={number} or more"
    elif is_search or values.get("temperature") == 0:
        way_out = (
            "it chooses among samples; leave it out, or leave out temperature and beam_size"
        )
    elif is_streaming:
        way_out = "the best are known at the end; leave out stream"
    if way_out:
        raise wrong("best_of", f"best_of is {best_of}; {way_out}")
    return number, best_of


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
        raise wrong("prompt", f"prompt is {excerpt(prompt)}; expected a text, or a list")
    if not 1 <= len(prompts) <= most:
        raise wrong("prompt", f"prompt has {len(prompts)} items; expected 1 to {most}, over n")
    return prompts


def _stops(values: dict[str, Any], own: Sequence[str]) -> list[str]:
    """Texts that stop an answer; the model's `own` if the request says nothing."""
    stops = value_of(OPTIONS["stop"], values.get("stop", list(own)))
    if len(stops) > MAX_STOPS:
        raise wrong("stop", f"stop has {len(stops)} items; expected {MAX_STOPS} at most")
    return stops


def _stream_option(values: dict[str, Any], name: str, is_streaming: bool) -> bool:
    asked = values.get("stream_options")
    if asked is None:
        return False
    if not isinstance(asked, dict) or not is_streaming:
        raise wrong(
            "stream_options", "stream_options is for streams; give an object with stream"
        )
    return flag(fields_of(asked, ("include_usage", "include_obfuscation")), name)
