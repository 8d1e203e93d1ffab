# SPDX-License-Identifier: Apache-2.0
"""Objectives: how a corpus's records become examples of inputs and targets.

Raffel et al. 2020 (arXiv:1910.10683), sections 3.1 and 3.2. For a `TextObjective`, documents
are tokenized, joined and cut into chunks of a fixed length, so that nothing is padding and
nothing is lost (seqio's `reduce_concat_tokens` and `split_tokens`); a chunk becomes one
example. A `RecordObjective` makes an example of each record.

T5's span corruption (section 3.1.4, figure 2): spans of the text become sentinels, the targets
spell them out. The arithmetic is that of `t5.data.preprocessors` (`random_spans_helper`,
`random_spans_noise_mask`, `noise_span_to_unique_sentinel`), in double precision throughout;
T5's mask rounds in single precision and so has one more noise token at a few lengths, such as
190.

    raw      We hold these truths to be self evident that all
    inputs   We hold <extra_id_0> to be <extra_id_1> </s>
    targets  <extra_id_0> these truths <extra_id_1> self evident that all </s>

Dims: L length of a text in tokens
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from switchx.data.features import EncoderDecoderFeatures, Example, Features
from switchx.data.tokenizers import Vocabulary
from switchx.fields import require, require_at_least


class Objective(abc.ABC):
    """The base of `TextObjective` and `RecordObjective`.

    Attributes:
        reads: keys of the records that the objective needs.
        ends_inputs_with_eos: whether its inputs end in EOS.
        has_sentinels: whether its inputs hold sentinels, as in span corruption.
        is_prefix_bidirectional: whether in a decoder-only model inputs attend to all inputs
            (prefix LM); otherwise each token attends only to those before it. An encoder's
            inputs attend to all in any case.
    """

    reads: ClassVar[tuple[str, ...]]
    ends_inputs_with_eos: ClassVar[bool]
    has_sentinels: ClassVar[bool] = False
    is_prefix_bidirectional = True

    @property
    def has_texts(self) -> bool:
        """Whether records have texts for inputs and targets, which metrics compare."""
        return {"inputs", "targets"} <= set(self.reads)


class TextObjective(Objective):
    """The base of objectives on chunks of running text: frozen dataclasses, a user's too.

    Attributes:
        joins_with_eos: whether EOS stands at the end of each document, and nowhere else.
        min_tokens: minimum length of a chunk, at the end of an evaluation split.
    """

    reads = ("text",)
    ends_inputs_with_eos = False
    joins_with_eos: ClassVar[bool] = True
    min_tokens: ClassVar[int] = 2

    @abc.abstractmethod
    def chunk_length(self, features: Features) -> int:
        """Number of raw text tokens that make an example.

        Raises:
            ValueError: the features are too short for an example.
        """

    @abc.abstractmethod
    def example(
        self,
        tokens_L: np.ndarray,
        vocabulary: Vocabulary,
        features: Features,
        rng: np.random.Generator,
    ) -> Example:
        """The example of a chunk; random choices are drawn from `rng`."""


class RecordObjective(Objective):
    """The base of objectives on records that are examples: frozen dataclasses, a user's too."""

    reads = ("inputs", "targets")
    ends_inputs_with_eos = True

    @abc.abstractmethod
    def example(self, record: dict[str, str], vocabulary: Vocabulary) -> Example:
        """The example of a record, of any length."""


def _prefix_choice() -> bool:
    # Left out of `repr`, by which loaders tell pipelines apart: it changes no token, and states
    # that were saved before the choice existed have a bidirectional prefix.
    return dataclasses.field(default=True, repr=False)


@dataclasses.dataclass(frozen=True)
class SpanCorruption(TextObjective):
    """Inputs with spans replaced by sentinels, targets that spell the spans out.

    Documents are joined without EOS between them, as T5's `span_corruption` does: its EOS
    only ever ends inputs and targets.

    Attributes:
        noise_density: share of the tokens that spans replace.
        mean_span_length: mean number of tokens in a span.
    """

    ends_inputs_with_eos = True
    has_sentinels = True
    joins_with_eos = False

    noise_density: float = 0.15
    mean_span_length: float = 3.0
    is_prefix_bidirectional: bool = _prefix_choice()

    def __post_init__(self):
        density = self.noise_density
        require(0 < density < 1, f"noise_density={density}; use one between 0 and 1")
        require_at_least(self, 1, "mean_span_length")

    def chunk_length(self, features: Features) -> int:
        """568 tokens for inputs of 512."""
        noise = (self.noise_density, self.mean_span_length)
        if not isinstance(features, EncoderDecoderFeatures):
            return fit_joint_length(features.length, *noise).raw_length
        counts = fit_inputs_length(features.inputs_length, *noise)
        require(
            counts.targets_length <= features.targets_length,
            f"span corruption of inputs_length={features.inputs_length} makes targets of "
            f"{counts.targets_length} tokens, got targets_length={features.targets_length}; "
            f"use targets_length={counts.targets_length} or more, or shorter inputs",
        )
        return counts.raw_length

    def example(self, tokens_L, vocabulary, features, rng) -> Example:
        """The corrupted chunk (`corrupt_spans`), whose length suits the features."""
        counts = count_spans(len(tokens_L), self.noise_density, self.mean_span_length)
        return Example(*corrupt_spans(tokens_L, counts, vocabulary, rng))


