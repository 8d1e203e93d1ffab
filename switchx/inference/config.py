# SPDX-License-Identifier: Apache-2.0
"""How text is generated: lengths, beams, sampling, pruning. Defaults are greedy decoding.

The commands' flags, the fields of a server's requests and their checks are derived from the
options of `DecodingConfig`; adding one takes a line here. JAX is not imported, so that help
does not wait for it.
"""

import bisect
import dataclasses
import functools
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from switchx.characters import require_characters
from switchx.fields import (
    FieldError,
    check_choices,
    check_options,
    option,
    require,
    require_at_least,
)
from switchx.storage import PolicyName

# Padded lengths of texts: each at most 1.5 times the one before: at most a third is padding.
LENGTHS = tuple(sorted({base << shift for base in (2, 3) for shift in range(16)} | {1}))
# Batch sizes: a program is compiled for each one that a shrinking batch passes through.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Numbers of new tokens: places of the cache, which are masked until they are written.
NEW_TOKENS = tuple(1 << shift for shift in range(4, 21))
# Float32 logits divided by this do not overflow. Below it no other token would be drawn.
LEAST_TEMPERATURE = 1e-20
MAX_LOGPROBS = 5  # likeliest tokens beside a chosen one; as OpenAI's API allows
MAX_INT32 = 2**31 - 1


