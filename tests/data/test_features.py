# SPDX-License-Identifier: Apache-2.0
"""Oracle: the examples in the docstrings of seqio's feature converters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.features import (
    DecoderOnlyFeatures,
    EncoderDecoderFeatures,
    Example,
    batch_digest,
)


def example(inputs, targets):
    return Example(np.array(inputs, np.int32), np.array(targets, np.int32))


SEQIO_ROW = [example([7, 8, 5, 1], [3, 9, 1]), example([8, 4, 9, 3, 1], [4, 1])]


def assert_row(batch, row, expected):
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name][row], values, err_msg=name)
    assert batch.keys() == expected.keys()


def test_encoder_decoder_as_seqio():
    batch = EncoderDecoderFeatures(10, 7).batch([SEQIO_ROW, []])
    assert_row(batch, 0, {
        "encoder_input_tokens": [7, 8, 5, 1, 8, 4, 9, 3, 1, 0],
        "encoder_segment_ids": [1, 1, 1, 1, 2, 2, 2, 2, 2, 0],
        "encoder_positions": [0, 1, 2, 3, 0, 1, 2, 3, 4, 0],
        "decoder_target_tokens": [3, 9, 1, 4, 1, 0, 0],
        "decoder_input_tokens": [0, 3, 9, 0, 4, 0, 0],
        "decoder_loss_weights": [1, 1, 1, 1, 1, 0, 0],
        "decoder_segment_ids": [1, 1, 1, 2, 2, 0, 0],
        "decoder_positions": [0, 1, 2, 0, 1, 0, 0],
    })  # fmt: skip
    for name, array in batch.items():
        assert not array[1].any(), "an empty row is padding"
        assert array.dtype == (np.float32 if name == "decoder_loss_weights" else np.int32)


def test_decoder_only_as_seqio():
    batch = DecoderOnlyFeatures(15).batch([SEQIO_ROW])
    assert_row(batch, 0, {
        "decoder_target_tokens": [7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0],
        "decoder_input_tokens": [0, 7, 8, 5, 1, 3, 9, 0, 8, 4, 9, 3, 1, 4, 0],
        "decoder_loss_weights": [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0],
        "decoder_positions": [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0],
        "decoder_segment_ids": [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0],
        # seqio's decoder_causal_attention
        "decoder_prefix_mask": [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
    })  # fmt: skip


def test_without_a_start_all_tokens_are_read_and_predict_the_next_one():
    """The labels of transformers' decoders: inputs shifted left, the last one of no weight."""
    batch = DecoderOnlyFeatures(15).batch([SEQIO_ROW], start_id=None)
    assert_row(batch, 0, {
        "decoder_target_tokens": [8, 5, 1, 3, 9, 1, 0, 4, 9, 3, 1, 4, 1, 0, 0],
        "decoder_input_tokens": [7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0],
        "decoder_loss_weights": [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        "decoder_positions": [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0],
        "decoder_segment_ids": [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0],
        "decoder_prefix_mask": [1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0],
    })  # fmt: skip
    with pytest.raises(ValueError, match="no start_id, and the decoder of an encoder-decoder"):
        EncoderDecoderFeatures(10, 7).batch([SEQIO_ROW], start_id=None)


@pytest.mark.parametrize("features", [EncoderDecoderFeatures(10, 7), DecoderOnlyFeatures(15)])
def test_another_start_stands_where_0_did(features):
    ours, theirs = (features.batch([SEQIO_ROW, []], start_id) for start_id in (0, 6))
    is_first_BL = (ours["decoder_positions"] == 0) & (ours["decoder_segment_ids"] > 0)
    theirs["decoder_input_tokens"][is_first_BL] -= 6
    for name in ours:
        np.testing.assert_array_equal(theirs[name], ours[name])


def test_causal_as_seqio():
    batch = DecoderOnlyFeatures(6).batch([[example([], [3, 9, 1]), example([], [4, 1])]])
    assert_row(batch, 0, {
        "decoder_target_tokens": [3, 9, 1, 4, 1, 0],
        "decoder_input_tokens": [0, 3, 9, 0, 4, 0],
        "decoder_loss_weights": [1, 1, 1, 1, 1, 0],
        "decoder_positions": [0, 1, 2, 0, 1, 0],
        "decoder_segment_ids": [1, 1, 1, 2, 2, 0],
        "decoder_prefix_mask": [0, 0, 0, 0, 0, 0],
    })  # fmt: skip


def test_a_causal_example_beside_a_bidirectional_one():
    causal = SEQIO_ROW[0]._replace(is_prefix_bidirectional=False)
    both = DecoderOnlyFeatures(15).batch([SEQIO_ROW])
    batch = DecoderOnlyFeatures(15).batch([[causal, SEQIO_ROW[1]]])
    # The weights and all tokens are as with a bidirectional prefix; the mask is not.
    mask = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert_row(batch, 0, {name: rows[0] for name, rows in both.items()} | {
        "decoder_prefix_mask": mask
    })  # fmt: skip
    cut = DecoderOnlyFeatures(6).truncate(causal, eos_id=1)
    assert not cut.is_prefix_bidirectional


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=3))
def test_prefix_never_shows_a_target(sizes):
    """What stands in the bidirectional part is only ever read, never predicted there."""
    row = [example(range(10, 10 + n), range(20, 20 + m)) for n, m in sizes]
    batch = DecoderOnlyFeatures(24).batch([row])
    in_prefix = batch["decoder_prefix_mask"][0] == 1
    assert not np.any(batch["decoder_input_tokens"][0][in_prefix] >= 20)
    assert batch["decoder_loss_weights"].sum() == sum(m for _, m in sizes)
    assert np.all(batch["decoder_target_tokens"][batch["decoder_loss_weights"] > 0] >= 20)


def test_truncation_keeps_eos():
    long = example([5, 6, 7, 1], [8, 9, 10, 1])
    cut = EncoderDecoderFeatures(3, 4).truncate(long, eos_id=1)
    assert (cut.inputs.tolist(), cut.targets.tolist()) == ([5, 6, 1], [8, 9, 10, 1])
    cut = DecoderOnlyFeatures(6).truncate(long, eos_id=1)
    assert (cut.inputs.tolist(), cut.targets.tolist()) == ([5, 1], [8, 9, 10, 1])
    cut = DecoderOnlyFeatures(3).truncate(long, eos_id=1)
    assert (cut.inputs.tolist(), cut.targets.tolist()) == ([1], [8, 1])
    assert long.inputs.tolist() == [5, 6, 7, 1], "the example itself stays"


def test_digest_tells_batches_apart():
    features = EncoderDecoderFeatures(10, 7)
    digest = batch_digest(features.batch([SEQIO_ROW]))
    assert len(digest) == 12 and int(digest, 16) >= 0
    assert digest == batch_digest(features.batch([SEQIO_ROW]))
    assert digest != batch_digest(features.batch([SEQIO_ROW[:1]]))
    assert digest != batch_digest(features.batch([SEQIO_ROW, []]))


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="targets_length=0; use at least 1"):
        EncoderDecoderFeatures(4, 0)
    with pytest.raises(ValueError, match="length=1; use at least 2"):
        DecoderOnlyFeatures(1)
