# SPDX-License-Identifier: Apache-2.0
"""What a server accepts, how long it waits, and the sizes that it has compiled programs for.

Each limit is a flag of `switchx serve`, which reads this file before it imports JAX.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from switchx.fields import check_options, option, require
from switchx.inference.config import (
    BATCHES,
    LENGTHS,
    DecodingConfig,
    rounded_up,
    with_defaults,
)

# Prompts are padded to one of these, answers have space for one of those: a program is
# compiled for each pair that occurs. At most half of a prompt is padding, unless it is short.
PROMPT_LENGTHS = tuple(length for length in LENGTHS if length >= 16 and length.bit_count() == 1)
ANSWER_LENGTHS = (16, 64, 256, 1024, 4096)
# Time for a client to read the rest of a response, once its answers are ready.
READING_S = 30.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of what a client may ask of a server; names end in their units."""

    batch_size: int = option(8, "most inputs decoded together", 1, BATCHES[-1])
    batch_wait_ms: float = option(5.0, "time an input waits for others to join it", 0)
    max_waiting: int = option(256, "most inputs in the queue", 1)
    max_inputs: int = option(64, "most inputs of a request", 1)
    max_input_tokens: int = option(1024, "most tokens of an input", 1, PROMPT_LENGTHS[-1])
    max_new_tokens: int = option(256, "most tokens of an answer", 1, ANSWER_LENGTHS[-1])
    max_beam_size: int = option(4, "most beams; a program is compiled for each size", 1)
    max_body_bytes: int = option(1 << 20, "largest body of a request in bytes", 1)
    max_connections: int = option(512, "most open connections", 1)
    body_timeout_s: float = option(10.0, "time for a request's head, and for its body", 0.01)
    request_timeout_s: float = option(60.0, "time for a request to be answered", 0.01)
    send_timeout_s: float = option(10.0, "time in which a client reads no byte", 0.01)
    worker_timeout_s: float = option(
        300.0, "time without a step of the worker, which includes compiling a program", 0.01
    )
    drain_timeout_s: float = option(25.0, "time for open requests when the server stops", 0.01)
    warm_up_tokens: int = option(
        64, "largest input in tokens for which programs are compiled before any request", 0
    )

    decodings: str | None = option(
        None,
        "ways of decoding that are answered, separated by commas: greedy, sample, beam2, beam3 "
        "and so on, processors (penalties, n-grams, forced tokens) and logprobs (and a stop of "
        "/v1/generate); others are refused and compile nothing; default: all",
    )

    def __post_init__(self):
        """Raises ValueError if a value is out of its bounds."""
        check_options(self)
        beams = (f"beam{n}" for n in range(2, self.max_beam_size + 1))
        known = ["greedy", "sample", *beams, "processors", "logprobs"]
        for name in self.allowed or ():
            require(
                name in known,
                f"Limits.decodings={self.decodings!r}: there is no {name!r}; use of "
                f"{', '.join(known)}, with commas",
            )
        require(
            self.max_inputs <= self.max_waiting,
            f"max_inputs={self.max_inputs} and max_waiting={self.max_waiting}: a request has "
            "at most as many inputs as may wait; give both",
        )

    @property
    def allowed(self) -> tuple[str, ...] | None:
        """Names of the decoding methods that are answered; None is all."""
        return None if self.decodings is None else tuple(self.decodings.split(","))

    def refusal(self, settings: DecodingConfig) -> tuple[str, str] | None:
        """The field of a request that asks for a decoding method that is not answered, and
        what is wrong with it."""
        if self.allowed is None:
            return None
        search = f"beam{settings.beam_size}" if settings.beam_size > 1 else "greedy"
        field = "temperature" if settings.is_sampling else "beam_size"
        asked = {"sample" if settings.is_sampling else search: field}
        if settings.has_processors:
            penalized = settings.repetition_penalty != 1, settings.no_repeat_ngram_size > 0
            fields = "repetition_penalty", "no_repeat_ngram_size", "forced_prefix"
            asked["processors"] = fields[[*penalized, True].index(True)]
        if settings.num_kept is not None:
            asked["logprobs"] = "stop" if settings.logprobs is None else "logprobs"
        for name, field in asked.items():
            if name not in self.allowed:
                value, answered = getattr(settings, field), ", ".join(self.allowed)
                return field, (
                    f"{field} is {value}, which is {name!r} decoding; this server answers "
                    f"{answered}"
                )
        return None

    def defaults(self, decoding: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of a request that gives none: a model's own, within the limits; a running
        batch drafts no tokens."""
        most = decoding.get("max_new_tokens", DecodingConfig.max_new_tokens)
        asked = {"max_new_tokens": min(most, self.max_new_tokens)}
        return with_defaults(decoding, asked | {"prompt_lookup_num_tokens": None})

    def warm_up(self, decoding: Mapping[str, Any]) -> dict[str, Any]:
        """Settings whose programs are compiled unasked: the defaults, or if those are not
        answered, the first decoding method that is."""
        settings = self.defaults(decoding)
        if self.refusal(DecodingConfig(**settings)) is None:
            return settings
        plain = {"beam_size": 1, "temperature": 0.0, "stop": (), "repetition_penalty": 1.0}
        plain |= {"no_repeat_ngram_size": 0, "forced_prefix": (), "logprobs": None}
        for name in self.allowed:
            if name == "sample":
                plain["temperature"] = 1.0
            elif name.startswith("beam"):
                plain["beam_size"] = int(name.removeprefix("beam"))
            if name not in ("processors", "logprobs"):
                break
        return with_defaults(settings, plain)

    def answer_length(self, new_tokens: int) -> int:
        """New tokens of the compiled program for answers of `new_tokens` tokens."""
        return min(rounded_up(new_tokens, ANSWER_LENGTHS), self.max_new_tokens)

    def prompt_length(self, tokens: int) -> int:
        """Length of the compiled program for prompts of `tokens` tokens."""
        return rounded_up(tokens, PROMPT_LENGTHS)
