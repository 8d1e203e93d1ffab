# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures
from switchx.data.objectives import (
    CausalLM,
    InputsToTargets,
    PrefixLM,
    SpanCorruption,
)
from tests.data.fakes import NumberVocabulary

VOCABULARY = NumberVocabulary()
T5_LENGTHS = EncoderDecoderFeatures(512, 114)


def examples(objective, features, count=200):
    chunk = np.arange(100, 100 + objective.chunk_length(features), dtype=np.int32)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        yield chunk, objective.example(chunk, VOCABULARY, features, rng)


def test_span_corruption_fills_t5s_lengths():
    assert SpanCorruption().chunk_length(T5_LENGTHS) == 568
    _, example = next(examples(SpanCorruption(), T5_LENGTHS))
    assert T5_LENGTHS.size(example) == (512, 114)


def test_span_corruption_fills_a_decoder():
    features = DecoderOnlyFeatures(64)
    _, example = next(examples(SpanCorruption(), features))
    # 56 tokens: round(8.4) = 8 of noise in round(2.67) = 3 spans; 52 + 12 = 64.
    assert (len(example.inputs), len(example.targets)) == (48 + 3 + 1, 8 + 3 + 1)


def test_span_corruption_errors():
    with pytest.raises(
        ValueError,
        match="makes targets of 114 tokens, got targets_length=113; "
        "use targets_length=114 or more",
    ):
        SpanCorruption().chunk_length(EncoderDecoderFeatures(512, 113))
    with pytest.raises(ValueError, match="noise_density=1.0; use one between 0 and 1"):
        SpanCorruption(noise_density=1.0)
    with pytest.raises(ValueError, match="mean_span_length=0.5; use at least 1 token"):
        SpanCorruption(mean_span_length=0.5)


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


def test_causal_lm():
    chunk, example = next(examples(CausalLM(), DecoderOnlyFeatures(8)))
    assert len(example.inputs) == 0
    np.testing.assert_array_equal(example.targets, chunk)
    with pytest.raises(ValueError, match="CausalLM has no inputs for an encoder; use PrefixLM"):
        CausalLM().chunk_length(T5_LENGTHS)


def test_inputs_to_targets():
    example = InputsToTargets(prefix="7 ").example(
        {"inputs": "5 6", "targets": "8"}, VOCABULARY
    )
    assert (example.inputs.tolist(), example.targets.tolist()) == ([7, 5, 6, 1], [8, 1])
