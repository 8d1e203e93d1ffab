# SPDX-License-Identifier: Apache-2.0
"""Objectives: T5's own tests, the paper's figure, loops in Python."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures
from switchx.data.objectives import (
    CausalLM,
    InputsToTargets,
    PrefixLM,
    SpanCorruption,
    SpanCounts,
    corrupt_spans,
    count_spans,
    fit_inputs_length,
    fit_joint_length,
    mark_spans,
    noise_mask,
)
from tests.data.fakes import NumberVocabulary

VOCABULARY = NumberVocabulary()
# T5's density and mean length.
NOISE = (0.15, 3.0)
T5_LENGTHS = EncoderDecoderFeatures(512, 114)


def examples(objective, features, count=200):
    chunk = np.arange(100, 100 + objective.chunk_length(features), dtype=np.int32)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        yield chunk, objective.example(chunk, VOCABULARY, features, rng)


def test_span_corruption_fills_t5s_lengths_and_a_decoder():
    assert SpanCorruption().chunk_length(T5_LENGTHS) == 568
    _, example = next(examples(SpanCorruption(), T5_LENGTHS))
    assert T5_LENGTHS.size(example) == (512, 114)
    features = DecoderOnlyFeatures(64)
    _, example = next(examples(SpanCorruption(), features))
    # 56 tokens: round(8.4) = 8 of noise in round(2.67) = 3 spans; 52 + 12 = 64.
    assert (len(example.inputs), len(example.targets)) == (48 + 3 + 1, 8 + 3 + 1)


@pytest.mark.parametrize(
    "features, splits",
    [
        (EncoderDecoderFeatures(8, 8), range(1, 8)),  # of 8 tokens: T5's uniform split
        (EncoderDecoderFeatures(8, 3), range(5, 8)),  # of 8: no more than 3 after
        (EncoderDecoderFeatures(3, 8), range(1, 4)),  # of 8: no more than 3 before
        (DecoderOnlyFeatures(8), range(1, 8)),
    ],
)
def test_prefix_lm_splits_where_both_sides_fit(features, splits):
    seen = set()
    for chunk, example in examples(PrefixLM(), features):
        np.testing.assert_array_equal(np.r_[example.inputs, example.targets], chunk)
        seen.add(len(example.inputs))
    assert seen == set(splits)


def test_objectives_without_noise():
    chunk, example = next(examples(CausalLM(), DecoderOnlyFeatures(8)))
    assert len(example.inputs) == 0
    np.testing.assert_array_equal(example.targets, chunk)
    with pytest.raises(ValueError, match="CausalLM has no inputs for an encoder; use PrefixLM"):
        CausalLM().chunk_length(T5_LENGTHS)
    example = InputsToTargets(prefix="7 ").example(
        {"inputs": "5 6", "targets": "8"}, VOCABULARY
    )
    assert (example.inputs.tolist(), example.targets.tolist()) == ([7, 5, 6, 1], [8, 1])


EOS = VOCABULARY.eos_id


def ids(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "inputs_length, noise_density, mean_span_length, expected",
    [
        (512, 0.15, 3.0, (568, 114)),  # the paper's
        (64, 0.20, 2.0, (70, 22)),  # t5.data.preprocessors_test.test_random_spans_helper
        (64, 0.20, 1.0, (63, 27)),
        # Half density, spans of 3: 1534 tokens give 767 + 256 + 1 = 1024 on both sides.
        (1024, 0.50, 3.0, (1534, 1024)),
        # 39 tokens: round(19.5) = 20 of noise in 7 spans, inputs 19 + 7 + 1 = 27, targets
        # 28. That is T5's exception; 38 tokens: 19 in 6 spans, 26 on both sides.
        (27, 0.50, 3.0, (38, 26)),
    ],
)
def test_lengths(inputs_length, noise_density, mean_span_length, expected):
    counts = fit_inputs_length(inputs_length, noise_density, mean_span_length)
    assert (counts.raw_length, counts.targets_length) == expected
    assert counts.inputs_length <= inputs_length


def test_joint_length_and_one_span_at_the_end():
    # 13 tokens: 2 of noise in 1 span, 11 + 1 + 1 and 2 + 1 + 1 make 17. 14: also 2, 18.
    assert fit_joint_length(17, *NOISE).raw_length == 13
    assert fit_joint_length(18, *NOISE).raw_length == 14
    # round(5 * 0.3) = 2 tokens of noise (1.5 rounds to even), round(2 / 3) = 1 span: with a
    # kept span first there is one mask.
    counts = count_spans(5, 0.3, 3.0)
    inputs, targets = corrupt_spans(
        ids(5, 6, 7, 8, 9), counts, VOCABULARY, np.random.default_rng(0)
    )
    np.testing.assert_array_equal(inputs, [5, 6, 7, 999, EOS])
    np.testing.assert_array_equal(targets, [999, 8, 9, EOS])


def test_marks_as_t5_does_and_as_figure_2_of_the_paper():
    # Tokens and mask of t5's test_noise_span_to_unique_sentinel.
    tokens, mask = ids(10, 11, 12, 13, 14, 15), np.array([1, 1, 0, 0, 1, 0], bool)
    inputs = mark_spans(tokens, mask, VOCABULARY.sentinel_id)
    targets = mark_spans(tokens, ~mask, VOCABULARY.sentinel_id)
    np.testing.assert_array_equal(inputs, [999, 12, 13, 998, 15])
    np.testing.assert_array_equal(targets, [10, 11, 999, 14, 998])
    words = "Thank you for inviting me to your party last week".split()
    noise = {"for", "inviting", "last"}
    mask = np.array([word in noise for word in words])
    tokens = np.arange(len(words), dtype=np.int32)

    def spell(marked):
        return " ".join(words[t] if t < len(words) else f"<{'XYZ'[999 - t]}>" for t in marked)

    sentinel = VOCABULARY.sentinel_id
    assert (
        spell(mark_spans(tokens, mask, sentinel)) == "Thank you <X> me to your party <Y> week"
    )
    assert spell(mark_spans(tokens, ~mask, sentinel)) == "<X> for inviting <Y> last <Z>"


def test_masks_are_equally_likely():
    # 3 noise tokens in 2 spans: 1+2, 2+1; 4 kept ones in 2: 1+3, 2+2, 3+1; 6 masks.
    counts = SpanCounts(raw_length=7, num_noise=3, num_spans=2)
    rng = np.random.default_rng(0)
    drawn = collections.Counter(tuple(noise_mask(counts, rng).astype(int)) for _ in range(6000))
    assert (0, 1, 0, 0, 0, 1, 1) in drawn and (0, 0, 0, 1, 1, 0, 1) in drawn
    assert len(drawn) == 6
    # Standard deviation of each count: sqrt(6000 * 1/6 * 5/6) = 29.
    assert all(abs(count - 1000) < 4 * 29 for count in drawn.values())


def restore(inputs, targets):
    """The text that inputs and targets were made of, by a loop over sentinels."""
    assert inputs[-1] == EOS and targets[-1] == EOS
    spans, span = {}, None
    for token in targets[:-1]:
        if token > 900:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    assert list(spans) == [999 - i for i in range(len(spans))]
    text = []
    for token in inputs[:-1]:
        text += spans[token] if token > 900 else [token]
    return text


@given(
    raw_length=st.integers(2, 400),
    noise_density=st.floats(0.05, 0.5),
    mean_span_length=st.floats(2.0, 8.0),
    seed=st.integers(0, 2**32),
)
def test_nothing_is_lost(raw_length, noise_density, mean_span_length, seed):
    counts = count_spans(raw_length, noise_density, mean_span_length)
    if counts.num_spans > 99:
        return
    tokens = np.arange(3, 3 + raw_length, dtype=np.int32)
    inputs, targets = corrupt_spans(tokens, counts, VOCABULARY, np.random.default_rng(seed))
    assert restore(inputs.tolist(), targets.tolist()) == tokens.tolist()
    assert (len(inputs), len(targets)) == (counts.inputs_length, counts.targets_length)


@given(inputs_length=st.integers(10, 2000))
def test_lengths_as_random_spans_helper(inputs_length):
    """T5's arithmetic, said once more; below 10 it gives texts that its mask then extends."""
    raw_length = inputs_length - 1
    while True:
        num_noise = round((raw_length + 1) * 0.15)
        if raw_length + 1 - num_noise + round(num_noise / 3) + 1 > inputs_length:
            break
        raw_length += 1
    num_noise = round(raw_length * 0.15)
    counts = fit_inputs_length(inputs_length, *NOISE)
    assert counts.raw_length == raw_length
    assert counts.targets_length == num_noise + round(num_noise / 3) + 1


