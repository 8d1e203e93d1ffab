# SPDX-License-Identifier: Apache-2.0
"""What is sent: JSON, server-sent events, texts in pieces, and the answers of `/v1/generate`.

An answer is sent whole, or streamed as server-sent events (https://html.spec.whatwg.org,
section 9.2): `tokens` for new ones, `answer` for what an input got, `done` at the end, `error`
instead of it. A search has no tokens before its end, so it sends answers alone.
"""

import bisect
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette import responses

from switchx.api import Model
from switchx.data.tokenizers import Vocabulary
from switchx.serving.limits import Limits
from switchx.serving.request_queue import Answer, Event
from switchx.serving.requests import GenerateRequest, Refusal, read_request
from switchx.serving.service import Events

# What a vocabulary writes for bytes that are no character yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


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


class GrowingText:
    """The text of an answer while it grows, up to the first of some strings that stop it.

    What is given out is never taken back: half a character is kept, and so is the beginning of
    a stop string, until it is clear what they are. Where a later token changes the text of
    earlier ones, nothing further is given out.

    Attributes:
        text: all that was given out.
        is_stopped: a stop string came; the text ends before it.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()):
        self._vocabulary, self._stops = vocabulary, stops
        self.text, self.is_stopped = "", False

    def grow(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """What is new in all tokens so far."""
        text = self._decoded(tokens, is_last=is_last)
        place = self._place_of_stop(text)
        if place is not None:
            self.is_stopped, text = True, text[:place]
        elif not is_last:
            text = text[: len(text) - self._num_kept(text)]
        if not text.startswith(self.text):
            return ""
        new, self.text = text[len(self.text) :], text
        return new

    def num_tokens(self, tokens: Sequence[int]) -> int:
        """Tokens up to the one that ended the stop string, or all."""
        if not self.is_stopped:
            return len(tokens)

        def has_stop(number: int) -> bool:
            text = self._decoded(tokens[:number], is_last=number == len(tokens))
            return self._place_of_stop(text) is not None

        return bisect.bisect_left(range(len(tokens)), True, key=has_stop)

    def _decoded(self, tokens: Sequence[int], *, is_last: bool) -> str:
        text = self._vocabulary.decode(list(tokens))
        return text if is_last else text.rstrip(INCOMPLETE)

    def _place_of_stop(self, text: str) -> int | None:
        places = [text.find(stop) for stop in self._stops]
        return min((place for place in places if place >= 0), default=None)

    def _num_kept(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        lengths = range(max(map(len, self._stops), default=1) - 1, 0, -1)
        for length in lengths:
            end = text[-length:]
            if len(end) == length and any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """An input's answer in pieces: which tokens and which characters are new."""

    def __init__(self, vocabulary: Vocabulary | None):
        self._text = vocabulary and GrowingText(vocabulary)
        self._num_tokens = 0

    def piece(self, tokens: Sequence[int], *, is_last: bool = False) -> dict | None:
        """What is new in all tokens so far, `tokens` and `text`; None where nothing is."""
        new_tokens = list(tokens[self._num_tokens :])
        self._num_tokens = max(self._num_tokens, len(tokens))
        text = self._text and self._text.grow(tokens, is_last=is_last)
        return {"tokens": new_tokens, "text": text} if new_tokens or text else None


class GenerateForm:
    """How `/v1/generate` is asked and answered."""

    def __init__(self, model: Model):
        self._model = model

    def read(self, values: dict[str, Any], limits: Limits) -> GenerateRequest:
        return read_request(values, self._model, limits)

    async def whole(self, wanted: GenerateRequest, events: Events) -> dict[str, Any]:
        """All answers in one object."""
        answers = [event async for event in events if isinstance(event, Answer)]
        answers.sort(key=lambda answer: answer.number)
        results = [_answer_json(self._model, answer) for answer in answers]
        return {"results": results, "usage": _usage_json(wanted, answers)}

    async def stream(self, wanted: GenerateRequest, events: Events) -> AsyncIterator[bytes]:
        streams = [TextStream(self._model.vocabulary) for _ in wanted.prompts]
        is_search, answers = wanted.settings.beam_size > 1, []
        try:
            async for event in events:
                is_last, which = isinstance(event, Answer), {"input": event.number}
                piece = streams[event.number].piece(tokens_of(event), is_last=is_last)
                if piece and not is_search:
                    yield _event_bytes("tokens", which | piece)
                if is_last:
                    answers.append(event)
                    yield _event_bytes("answer", which | _answer_json(self._model, event))
            yield _event_bytes("done", {"usage": _usage_json(wanted, answers)})
        except Refusal as refusal:
            yield _event_bytes("error", refusal.as_json())


def tokens_of(event: Event) -> list[int]:
    """All tokens of an input's answer so far."""
    return event.hypothesis.tokens if isinstance(event, Answer) else event.tokens


def _event_bytes(name: str, content: Any) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encoded(content) + b"\n\n"


def _answer_json(model: Model, answer: Answer) -> dict[str, Any]:
    values = dataclasses.asdict(answer.hypothesis)
    vocabulary = model.vocabulary
    return {"text": vocabulary and vocabulary.decode(values["tokens"])} | values


def _usage_json(wanted: GenerateRequest, answers: list[Answer]) -> dict[str, int]:
    return {
        "prompt_tokens": sum(map(len, wanted.prompts)),
        "generation_tokens": sum(len(answer.hypothesis.tokens) for answer in answers),
    }
