# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` as OpenAI's clients ask (its API reference, Chat).

A conversation becomes a prompt by the template of the model's folder, in Jinja's sandbox, with
what Hugging Face provides to such templates. The rest is a completion (completions.py). Texts
of messages are plain text: one that the tokenizer would take for a special token is refused,
since it would end a turn, or begin another.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from switchx.api import Model
from switchx.data.tokenizers import Vocabulary
from switchx.inference.generate import positions_needed
from switchx.serving.completions import FIELDS, CompletionForm, CompletionRequest, data_of
from switchx.serving.limits import Limits
from switchx.serving.refusals import Refusal
from switchx.serving.requests import WholePrompt, excerpt, fields_of, wrong
from switchx.serving.service import Events

ROLES = ("system", "developer", "user", "assistant")
# Fields that completions lack, or that mean something else; values that ask for nothing.
UNSUPPORTED = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
NOT_HERE = ("prompt", "echo", "best_of", "suffix", "logprobs", "forced_prefix")
_PROMPT = "prompt[0]"  # the name that completions give to a conversation
CHAT_FIELDS = (
    "messages",
    "max_completion_tokens",
    *(name for name in FIELDS if name not in NOT_HERE),
    *UNSUPPORTED,
)


class ChatForm(CompletionForm):
    """The form of the requests and answers of `/v1/chat/completions`."""

    def read(self, values: dict[str, Any], limits: Limits) -> CompletionRequest:
        """The request in a body's object.

        Raises:
            Refusal: 400, it names the field that is wrong, or the model has no template.
        """
        values = fields_of(values, CHAT_FIELDS)
        for name, neutral in UNSUPPORTED.items():
            if (value := values.pop(name, None)) is not None and value not in neutral:
                raise wrong(
                    name,
                    f"{name} is {excerpt(value)}; this server writes texts alone, without "
                    "tools; leave it out",
                )
        messages = _messages(values.pop("messages", None), self._model)
        most = [values.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
        prompt = prompt_of_chat(self._model, messages)
        number = next((each for each in most if each is not None), None)
        number = self._room_behind(prompt, limits) if number is None else number
        is_old = most[0] is None and most[1] is not None
        most_name = "max_tokens" if is_old else "max_completion_tokens"
        try:
            return super().read(values | {"prompt": prompt, "max_tokens": number}, limits)
        except Refusal as refusal:
            fields = {"max_tokens": most_name, _PROMPT: "messages"}
            message = refusal.message.replace("max_tokens", most_name)
            message = message.replace(_PROMPT, "the conversation", 1)
            field = fields.get(refusal.field, refusal.field)
            raise dataclasses.replace(refusal, field=field, message=message) from None

    def _room_behind(self, prompt: list[int], limits: Limits) -> int:
        """The maximum number of new tokens of an answer that the server gives and the model
        has positions for."""
        config, most = self._model.config, limits.max_new_tokens
        needed = positions_needed(config, len(prompt), most)
        return most if needed is None else max(1, most - max(0, needed - config.max_length))

    async def stream(self, wanted: CompletionRequest, events: Events) -> AsyncIterator[bytes]:
        """A chunk that says who speaks, and then the chunks of a completion."""
        for index in range(wanted.num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "finish_reason": None}
            yield data_of(self._of_chat(wanted, [choice]))
        async for chunk in super().stream(wanted, events):
            yield chunk

    def _behind(self, prompt: list[int]) -> Vocabulary:
        """An answer is a text of its own."""
        return self._model.vocabulary

    def _json(self, wanted: CompletionRequest, choices: list) -> dict[str, Any]:
        name = "delta" if wanted.is_streaming else "message"
        speaker = {} if wanted.is_streaming else {"role": "assistant"}
        return self._of_chat(
            wanted,
            [
                {
                    "index": each["index"],
                    name: speaker | {"content": each["text"]},
                    "logprobs": None,
                    "finish_reason": each["finish_reason"],
                }
                for each in choices
            ],
        )

    def _of_chat(self, wanted: CompletionRequest, choices: list) -> dict[str, Any]:
        kind = "chat.completion.chunk" if wanted.is_streaming else "chat.completion"
        identity = {"id": f"chatcmpl-{wanted.request_id}", "object": kind}
        return super()._json(wanted, choices) | identity


def prompt_of_chat(model: Model, messages: list[dict[str, str]]) -> WholePrompt:
    """Token ids of a conversation, and of the head of the answer: only the template's, which
    itself writes a start if the model should read one.

    Raises:
        Refusal: 400, the model has no template, or its template refuses the messages.
    """
    vocabulary = model.vocabulary
    if not hasattr(vocabulary, "encode_special"):
        raise wrong(None, "this model has no chat template; use /v1/completions")
    try:
        template = compiled_template(vocabulary.chat_template)
        text = template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **vocabulary.special_texts,
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise wrong("messages", f"the chat template: {str(error)[:300]}") from None
    return WholePrompt(vocabulary.encode_special(text))


@functools.lru_cache(maxsize=8)
def compiled_template(text: str) -> jinja2.Template:
    """A template with the functions, filters and white space rules of Hugging Face's."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, **options):
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment.from_string(text)


class GenerationBlocks(Extension):
    """`{% generation %}` to `{% endgeneration %}`: around what an assistant wrote.

    transformers uses them to find tokens to train on. They change no text, but names set inside
    go out of scope at the end.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("text_of"), [], [], body, lineno=line)

    def text_of(self, caller) -> str:
        return caller()


def _messages(value, model: Model) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise wrong(
            "messages", f"messages is {excerpt(value)}; give a list of role and content"
        )
    return [_message(each, f"messages[{i}]", model) for i, each in enumerate(value)]


def _message(value, name: str, model: Model) -> dict[str, str]:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise wrong(
            "messages", f"{name} is {excerpt(value)}; give an object of role and content"
        )
    role, content = value["role"], value["content"]
    if role not in ROLES:
        expected = f"expected {', '.join(ROLES)}; there are no tools"
        raise wrong("messages", f"{name}.role is {excerpt(role)}; {expected}")
    for field in value.keys() - {"role", "content", "name"}:
        if value[field]:
            raise wrong("messages", f"{name}.{field} is {excerpt(value[field])}; leave it out")
    if isinstance(content, list):  # of parts, as newer clients send them
        parts = [
            part.get("text")
            if isinstance(part, dict) and part.get("type", "text") == "text"
            else None
            for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        expected = "expected a text, or parts of texts"
        raise wrong("messages", f"{name}.content is no text; {expected}")
    vocabulary = model.vocabulary
    if hasattr(vocabulary, "encode_special") and (
        vocabulary.encode_special(content) != vocabulary.encode(content)
    ):
        raise wrong(
            "messages",
            f"{name}.content has the text of a special token, which would end or begin a turn; "
            "leave it out, or give /v1/completions the whole prompt as token ids",
        )
    return {"role": role, "content": content}