@dataclasses.dataclass(frozen=True)
class PrefixLM(TextObjective):
    """Text split at a random place: the inputs are what comes before, the targets what follows.

    The split is uniform among those where both sides fit. EOS stands at the end of each
    document and nowhere else, as in T5's `pack_prefix_lm_encoder_decoder` and
    `pack_prefix_lm_decoder_only`.
    """

    is_prefix_bidirectional: bool = _prefix_choice()

    def chunk_length(self, features: Features) -> int:
        """The length of the longer side of a row."""
        length = max(features.capacity)
        require(length >= 2, f"{features} holds no prefix with a continuation; use longer ones")
        return length

    def example(self, tokens_L, vocabulary, features, rng) -> Example:
        """A prefix of the chunk and its continuation, at least one token each."""
        first, last = 1, len(tokens_L) - 1
        if isinstance(features, EncoderDecoderFeatures):
            first = max(first, len(tokens_L) - features.targets_length)
            last = min(last, features.inputs_length)
        split = rng.integers(first, last + 1)
        return Example(tokens_L[:split], tokens_L[split:])


@dataclasses.dataclass(frozen=True)
class CausalLM(TextObjective):
    """Text to be predicted from its first token on, EOS at the end of each document.

    T5's `full_lm`. For decoder-only models.
    """

    is_prefix_bidirectional = False  # there is no prefix
    min_tokens = 1

    def chunk_length(self, features: Features) -> int:
        """A whole row."""
        require(
            not isinstance(features, EncoderDecoderFeatures),
            "CausalLM has no inputs for an encoder; use PrefixLM or SpanCorruption, or "
            "DecoderOnlyFeatures with a decoder-only model",
        )
        return features.length

    def example(self, tokens_L, vocabulary, features, rng) -> Example:
        """The whole chunk as targets."""
        return Example(tokens_L[:0], tokens_L)


@dataclasses.dataclass(frozen=True)
class InputsToTargets(RecordObjective):
    """Records that come as inputs and targets, each ended by EOS.

    Attributes:
        prefix: text put before all inputs, such as `translate English to German: `, by
            which one model tells the tasks of a mixture apart.
        is_prefix_bidirectional: whether in a decoder-only model inputs attend to all inputs, as
            in the prefix LM of Raffel et al. (section 3.2.1) and in all runs from before the
            option existed. False suits a model pretrained causally; T5X's decoder-only
            model is causal unless `inputs_bidirectional_attention` is set.
    """

    prefix: str = ""
    is_prefix_bidirectional: bool = _prefix_choice()

    def example(self, record: dict[str, str], vocabulary: Vocabulary) -> Example:
        """Tokenizes a record."""

        def encode(text):
            return np.array([*vocabulary.encode(text), vocabulary.eos_id], np.int32)

        return Example(encode(self.prefix + record["inputs"]), encode(record["targets"]))


# Names of built-in classes in descriptions of run folders; a user's class has its dotted name.
OBJECTIVES = {
    objective.__name__: objective
    for objective in (SpanCorruption, PrefixLM, CausalLM, InputsToTargets)
}


@dataclasses.dataclass(frozen=True)
class SpanCounts:
    """The sizes after corrupting a text of `raw_length` tokens, for every random draw."""

    raw_length: int
    num_noise: int
    num_spans: int

    @property
    def inputs_length(self) -> int:
        """The length of the inputs: the tokens kept, a sentinel for each span, and EOS."""
        return self.raw_length - self.num_noise + self.num_spans + 1

    @property
    def targets_length(self) -> int:
        """The spans, a sentinel before each, and EOS."""
        return self.num_noise + self.num_spans + 1


