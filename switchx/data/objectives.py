# SPDX-License-Identifier: Apache-2.0
"""Objectives: how a corpus' records become examples of inputs and targets.

Three read text, `{"text": ...}`. Its documents are tokenized, joined and cut into chunks
of a fixed length, so that nothing is padding and nothing is lost (seqio's
`reduce_concat_tokens` and `split_tokens`); a chunk becomes one example. The fourth reads
records that are examples already, `{"inputs": ..., "targets": ...}`.

Raffel et al. 2020 (arXiv:1910.10683), sections 3.1 and 3.2.

Dims: L
"""

import dataclasses
from typing import ClassVar

import numpy as np

from switchx.data.features import EncoderDecoderFeatures, Example, Features
from switchx.data.span_corruption import (
    corrupt_spans,
    count_spans,
    fit_inputs_length,
    fit_joint_length,
)
from switchx.data.tokenizers import Vocabulary


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """Inputs with spans replaced by sentinels, targets that spell the spans out.

    Documents are joined without EOS between them, as T5's `span_corruption` does: its EOS
    only ever ends inputs and targets.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0

    reads: ClassVar = ("text",)
    joins_with_eos: ClassVar = False
    ends_inputs_with_eos: ClassVar = True
    min_tokens: ClassVar = 2

    def __post_init__(self):
        if not 0 < self.noise_density < 1:
            raise ValueError(f"noise_density={self.noise_density}; use one between 0 and 1")
        if self.mean_span_length < 1:
            raise ValueError(f"mean_span_length={self.mean_span_length}; use at least 1 token")

    def chunk_length(self, features: Features) -> int:
        """Tokens of raw text an example is made of: 568 for inputs of 512.

        Raises:
            ValueError: the targets do not fit, or the lengths hold no example.
        """
        noise = (self.noise_density, self.mean_span_length)
        if not isinstance(features, EncoderDecoderFeatures):
            return fit_joint_length(features.length, *noise).raw_length
        counts = fit_inputs_length(features.inputs_length, *noise)
        if counts.targets_length > features.targets_length:
            raise ValueError(
                f"span corruption of inputs_length={features.inputs_length} makes targets of "
                f"{counts.targets_length} tokens, got targets_length="
                f"{features.targets_length}; use targets_length={counts.targets_length} or "
                "more, or shorter inputs"
            )
        return counts.raw_length

    def example(
        self,
        tokens_L: np.ndarray,
        vocabulary: Vocabulary,
        features: Features,
        rng: np.random.Generator,
    ) -> Example:
        """Corrupts a chunk; see `corrupt_spans`."""
        del features  # the chunk's length is chosen for them
        counts = count_spans(len(tokens_L), self.noise_density, self.mean_span_length)
        return Example(*corrupt_spans(tokens_L, counts, vocabulary, rng))


@dataclasses.dataclass(frozen=True)
class PrefixLM:
    """Text split at a random place: the inputs are what stands before, the targets after.

    The split is uniform among those where both sides fit. EOS stands at the end of each
    document and nowhere else, as in T5's `pack_prefix_lm_encoder_decoder` and
    `pack_prefix_lm_decoder_only`.
    """

    reads: ClassVar = ("text",)
    joins_with_eos: ClassVar = True
    ends_inputs_with_eos: ClassVar = False
    min_tokens: ClassVar = 2

    def chunk_length(self, features: Features) -> int:
        """Tokens of raw text an example is made of: as many as the longer side holds."""
        if max(features.capacity) < 2:
            raise ValueError(f"{features} holds no prefix with a continuation; use longer ones")
        return max(features.capacity)

    def example(
        self,
        tokens_L: np.ndarray,
        vocabulary: Vocabulary,
        features: Features,
        rng: np.random.Generator,
    ) -> Example:
        """Splits a chunk into a prefix and its continuation, a token or more each."""
        del vocabulary
        first, last = 1, len(tokens_L) - 1
        if isinstance(features, EncoderDecoderFeatures):
            first = max(first, len(tokens_L) - features.targets_length)
            last = min(last, features.inputs_length)
        split = rng.integers(first, last + 1)
        return Example(tokens_L[:split], tokens_L[split:])


@dataclasses.dataclass(frozen=True)
class CausalLM:
    """Text to be predicted from its first token on, EOS at the end of each document.

    T5's `full_lm`. For decoder-only models.
    """

    reads: ClassVar = ("text",)
    joins_with_eos: ClassVar = True
    ends_inputs_with_eos: ClassVar = False
    min_tokens: ClassVar = 1

    def chunk_length(self, features: Features) -> int:
        """Tokens of raw text an example is made of: a whole row.

        Raises:
            ValueError: the features have an encoder, which would have nothing to read.
        """
        if isinstance(features, EncoderDecoderFeatures):
            raise ValueError(
                "CausalLM has no inputs for an encoder; use PrefixLM or SpanCorruption, or "
                "DecoderOnlyFeatures with a decoder-only model"
            )
        return features.length

    def example(
        self,
        tokens_L: np.ndarray,
        vocabulary: Vocabulary,
        features: Features,
        rng: np.random.Generator,
    ) -> Example:
        """The whole chunk as targets."""
        del vocabulary, features, rng
        return Example(tokens_L[:0], tokens_L)


@dataclasses.dataclass(frozen=True)
class InputsToTargets:
    """Records that come as inputs and targets, each ended by EOS.

    Attributes:
        prefix: text put before all inputs, such as `translate English to German: `, by
            which one model tells the tasks of a mixture apart.
    """

    prefix: str = ""

    reads: ClassVar = ("inputs", "targets")
    ends_inputs_with_eos: ClassVar = True

    def example(self, record: dict[str, str], vocabulary: Vocabulary) -> Example:
        """Tokenizes a record."""

        def encode(text):
            return np.array([*vocabulary.encode(text), vocabulary.eos_id], np.int32)

        return Example(encode(self.prefix + record["inputs"]), encode(record["targets"]))


TextObjective = SpanCorruption | PrefixLM | CausalLM
Objective = TextObjective | InputsToTargets
