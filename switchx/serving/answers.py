# SPDX-License-Identifier: Apache-2.0
"""What is sent: JSON, server-sent events, texts in pieces, and the answers of `/v1/generate`.

An answer is sent whole, or streamed as server-sent events (https://html.spec.whatwg.org,
section 9.2): `tokens` for new tokens, `answer` for an input's answer, `done` at the end, or
`error` in its place. A search has no tokens before its end, so it only sends answers.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette import responses

from switchx.api import Model
from switchx.data.tokenizers import UNKNOWN, Vocabulary
from switchx.inference.generate import text_of
from switchx.inference.running_batch import Hypothesis
from switchx.inference.stop_strings import INCOMPLETE, StopStrings
from switchx.serving.limits import Limits
from switchx.serving.refusals import Refusal
from switchx.serving.request_queue import Answer, Event
from switchx.serving.requests import GenerateRequest, read_request
from switchx.serving.service import Events

# Tokens after which the text of the next one is read; a character has at most four bytes.
CONTEXT = 8


def encoded(content: Any) -> bytes:
    """JSON in UTF-8, with half of a surrogate pair as its escape.

    Raises:
        ValueError: the content has an infinity or a NaN.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    # What cannot be encoded occurs only in texts, where a backslash escapes it.
    return text.encode("utf-8", errors="backslashreplace")


class JSONResponse(responses.JSONResponse):
    def render(self, content: Any) -> bytes:
        return encoded(content) + b"\n"


@dataclasses.dataclass(frozen=True)
class Behind:
    """Texts of tokens that follow a prompt's: decoders of Llama 2 and Mixtral strip a text's
    leading space, but here no text begins."""

    vocabulary: Vocabulary
    prompt: Sequence[int]

    def decode(self, ids: Sequence[int]) -> str:
        context = self.prompt[-CONTEXT:]
        read, text = (self.vocabulary.decode(some) for some in (context, [*context, *ids]))
        return text[len(os.path.commonprefix([read, text])) :]