def count_spans(raw_length: int, noise_density: float, mean_span_length: float) -> SpanCounts:
    """The number of noise tokens and spans; at least one of each, and one token is kept.

    Raises:
        ValueError: there are fewer than 2 tokens, or more spans than kept tokens to stand
            between them.
    """
    require(
        raw_length >= 2,
        f"span corruption of {raw_length} tokens; use at least 2, one to keep and one to mask",
    )
    require(
        noise_density / mean_span_length <= 1 - noise_density,
        f"noise_density={noise_density} leaves too few tokens between spans of "
        f"mean_span_length={mean_span_length}; use a lower density or longer spans",
    )
    num_noise = min(max(round(raw_length * noise_density), 1), raw_length - 1)
    num_spans = max(round(num_noise / mean_span_length), 1)
    # Rounding can ask for one span too many in short texts at half density.
    return SpanCounts(raw_length, num_noise, min(num_spans, raw_length - num_noise))


def fit_inputs_length(
    inputs_length: int, noise_density: float, mean_span_length: float
) -> SpanCounts:
    """The longest text whose corrupted inputs, EOS included, fit `inputs_length` tokens.

    T5's `random_spans_helper`: inputs of 512 come from 568 tokens and need targets of 114.

    Raises:
        ValueError: `inputs_length` is below 3: a token, a sentinel and EOS.
    """
    noise = (noise_density, mean_span_length)
    found = _longest(noise, "inputs_length", inputs_length, lambda counts: counts.inputs_length)
    # T5's own exception: at half density targets are as long as inputs, a rounder number.
    if noise_density == 0.5 and found.targets_length > found.inputs_length:
        found = count_spans(found.raw_length - 1, *noise)
    return found


def fit_joint_length(length: int, noise_density: float, mean_span_length: float) -> SpanCounts:
    """The longest text whose inputs and targets together fit `length` tokens.

    Raises:
        ValueError: `length` is below 6: a token, a sentinel and EOS, twice.
    """
    noise = (noise_density, mean_span_length)
    return _longest(
        noise, "length", length, lambda counts: counts.inputs_length + counts.targets_length
    )


def _longest(
    noise: tuple[float, float], name: str, length: int, length_of: Callable[[SpanCounts], int]
) -> SpanCounts:
    """The counts of the longest text, of at least 2 tokens, that fits `length` tokens."""
    found = count_spans(2, *noise)
    if length < (least := length_of(found)):
        raise ValueError(f"{name}={length} is too short for any text; use at least {least}")
    while length_of(longer := count_spans(found.raw_length + 1, *noise)) <= length:
        found = longer
    return found


def noise_mask(counts: SpanCounts, rng: np.random.Generator) -> np.ndarray:
    """A random mask, true on noise: kept and noise spans alternate, beginning with a kept one.

    Every mask with these counts is equally likely (T5's `random_spans_noise_mask`), so the
    text always ends in a noise span.

    Returns:
        mask_L, boolean.
    """

    def segment(num_items):
        """Lengths of `num_spans` non-empty runs that make up `num_items`."""
        cuts = rng.permutation(num_items - 1)[: counts.num_spans - 1] + 1
        return np.diff(np.concatenate([[0], np.sort(cuts), [num_items]]))

    noise = segment(counts.num_noise)
    kept = segment(counts.raw_length - counts.num_noise)
    lengths = np.stack([kept, noise], axis=1).reshape(-1)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def mark_spans(
    tokens_L: np.ndarray, mask_L: np.ndarray, sentinel_id: Callable[[int], int]
) -> np.ndarray:
    """Replaces the i-th run of true in the mask by the single token `sentinel_id(i)`.

    T5's `noise_span_to_unique_sentinel`; with the mask inverted it makes the targets.
    """
    first_L = mask_L & ~np.concatenate([[False], mask_L[:-1]])
    marked_L = tokens_L.copy()
    marked_L[first_L] = [sentinel_id(i) for i in range(np.count_nonzero(first_L))]
    return marked_L[~mask_L | first_L]


def corrupt_spans(
    tokens_L: np.ndarray, counts: SpanCounts, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupts a text: inputs and targets, both ending in EOS, of the lengths in `counts`.

    Raises:
        ValueError: the vocabulary has fewer sentinels than there are spans. (T5 goes on
            with ordinary tokens there.)
    """
    if counts.num_spans > vocabulary.num_sentinels:
        raise ValueError(
            f"{counts.num_spans} spans in {counts.raw_length} tokens, but the vocabulary has "
            f"{vocabulary.num_sentinels} sentinels; use shorter inputs, longer spans, or a "
            "vocabulary with more sentinels"
        )
    mask_L = noise_mask(counts, rng)
    eos = np.array([vocabulary.eos_id], tokens_L.dtype)
    inputs_L = mark_spans(tokens_L, mask_L, vocabulary.sentinel_id)
    targets_L = mark_spans(tokens_L, ~mask_L, vocabulary.sentinel_id)
    return np.concatenate([inputs_L, eos]), np.concatenate([targets_L, eos])
