# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods are those of one forward pass a pair, whatever it is batched with."""

import dataclasses

import jax
import numpy as np
import pytest

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.inference.generate import without_capacity
from switchx.inference.score import Scorer
from tests.training.jobs import ENCODER_DECODER, SPARSE, SWITCH, make_params, run_model

EVERY = dataclasses.replace(SWITCH, every=1)
T5 = dataclasses.replace(
    ENCODER_DECODER, num_encoder_layers=1, num_decoder_layers=1, switch=EVERY
)
PAIRS = [([5, 6, 7], [8, 9, 1]), ([300], [4]), ([9, 8], [7, 6, 5, 4, 1]), ([3, 3], [3])]


def scores_of(config, pairs=PAIRS, **settings):
    scorer = Scorer(without_capacity(config), make_params(config), **settings)
    return [score for _, score in sorted(scorer(pairs))]


def logits_of(config, batch):
    """Those of one forward pass."""
    config, params = without_capacity(config), make_params(config)
    return run_model(config, params, batch, is_training=False)[0]


def log_likelihood(config, pair) -> float:
    """As training lays the pair out: `data/features.py` in rows of 8."""
    features = EncoderDecoderFeatures(8, 8) if config.is_encoder_decoder else None
    features = features or DecoderOnlyFeatures(8)
    batch = features.batch([[Example(*map(np.array, pair))]])
    logits_BLV = logits_of(config, batch)
    log_prob_LV = np.asarray(jax.nn.log_softmax(logits_BLV[0]))
    target_L = batch["decoder_target_tokens"][0]
    log_prob_L = log_prob_LV[np.arange(8), target_L]
    return float(np.sum(log_prob_L * batch["decoder_loss_weights"][0]))


@pytest.mark.parametrize("config", [T5, SPARSE], ids=["t5", "decoder"])
def test_scores_are_those_of_training_whatever_the_batch(config):
    want = [log_likelihood(config, pair) for pair in PAIRS]
    # Features of a decoder-only model show the inputs whole.
    for settings in ({}, {"batch_size": 2}):
        got = scores_of(config, is_prompt_bidirectional=True, **settings)
        np.testing.assert_allclose([each.log_likelihood for each in got], want, rtol=1e-5)
        assert [each.num_tokens for each in got] == [3, 1, 5, 1]


def test_a_causal_prompt_gives_other_scores():
    causal = scores_of(SPARSE)
    whole = scores_of(SPARSE, is_prompt_bidirectional=True)
    assert abs(causal[0].log_likelihood - whole[0].log_likelihood) > 1e-3


@pytest.mark.parametrize("config", [T5, pytest.param(SPARSE, marks=pytest.mark.slow)])
def test_each_token_has_a_log_probability(config):
    plain, scores = scores_of(config), scores_of(config, logprobs=2)
    for whole, score, (_, targets) in zip(plain, scores, PAIRS, strict=True):
        assert score.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-5)
        assert sum(score.token_logprobs) == pytest.approx(score.log_likelihood, rel=1e-5)
        for token, own, top in zip(
            targets, score.token_logprobs, score.top_logprobs, strict=True
        ):
            assert len(top) == 2 and list(top.values()) == sorted(top.values(), reverse=True)
            assert top.get(token, own) == pytest.approx(own, abs=1e-5) and own < 0
            assert token in top or own < min(top.values())
    assert whole.token_logprobs is whole.top_logprobs is None
    assert scores_of(config, logprobs=0)[0].top_logprobs is None


@pytest.mark.parametrize("config", [T5, pytest.param(SPARSE, marks=pytest.mark.slow)])
def test_a_forced_prefix_is_read_and_not_scored(config):
    """log p(target | prefix) is log p(prefix, target) - log p(prefix)."""
    prefix = [4, 6]
    got = scores_of(config, forced_prefix=prefix, logprobs=0)
    both = scores_of(config, [(inputs, [*prefix, *targets]) for inputs, targets in PAIRS])
    alone = scores_of(config, [(inputs, prefix) for inputs, _ in PAIRS])
    for score, whole, first in zip(got, both, alone, strict=True):
        want = whole.log_likelihood - first.log_likelihood
        assert score.log_likelihood == pytest.approx(want, abs=2e-5)
        assert sum(score.token_logprobs) == pytest.approx(want, abs=2e-5)
        assert score.num_tokens == whole.num_tokens - 2


