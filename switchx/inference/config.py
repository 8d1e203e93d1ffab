# SPDX-License-Identifier: Apache-2.0
"""How text is generated: lengths, beams, sampling, pruning. Defaults are greedy decoding."""

import dataclasses
from typing import Literal

from switchx.fields import check_choices, require, require_at_least


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """Names and meanings are those of Hugging Face's `generate` where it has them.

    Attributes:
        max_new_tokens: a sentence ends after so many, or with `eos_id`.
        beam_size: 1 takes the likeliest token, or samples; more search.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: sample among the k likeliest; None among all.
        top_p: sample among the fewest tokens whose probabilities reach p; None among all.
        length_penalty: a hypothesis of n new tokens scores log p / n ** length_penalty.
        early_stopping: when a sentence's search ends, all beams being finished: `True` at
            once; `False` when the best running beam, as long as it is, scores no better than
            the worst finished one; `never` when it could not even at full length.
        pruning: of finished sentences (Kim et al. 2022, arXiv:2211.10017, section 3.5):
            `none`; `experts` leaves them out of the Switch layers; `compact` also gathers
            the live ones into the next smaller batch.
        eos_id, pad_id, start_id: token ids. `start_id` begins a decoder's input where the
            model has an encoder.
        is_prompt_bidirectional: a decoder-only model's prompt sees itself whole (prefix LM).
        seed: of sampling. A sentence's samples depend on it and the sentence's number alone.
    """

    max_new_tokens: int = 64
    beam_size: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    length_penalty: float = 1.0
    early_stopping: Literal[True, False, "never"] = False
    pruning: Literal["none", "experts", "compact"] = "compact"
    eos_id: int = 1
    pad_id: int = 0
    start_id: int = 0
    is_prompt_bidirectional: bool = False
    seed: int = 0

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "max_new_tokens", "beam_size", "top_k")
        require(
            self.temperature >= 0,
            f"DecodingConfig.temperature={self.temperature}; use 0 for the likeliest token, or "
            "more to sample",
        )
        require(
            self.top_p is None or 0 < self.top_p <= 1,
            f"DecodingConfig.top_p={self.top_p}; use 0 < top_p <= 1, or None for all tokens",
        )
        require(
            not (self.is_sampling and self.beam_size > 1),
            f"DecodingConfig.temperature={self.temperature} with beam_size={self.beam_size}; "
            "sample with beam_size=1, or search with temperature=0",
        )
        require(
            self.is_sampling or (self.top_k is None and self.top_p is None),
            "DecodingConfig.top_k and top_p choose what is sampled, and temperature=0 does not "
            "sample; set a temperature",
        )

    @property
    def is_sampling(self) -> bool:
        return self.temperature > 0
