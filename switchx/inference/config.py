# SPDX-License-Identifier: Apache-2.0
"""How text is generated: lengths, beams, sampling, pruning. Defaults are greedy decoding.

Flags of commands, fields of a server's requests and their checks are made from the options
of `DecodingConfig`; adding one is a line here. No JAX is imported: help does not wait for it.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Literal

from switchx.fields import (
    FieldError,
    check_choices,
    check_options,
    option,
    require,
    require_at_least,
)
from switchx.storage import PolicyName

# Of texts: each at most 1.5 times the one before, so at most a third is padding.
LENGTHS = tuple(sorted({base << shift for base in (2, 3) for shift in range(16)} | {1}))
# Of batches: a program is compiled for each that a shrinking batch passes.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Of new tokens: places of the cache, which are masked until they are written.
NEW_TOKENS = tuple(1 << shift for shift in range(4, 21))
# A divisor; below it logits overflow.
LEAST_TEMPERATURE = 0.01
MAX_INT32 = 2**31 - 1


def rounded_up(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that is enough."""
    return sizes[bisect.bisect_left(sizes, size)]


@dataclasses.dataclass(frozen=True)
class ExpertSlots:
    """Experts that come to the device when they are chosen (chosen_experts.py), or in whole
    layers (ring_decode.py); with both, the formula decides for each call (ring_or_chosen.py).

    It changes no number.

    Attributes:
        slots: experts of each Switch layer that are on the device at once; None chooses none.
        policy: who leaves a slot, and who leaves host memory.
        prefetch: the router of the next layer predicts what is moved ahead.
        host_bytes: of host memory for experts, which are read from files then; None has all
            of them there.
        ring_slots: layers of each stack whose experts are on the device at once, through which
            all stream in order; None streams none.
        hardware: that the formula is evaluated for, a spec's name or file (docs/planner.md);
            None is the device that is used.
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
    """Names and meanings are those of Hugging Face's `generate` where it has them.

    Attributes:
        pruning: of finished sentences (Kim et al. 2022, arXiv:2211.10017, section 3.5):
            `none`; `experts` leaves them out of the Switch layers; `compact` also gathers
            the live ones into the next smaller batch.
        seed: a sentence's samples depend on it and on the sentence's number alone.
        early_stopping: when a sentence's search ends, all beams being finished: `True` at
            once; `False` when the best running beam, as long as it is, scores no better than
            the worst finished one; `never` when it could not even at full length.
        eos_id, pad_id, start_id: token ids. `start_id` begins a decoder's input where the
            model has an encoder.
        is_prompt_bidirectional: a decoder-only model's prompt sees itself whole (prefix LM).
    """

    max_new_tokens: int = option(64, "most tokens of an output, its end included", 1, 2**20)
    beam_size: int = option(1, "1 takes the likeliest token, or samples; more search", 1)
    temperature: float = option(0.0, "divides logits; 0 takes the likeliest token", 0, 100)
    top_k: int | None = option(None, "sample among the N likeliest tokens", 1, MAX_INT32)
    top_p: float | None = option(None, "sample among the fewest of probability N", 0, 1)
    seed: int = option(0, "of samples", 0, MAX_INT32)
    length_penalty: float = option(1.0, "n tokens score log p / n ** N", -10, 10)
    pruning: Literal["none", "experts", "compact"] = option(
        "compact",
        "of finished outputs: experts leaves them out of the Switch layers, compact also "
        "makes the batch smaller",
    )
    early_stopping: Literal[True, False, "never"] = False
    min_new_tokens: int = option(0, "tokens of an output before its end", 0, 2**20)
    eos_id: int = 1
    pad_id: int = 0
    start_id: int = 0
    is_prompt_bidirectional: bool = False

    def __post_init__(self):
        """Raises FieldError: a value is out of its bounds, or contradicts another one."""
        check_choices(self)
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
        for field in ("top_k", "top_p"):
            is_unread = getattr(self, field) is not None and not is_sampling
            refuse(field, is_unread, "temperature=0 does not sample; set a temperature")

    @property
    def is_sampling(self) -> bool:
        return self.temperature > 0

    @property
    def program(self) -> "DecodingProgram":
        """What a program that decodes so is compiled for; it has places for more new tokens."""
        return self.program_of(rounded_up(self.max_new_tokens, NEW_TOKENS))

    def program_of(self, places: int) -> "DecodingProgram":
        """`program` with places for exactly so many new tokens."""
        return DecodingProgram(
            places,
            self.beam_size,
            self.is_sampling,
            self.pruning != "none",
            self.eos_id,
            self.pad_id,
            self.is_prompt_bidirectional,
        )


@dataclasses.dataclass(frozen=True)
class DecodingProgram:
    """The part of a `DecodingConfig` that is constant in a compiled program.

    All else is data, an entry a row (`sampling.RowSettings`): another seed, temperature or
    penalty, or another number of new tokens of the same bucket, compiles nothing.

    Attributes:
        max_new_tokens: places of the cache for new tokens; a row may have fewer.
        is_pruning: finished sentences take part in no Switch layer.
    """

    max_new_tokens: int
    beam_size: int
    is_sampling: bool
    is_pruning: bool
    eos_id: int
    pad_id: int
    is_prompt_bidirectional: bool