class GrowingText:
    """The text of an answer while it grows, up to the first of its stop strings.

    What was given out is never taken back: half a character or the beginning of a stop string
    is held back until it is clear what it is. If a later token changes the text of earlier
    ones, nothing further is given out.

    Attributes:
        text: all text that was given out.
        is_stopped: whether a stop string occurred; the text ends before it.
    """

    def __init__(self, vocabulary: Vocabulary | Behind, stops: Sequence[str] = ()):
        self._stops = StopStrings(vocabulary, stops)
        self.text, self.is_stopped = "", False

    def grow(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """The new text, given all tokens so far."""
        text = self._stops.decoded(tokens, is_last=is_last)
        place = self._stops.place(text)
        if place is not None:
            self.is_stopped, text = True, text[:place]
        elif not is_last:
            text = text[: len(text) - self._stops.num_kept(text)]
        if not text.startswith(self.text):
            return ""
        new, self.text = text[len(self.text) :], text
        return new

    def num_tokens(self, tokens: Sequence[int]) -> int:
        """Number of tokens up to the one that completed the stop string, or of all."""
        number = self._stops.num_tokens(tokens, is_last=True) if self.is_stopped else None
        return len(tokens) if number is None else number


class GrowingAnswer:
    """The answer of one row while it grows: its text, and its tokens up to a stop string.

    Attributes:
        vocabulary: decoder of its tokens, or None.
        hypotheses: hypotheses of the answer, the best first; empty before its end.
        hypothesis: best hypothesis so far.
        num_tokens: number of tokens that were sent.
    """

    def __init__(self, vocabulary: Vocabulary | Behind | None, wanted: GenerateRequest):
        self.vocabulary = vocabulary
        self._text = vocabulary and GrowingText(vocabulary, wanted.stops)
        self._settings = wanted.settings
        self.hypotheses: list[Hypothesis] = []
        self.hypothesis, self.num_tokens = Hypothesis([], 0.0, False), 0

    def grow(self, event: Event, events: Events) -> tuple[Hypothesis, str | None]:
        """The new part of the answer: tokens with their log-probabilities, and characters.

        A stop string ends decoding. Answers are counted here, as they are given out.
        """
        hypothesis, is_last = said_so_far(event), isinstance(event, Answer)
        text = self._text and self._text.grow(hypothesis.tokens, is_last=is_last)
        if self._text and self._text.is_stopped:
            number = self._text.num_tokens(hypothesis.tokens)
            hypothesis = hypothesis.stopped(number, self._settings)
            self.hypotheses = [hypothesis]
        elif is_last:
            self.hypotheses = [hypothesis, *event.others]
        if self.hypotheses:
            num_tokens = sum(len(each.tokens) for each in self.hypotheses)
            events.end(event.number, num_tokens, reason_of(hypothesis))
        self.hypothesis = hypothesis
        first, self.num_tokens = self.num_tokens, max(self.num_tokens, len(hypothesis.tokens))
        return hypothesis.without_first(first), text


class GenerateForm:
    """The form of the requests and answers of `/v1/generate`."""

    def __init__(self, model: Model):
        self._model = model

    def read(self, values: dict[str, Any], limits: Limits) -> GenerateRequest:
        return read_request(values, self._model, limits)

    async def whole(self, wanted: GenerateRequest, events: Events) -> dict[str, Any]:
        """All answers in one object."""
        rows, size = self._rows(wanted), wanted.num_rows
        async for event in events:
            rows[event.number].grow(event, events)
        hypotheses = [each.hypotheses for each in rows]
        results = [
            self._result_json(wanted, first, sum(hypotheses[first : first + size], []))
            for first in range(0, len(hypotheses), size)
        ]
        return {"results": results, "usage": _usage_json(wanted, events)}

    async def stream(self, wanted: GenerateRequest, events: Events) -> AsyncIterator[bytes]:
        rows, is_search = self._rows(wanted), wanted.settings.beam_size > 1
        try:
            async for event in events:
                number, sample = divmod(event.number, wanted.num_rows)
                which = {"input": number} | ({"sample": sample} if wanted.num_rows > 1 else {})
                row = rows[event.number]
                new, text = row.grow(event, events)
                if (new.tokens or text) and not is_search:
                    piece = {"tokens": new.tokens, "text": text}
                    if wanted.settings.logprobs is not None:
                        kept = new.with_logprobs(wanted.settings.logprobs).as_dict()
                        piece |= {n: x for n, x in kept.items() if n.endswith("logprobs")}
                    yield _event_bytes("tokens", which | piece)
                if row.hypotheses:
                    result = self._result_json(
                        wanted, event.number, row.hypotheses, is_one=not is_search
                    )
                    yield _event_bytes("answer", which | result)
            yield _event_bytes("done", {"usage": _usage_json(wanted, events)})
        except Refusal as refusal:
            yield _event_bytes("error", refusal.as_json())

    def _rows(self, wanted: GenerateRequest) -> list[GrowingAnswer]:
        return [GrowingAnswer(self._model.vocabulary, wanted) for _ in wanted.prompts]

    def _result_json(
        self,
        wanted: GenerateRequest,
        number: int,
        hypotheses: list[Hypothesis],
        *,
        is_one: bool = False,
    ) -> dict[str, Any]:
        """The JSON of the input of row `number`, or with `is_one`, of one of its samples."""
        settings, vocabulary = wanted.settings, self._model.vocabulary
        stops = StopStrings(vocabulary, wanted.stops) if wanted.stops else None
        if settings.best_of is not None:
            hypotheses = sorted(hypotheses, key=lambda each: -each.score)
        results = []
        for each in hypotheses[: settings.num_return_sequences]:
            result = {"text": vocabulary and text_of(each, vocabulary, stops)}
            result |= each.with_logprobs(settings.logprobs).as_dict()
            if wanted.with_experts:
                result["experts"] = experts_json(self._model, wanted.prompts[number], each)
            results.append(result)
        is_one |= settings.num_return_sequences == 1
        return results[0] if is_one else {"hypotheses": results}


def experts_json(model: Model, prompt: list[int], hypothesis: Hypothesis) -> dict[str, Any]:
    """The experts that each token of an answer chose, layer by layer; none for a last token
    that was not read."""
    config, tokens, vocabulary = model.config, hypothesis.tokens, model.vocabulary
    first = 1 if config.is_encoder_decoder else len(prompt)  # after the start token
    chosen = slice(config.switch.router.num_selected)  # the first ranks
    routing_NTS = hypothesis.routing["decoder"][:, first : first + len(tokens)]
    expert_NTS = routing_NTS[..., chosen].astype(int)
    layers = {
        name: expert_TS.tolist() + [[]] * (len(tokens) - len(expert_TS))
        for name, expert_TS in zip(
            config.sparse_layers_by_stack["decoder"], expert_NTS, strict=True
        )
    }
    pieces = vocabulary and [
        # An embedding may have more rows than the vocabulary has tokens.
        vocabulary.piece(token).text if token < vocabulary.size else ""
        for token in tokens
    ]
    return {"num_experts": config.switch.num_experts, "layers": layers, "pieces": pieces}


def said_so_far(event: Event) -> Hypothesis:
    """All of an input's answer so far; without log-probabilities its score is unknown."""
    if isinstance(event, Answer):
        return event.hypothesis
    return event.so_far or Hypothesis(event.tokens, 0.0, False)


def reason_of(hypothesis: Hypothesis) -> str:
    """The reason why the answer ends, in OpenAI's terms."""
    return "stop" if hypothesis.is_finished else "length"


def logprobs_json(vocabulary, tokens, hypothesis, number: int, offset: int = 0, first: int = 0):
    """Returns OpenAI's form of the tokens from `first` on: texts, log-probabilities and
    offsets.

    A token that has no text of its own, such as half a character or an id unknown to the
    tokenizer, is `token_id:N` among the most likely ones.

    Args:
        hypothesis: a `Hypothesis` or `Score` of the tokens.
        number: number of most likely tokens; the token itself is always among them.
        offset: offset of the first character.
    """

    def decoded(some: Sequence[int]) -> str:
        return vocabulary.decode(list(some)).rstrip(INCOMPLETE)

    own, top = hypothesis.token_logprobs[first : len(tokens)], hypothesis.top_logprobs or ()
    texts = []
    top_texts = []
    offsets = [offset + len(decoded(tokens[:first]))]
    for place, token in enumerate(tokens[first:], first):
        # A token's text may depend on those before it, not on all of them.
        start = max(0, place - CONTEXT)
        while start and not decoded(tokens[start:place]):  # only parts of characters
            start = max(0, start - CONTEXT)
        length = len(decoded(context := tokens[start:place]))
        kept = top[place] if top else None
        likeliest = dict(itertools.islice(kept.items(), number)) if kept else {}
        likeliest.setdefault(token, own[place - first])
        named: dict[str, float] = {}
        for other, value in likeliest.items():
            text = decoded([*context, other])[length:]
            is_own = text not in ("", *named) and (text != UNKNOWN or other == token)
            named[text if is_own else f"token_id:{other}"] = value
            if other == token:
                texts.append(text)
        # As in OpenAI's API: null for the first token of a text, which nothing predicts.
        top_texts.append(None if own[place - first] is None else named)
        offsets.append(offsets[-1] + len(texts[-1]))
    return {
        "tokens": texts,
        "token_logprobs": own,
        "top_logprobs": top_texts,
        "text_offset": offsets[:-1],
    }


def joined_logprobs(first: dict | None, second: dict | None) -> dict[str, Any]:
    """`logprobs` of a prompt and of what follows it."""
    parts = [part for part in (first, second) if part is not None]
    return {name: sum((part[name] for part in parts), []) for name in parts[0]}


def _event_bytes(name: str, content: Any) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encoded(content) + b"\n\n"


def _usage_json(wanted: GenerateRequest, events: Events) -> dict[str, int]:
    return {
        "prompt_tokens": wanted.num_prompt_tokens,
        "generation_tokens": events.num_tokens,
    }
