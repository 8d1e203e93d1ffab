# SPDX-License-Identifier: Apache-2.0
"""Features equal seqio's and T5's: numbers written down from their own tests.

Oracles: t5.data.preprocessors_test (`test_denoise`, `test_pack_prefix_lm_encoder_decoder`,
`test_pack_prefix_lm_decoder_only`) and seqio's feature_converters_test
(`test_encoder_decoder_unpacked`, `test_encoder_decoder_packed`). What is random there is given
here: masks and places of the split.
"""

import numpy as np

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.data.objectives import InputsToTargets, mark_spans
from switchx.data.packing import pack_rows
from tests.data.fakes import make_plan, make_task, pair_corpus, stream_of


def example(inputs, targets):
    return Example(np.array(inputs, np.int32), np.array(targets, np.int32))


def assert_rows(batch, **expected):
    assert batch.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_array_equal(batch[name], rows, err_msg=name)


def test_span_corruption():
    """`The quick brown fox.`, the spans [2] and [22, 3, 2, 7, 2] out; sentinels 25 and 24."""
    tokens = np.array([3, 2, 20, 4, 3, 2, 8, 13, 2, 3, 2, 23, 7, 19, 22, 3, 2, 7, 2], np.int32)
    mask = np.isin(np.arange(19), [8, 14, 15, 16, 17, 18])
    inputs, targets = (mark_spans(tokens, m, lambda i: 25 - i) for m in (mask, ~mask))
    assert inputs.tolist() == [3, 2, 20, 4, 3, 2, 8, 13, 25, 3, 2, 23, 7, 19, 24]
    assert targets.tolist() == [25, 2, 24, 22, 3, 2, 7, 2]
    row = example([*inputs, 1], [*targets, 1])
    assert_rows(
        EncoderDecoderFeatures(18, 10).batch([[row]]),
        encoder_input_tokens=[
            [3, 2, 20, 4, 3, 2, 8, 13, 25, 3, 2, 23, 7, 19, 24, 1, 0, 0]
        ],
        encoder_segment_ids=[[1] * 16 + [0] * 2],
        encoder_positions=[[*range(16), 0, 0]],
        decoder_target_tokens=[[25, 2, 24, 22, 3, 2, 7, 2, 1, 0]],
        decoder_input_tokens=[[0, 25, 2, 24, 22, 3, 2, 7, 2, 0]],
        decoder_segment_ids=[[1] * 9 + [0]],
        decoder_positions=[[*range(9), 0]],
        decoder_loss_weights=[[1] * 9 + [0]],
    )  # fmt: skip


def test_prefix_lm_of_an_encoder_decoder():
    """Chunks 0 to 31 split after 3, 5, 5 and 3 of 8 tokens, two in each row."""
    split = [
        example(range(first, first + at), range(first + at, first + 8))
        for first, at in ((0, 3), (8, 5), (16, 5), (24, 3))
    ]
    assert_rows(
        EncoderDecoderFeatures(8, 8).batch([split[:2], split[2:]]),
        encoder_input_tokens=[[0, 1, 2, 8, 9, 10, 11, 12], [16, 17, 18, 19, 20, 24, 25, 26]],
        decoder_target_tokens=[[3, 4, 5, 6, 7, 13, 14, 15], [21, 22, 23, 27, 28, 29, 30, 31]],
        decoder_input_tokens=[[0, 3, 4, 5, 6, 0, 13, 14], [0, 21, 22, 0, 27, 28, 29, 30]],
        encoder_segment_ids=[[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 2, 2, 2]],
        encoder_positions=[[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]],
        decoder_loss_weights=[[1] * 8] * 2,
        decoder_segment_ids=[[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 2, 2, 2, 2, 2]],
        decoder_positions=[[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]],
    )


def test_prefix_lm_of_a_decoder():
    rows = [
        [example([9, 1, 2], [3, 4, 5, 6, 7])],
        [example([8, 9, 10, 11, 12], [13, 14, 15])],
    ]
    assert_rows(
        DecoderOnlyFeatures(8).batch(rows),
        decoder_target_tokens=[[9, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        decoder_input_tokens=[[0, 9, 1, 2, 3, 4, 5, 6], [0, 8, 9, 10, 11, 12, 13, 14]],
        decoder_loss_weights=[[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1]],
        # T5's decoder_causal_attention
        decoder_prefix_mask=[[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]],
        decoder_segment_ids=[[1] * 8] * 2,
        decoder_positions=[[*range(8)]] * 2,
    )


def test_text_to_text_packed():
    """The two examples of seqio's packed test, as texts, through tokenizing and packing."""
    corpus = pair_corpus(("7 8 5", "3 9"), ("8 4 9 3", "4"))
    features = EncoderDecoderFeatures(10, 7)
    plan = make_plan(
        make_task("pairs", corpus, InputsToTargets()), features=features, is_finite=True
    )
    rows = pack_rows(stream_of(plan), features)
    assert_rows(
        features.batch(rows),
        encoder_input_tokens=[[7, 8, 5, 1, 8, 4, 9, 3, 1, 0]],
        encoder_segment_ids=[[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]],
        encoder_positions=[[0, 1, 2, 3, 0, 1, 2, 3, 4, 0]],
        decoder_target_tokens=[[3, 9, 1, 4, 1, 0, 0]],
        decoder_input_tokens=[[0, 3, 9, 0, 4, 0, 0]],
        decoder_loss_weights=[[1, 1, 1, 1, 1, 0, 0]],
        decoder_segment_ids=[[1, 1, 1, 2, 2, 0, 0]],
        decoder_positions=[[0, 1, 2, 0, 1, 0, 0]],
    )