def test_errors():
    with pytest.raises(ValueError, match="span corruption of 1 tokens; use at least 2"):
        count_spans(1, 0.15, 3.0)
    with pytest.raises(ValueError, match="noise_density=0.9 leaves too few tokens between"):
        count_spans(10, 0.9, 1.0)
    with pytest.raises(ValueError, match="inputs_length=2 is too short for any text"):
        fit_inputs_length(2, *NOISE)
    with pytest.raises(ValueError, match="length=5 is too short for any text"):
        fit_joint_length(5, *NOISE)
    few = NumberVocabulary(num_sentinels=27)
    with pytest.raises(ValueError, match="28 spans in 568 tokens, .* has 27 sentinels"):
        corrupt_spans(
            np.zeros(568, np.int32),
            fit_inputs_length(512, *NOISE),
            few,
            np.random.default_rng(0),
        )
    with pytest.raises(
        ValueError,
        match="makes targets of 114 tokens, got targets_length=113; "
        "use targets_length=114 or more",
    ):
        SpanCorruption().chunk_length(EncoderDecoderFeatures(512, 113))
    with pytest.raises(ValueError, match="noise_density=1.0; use one between 0 and 1"):
        SpanCorruption(noise_density=1.0)
    with pytest.raises(ValueError, match="mean_span_length=0.5; use at least 1"):
        SpanCorruption(mean_span_length=0.5)