@pytest.mark.parametrize("start_id", [None, 9])
def test_a_text_is_scored_from_the_token_on_that_is_predicted(start_id):
    """The sum of log p of each token that something stands before; without a start, 0 is a
    token as others are."""
    pairs = [([], [5, 0, 7]), ([0], [0, 4]), ([9, 0], [7])]
    for (inputs, targets), score in zip(
        pairs, scores_of(SPARSE, pairs, start_id=start_id, logprobs=1), strict=True
    ):
        read = [*([] if start_id is None else [start_id]), *inputs, *targets]
        batch = DecoderOnlyFeatures(8).batch(
            [[Example(np.zeros(0, int), np.array(read))]], None
        )
        log_prob_LV = np.asarray(jax.nn.log_softmax(logits_of(SPARSE, batch)[0]))
        want = [log_prob_LV[i - 1, read[i]] if i else None for i in range(len(read))]
        want = want[-len(targets) :]
        assert score.token_logprobs == [pytest.approx(x, rel=1e-5) if x else x for x in want]
        predicted = [x for x in want if x is not None]
        assert score.num_tokens == len(predicted)
        assert score.log_likelihood == pytest.approx(sum(predicted), rel=1e-5)
    if start_id is None:
        # As long as the model's positions and one more, which is predicted alone.
        long = [([7, 5], [3, 4]), ([7], [5, 3, 4, 6])]
        limited = dataclasses.replace(SPARSE, positions="learned", max_length=4)
        fits, longest = scores_of(limited, long, start_id=None, logprobs=0)
        assert longest.token_logprobs[:3] == pytest.approx(
            scores_of(limited, [([7], [5, 3, 4])], start_id=None, logprobs=0)[0].token_logprobs
        )
        assert fits.num_tokens == 2 and longest.num_tokens == 4
        with pytest.raises(ValueError, match="needs 5 positions, the model has 4"):
            scores_of(limited, [([7], [5, 3, 4, 6, 2])], start_id=None)
        with pytest.raises(ValueError, match="has one token, which nothing stands before"):
            scores_of(SPARSE, [([], [3])], start_id=None)


def test_wrong_settings_are_refused():
    for settings, said in (
        ({"logprobs": 6}, "logprobs=6; use 0 to 5"),
        ({"forced_prefix": [384]}, "the vocabulary has 0 to 383, not 384"),
        ({"forced_prefix": [-1]}, "forced_prefix"),
    ):
        with pytest.raises(ValueError, match=said):
            scores_of(T5, **settings)


def test_numbers_go_on():
    scorer = Scorer(without_capacity(T5), make_params(T5))
    assert sorted(number for number, _ in scorer(PAIRS, first_number=10)) == [10, 11, 12, 13]


LEARNED = dataclasses.replace(SPARSE, positions="learned", max_length=4)


@pytest.mark.parametrize(
    ("config", "pair", "said"),
    [
        (T5, ([], [3]), "pair 1 has no inputs"),
        (SPARSE, ([3], []), "pair 1 has no targets"),
        (SPARSE, ([384], [3]), "pair 1 has token id 384, the vocabulary has 0 to 383"),
        (LEARNED, ([3, 3], [3, 3, 3]), "pair 1 needs 5 positions, the model has 4"),
    ],
)
def test_bad_pairs_are_refused_before_anything_runs(config, pair, said):
    with pytest.raises(ValueError, match=said):
        list(Scorer(config, {})([([3], [3]), pair]))


def test_batches_of_nothing_are_refused():
    with pytest.raises(ValueError, match="batch_size=0; use 1 to"):
        Scorer(SPARSE, {}, batch_size=0)