def rounded_up(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that is large enough."""
    return sizes[bisect.bisect_left(sizes, size)]


@dataclasses.dataclass(frozen=True)
class ExpertSlots:
    """How experts are offloaded: they are moved to the device when they are chosen
    (chosen_experts.py), or in whole layers (ring_decode.py); with both, a formula decides for
    each call (ring_or_chosen.py).

    Offloading changes no number in the output.

    Attributes:
        slots: experts of each Switch layer that are on the device at once; None moves no chosen
            experts.
        policy: eviction policy of the slots, and of the cache in host memory.
        prefetch: whether the next layer's router predicts which experts are moved ahead.
        host_bytes: bytes of host memory for experts, which are then read from files; None keeps
            all experts in host memory.
        ring_slots: layers of each stack whose experts are on the device at once, through which
            all layers stream in order; None streams no layers.
        hardware: the hardware that the formula is evaluated for, a spec's name or file
            (docs/planner.md); None is the device that is used.
    """

    slots: int | None = None
    policy: PolicyName = "lru"
    prefetch: bool = False
    host_bytes: int | None = None
    ring_slots: int | None = None
    hardware: str | None = None

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "host_bytes")
        slots, ring = self.slots, self.ring_slots
        require(
            slots is not None or ring is not None,
            "ExpertSlots without slots and ring_slots; give one of the two, or both",
        )
        require(
            ring is None or self.host_bytes is None,
            f"ring_slots={ring} with host_bytes={self.host_bytes}: a ring has all experts in "
            "host memory; leave out one of the two",
        )
        require(
            slots is not None or not self.prefetch,
            f"ring_slots={ring} with prefetch, which predicts chosen experts; leave it out, or "
            "give slots, too",
        )
        require(
            self.hardware is None or (slots is not None and ring is not None),
            f"hardware={self.hardware!r} without slots and ring_slots, between which its "
            "formula decides; give both, or leave it out",
        )


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """Decoding settings, named and defined as in Hugging Face's `generate` where it has them.

    Attributes:
        pruning: what becomes of finished sentences (Kim et al. 2022, arXiv:2211.10017,
            section 3.5): `none` keeps them; `experts` leaves them out of the Switch layers;
            `compact` also gathers the live ones into the next smaller batch.
        seed: seed of the samples, which depend only on it and on the sentence's number.
        early_stopping: when a sentence's search ends, all beams being finished: `True` at
            once; `False` when the best running beam, as long as it is, scores no better than
            the worst finished one; `never` when it could not even at full length.
        prompt_lookup_num_tokens: tokens that greedy decoding drafts in each step
            (prompt_lookup.py); the output is the same.
        forced_prefix: token ids that each output begins with, whatever the model finds likely,
            such as the language of a multilingual translation (`forced_bos_token_id`). They
            count as tokens of the output, but add nothing to its score.
        stop: texts, the first of which to occur ends the output and is not part of it.
        logprobs: number of likeliest tokens whose log-probabilities are returned: natural
            logarithms of the model's own probabilities, before temperature, penalties and bans.
        eos_id, pad_id, start_id: token ids. `pad_id` fills places that nothing reads.
            `start_id` begins a decoder's input; None, without an encoder, where no token does.
        other_eos_ids: further tokens that end an output and are not part of it.
        suppressed_ids: tokens that are never chosen.
        num_ids: number of ids that the vocabulary has; ids of the embedding table from there
            on, which have no text, are never chosen. None sets no limit.
        is_prompt_bidirectional: whether each token of a decoder-only model's prompt attends to
            the whole prompt (prefix LM).
    """

    max_new_tokens: int = option(64, "most tokens of an output, including its end", 1, 2**20)
    beam_size: int = option(1, "number of beams; 1 decodes greedily or samples", 1)
    temperature: float = option(0.0, "divisor of logits; 0 takes the likeliest token", 0, 100)
    top_k: int | None = option(None, "number of likeliest tokens to sample from", 1, MAX_INT32)
    top_p: float | None = option(None, "probability of the nucleus to sample from", 0, 1)
    seed: int = option(0, "seed of samples", 0, MAX_INT32)
    length_penalty: float = option(1.0, "n tokens score log p / n**N", -10, 10)
    pruning: Literal["none", "experts", "compact"] = option(
        "compact",
        "what finished outputs are left out of: experts, the Switch layers; compact, the whole "
        "batch",
    )
    early_stopping: Literal[True, False, "never"] = False
    prompt_lookup_num_tokens: int | None = option(
        None, "number of tokens drafted from repeated text, checked in one step", 1, 64
    )
    min_new_tokens: int = option(0, "least tokens of an output before its end", 0, 2**20)
    repetition_penalty: float = option(
        1.0,
        "penalty of tokens that occurred: divides positive logits, multiplies others",
        0.01,
        100,
    )
    no_repeat_ngram_size: int = option(
        0, "length of token sequences that may not repeat; 0 allows all", 0, 2**20
    )
    forced_prefix: tuple[int, ...] = option(
        (), "ids of the tokens that begin an output, such as a language", 0, MAX_INT32
    )
    stop: tuple[str, ...] = option((), "text before which an output ends")
    num_return_sequences: int = option(
        1, "outputs per input: the best beams, or samples", 1, 1024
    )
    best_of: int | None = option(
        None,
        "samples drawn, of which the best num_return_sequences are returned",
        1,
        1024,
    )
    logprobs: int | None = option(
        None,
        "return log-probabilities of tokens and of the N likeliest at each",
        0,
        MAX_LOGPROBS,
    )
    eos_id: int = 1
    pad_id: int = 0
    start_id: int | None = 0
    is_prompt_bidirectional: bool = False
    other_eos_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    num_ids: int | None = None

    def __post_init__(self):
        """Raises FieldError: a value is out of its bounds, or contradicts another one."""
        check_choices(self)
        for name in ("forced_prefix", "stop", "other_eos_ids", "suppressed_ids"):
            object.__setattr__(self, name, self._listed(name, str if name == "stop" else int))
        check_options(self)

        def refuse(field: str, is_wrong: bool, way_out: str) -> None:
            if is_wrong:
                raise FieldError(self, field, way_out)

        temperature, is_sampling = self.temperature, self.is_sampling
        bounds = f"use 0 for the likeliest token, or {LEAST_TEMPERATURE} to 100 to sample"
        refuse("temperature", 0 < temperature < LEAST_TEMPERATURE, bounds)
        refuse("top_p", self.top_p == 0, "use more than 0, up to 1, or None for all tokens")
        most = self.max_new_tokens
        refuse("min_new_tokens", self.min_new_tokens > most, f"use 0 to max_new_tokens={most}")
        alone = f"temperature={temperature} samples; use beam_size=1 with it, or temperature=0"
        refuse("beam_size", is_sampling and self.beam_size > 1, alone)
        for field in ("top_k", "top_p", "best_of"):
            is_unread = getattr(self, field) is not None and not is_sampling
            refuse(field, is_unread, "temperature=0 does not sample; set a temperature")
        self._check_texts(refuse)
        if self.prompt_lookup_num_tokens is not None:
            self._check_drafts(refuse)

    def _listed(self, name: str, element: type) -> tuple:
        values = getattr(self, name)
        values = (values,) if isinstance(values, str) else values
        kind = numbers.Integral if element is int else str
        if not isinstance(values, list | tuple) or not all(
            isinstance(value, kind) and not isinstance(value, bool) and value != ""
            for value in values
        ):
            what = "token ids" if element is int else "texts that are not empty"
            raise FieldError(self, name, f"use a list of {what}")
        try:
            require_characters(values, name)
        except ValueError as error:
            raise FieldError(self, name, str(error)) from None
        return tuple(map(element, values))

    def _check_texts(self, refuse) -> None:
        """Checks the settings of how outputs begin and end, and of how many there are."""
        number, beams, most = self.num_return_sequences, self.beam_size, self.max_new_tokens
        one = "greedy decoding has one output; set beam_size, or a temperature, or use 1"
        refuse("num_return_sequences", number > 1 and beams == 1 and not self.is_sampling, one)
        is_more = number > beams > 1
        refuse("num_return_sequences", is_more, f"use 1 to beam_size={beams}, or more beams")
        is_less = self.best_of is not None and self.best_of < number
        refuse("best_of", is_less, f"use num_return_sequences={number}, or more")
        way_out = "a search is not stopped by texts; use beam_size=1, or leave it out"
        refuse("stop", bool(self.stop) and beams > 1, way_out)
        prefix = self.forced_prefix
        refuse("forced_prefix", len(prefix) > most, f"use max_new_tokens={most} ids at most")
        for end in {self.eos_id, *self.other_eos_ids}.intersection(prefix):
            refuse("forced_prefix", True, f"id {end} ends an output; leave it out")

    def _check_drafts(self, refuse) -> None:
        """Refuses settings that rule out drafts, which predict only the likeliest token."""
        for name, is_asked in (
            ("beam_size", self.beam_size > 1),
            ("temperature", self.is_sampling),
            ("repetition_penalty", self.repetition_penalty != 1),
            ("no_repeat_ngram_size", self.no_repeat_ngram_size > 0),
            ("forced_prefix", bool(self.forced_prefix)),
            ("logprobs", self.logprobs is not None),
            ("stop", bool(self.stop)),
        ):
            way_out = (
                f"drafts are for plain greedy decoding, and {name} is "
                f"{getattr(self, name)!r:.40}; leave out one of the two"
            )
            refuse("prompt_lookup_num_tokens", is_asked, way_out)

    @property
    def is_sampling(self) -> bool:
        return self.temperature > 0

    @property
    def num_samples(self) -> int:
        """Number of rows of the batch that each input takes."""
        return (self.best_of or self.num_return_sequences) if self.is_sampling else 1

    @property
    def has_processors(self) -> bool:
        """Whether logits are changed by the text so far; see `DecodingProgram`."""
        is_penalized = self.repetition_penalty != 1
        return is_penalized or self.no_repeat_ngram_size > 0 or bool(self.forced_prefix)

    @property
    def num_kept(self) -> int | None:
        """Number of likeliest tokens kept per step; None keeps no log-probabilities."""
        if self.logprobs:
            return MAX_LOGPROBS
        # A text cut at a stop string is scored by the sum of its tokens' log-probabilities.
        return 0 if self.logprobs == 0 or self.stop else None

    @property
    def program(self) -> "DecodingProgram":
        """The settings that a program is compiled for; places for new tokens are rounded up."""
        return self.program_of(rounded_up(self.max_new_tokens, NEW_TOKENS))

    def program_of(self, places: int, *, is_recorded: bool = False) -> "DecodingProgram":
        """Like `program`, with places for exactly this many new tokens."""
        return DecodingProgram(
            places,
            self.beam_size,
            self.is_sampling,
            self.pruning != "none",
            self.eos_id,
            self.pad_id,
            self.is_prompt_bidirectional,
            self.has_processors,
            self.num_kept,
            self.prompt_lookup_num_tokens or 0,
            self.other_eos_ids,
            self.suppressed_ids,
            is_recorded,
            self.num_ids,
        )


# Settings that together decide how tokens are chosen.
_WAY = (
    "beam_size",
    "temperature",
    "top_k",
    "top_p",
    "num_return_sequences",
    "prompt_lookup_num_tokens",
)
# Settings that drafts do not support.
_WITHOUT_DRAFTS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "forced_prefix",
    "logprobs",
    "stop",
)


def with_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `DecodingConfig`: what is asked for, otherwise the model's own defaults.

    A request for beams or a temperature discards the model's own way of choosing tokens, one
    for few new tokens caps the model's least number at that. A model's own drafts and stop
    strings give way to requested settings that they do not support.
    """
    left_out = {*(_WAY if {"beam_size", "temperature"} & asked.keys() else ())}
    left_out |= {"prompt_lookup_num_tokens"} if {*_WITHOUT_DRAFTS} & asked.keys() else set()
    left_out |= {"stop"} if asked.get("beam_size", 1) != 1 else set()
    kept = {name: value for name, value in defaults.items() if name not in left_out}
    most, least = asked.get("max_new_tokens"), kept.get("min_new_tokens")
    if isinstance(most, int) and least is not None:
        kept["min_new_tokens"] = min(least, max(most, 0))
    return kept | dict(asked)


@dataclasses.dataclass(frozen=True)
class DecodingProgram:
    """The part of a `DecodingConfig` that is constant in a compiled program.

    Everything else is data, one entry per row (`RowSettings`): another seed, temperature or
    penalty, or another number of new tokens in the same bucket, compiles nothing.

    Attributes:
        max_new_tokens: number of the cache's places for new tokens; a row may have fewer.
        is_pruning: whether finished sentences are left out of the Switch layers.
        has_processors: whether rows may have a repetition penalty, n-grams that must not repeat
            and forced tokens; otherwise the program reads none of these.
        num_kept: number of likeliest tokens of each step whose log-probabilities are kept,
            beside the chosen one's; None keeps neither.
        num_drafts: number of tokens that a step reads beside each row's newest one; 0 is none.
        is_recorded: whether the routing of the tokens read is kept (read_routing.py).
    """

    max_new_tokens: int
    beam_size: int
    is_sampling: bool
    is_pruning: bool
    eos_id: int
    pad_id: int
    is_prompt_bidirectional: bool
    has_processors: bool = False
    num_kept: int | None = None
    num_drafts: int = 0
    other_eos_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    is_recorded: bool = False
    num_ids: int | None = None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.eos_id, *self.other_eos_ids

    def ends(self, token):
        """Whether each token of an array ends a text."""
        return functools.reduce(operator.or_, (token == each for each in self.eos_ids))

    @property
    def num_candidates(self) -> int:
        """Number of continuations that a search considers, enough for all beams to go on."""
        return (1 + len(self.eos_ids)) * self.beam_size

    @property
    def num_lanes(self) -> int:
        """Number of a row's tokens that a step reads: beams, or the newest one and drafts."""
        return self.beam_size + self.num_drafts
