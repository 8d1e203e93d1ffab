# SPDX-License-Identifier: Apache-2.0
"""Attention masks against loops over positions, and one written out by hand."""

import numpy as np

from switchx.layers.attention import causal_mask, segment_mask

SEGMENT_BL = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]])


def test_segment_mask_equals_a_loop():
    segment_BM = np.array([[1, 2, 2, 0], [1, 1, 1, 1]])
    mask_BLM = np.asarray(segment_mask(SEGMENT_BL, segment_BM))
    assert mask_BLM.shape == (2, 6, 4)
    for b, i, j in np.ndindex(2, 6, 4):
        query, key = SEGMENT_BL[b, i], segment_BM[b, j]
        assert mask_BLM[b, i, j] == (query == key and key != 0)


def test_causal_mask_by_hand():
    expected_LM = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],  # the second example starts anew
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],  # padding sees nothing, itself neither
    ]
    np.testing.assert_array_equal(causal_mask(SEGMENT_BL)[0], np.array(expected_LM, bool))


def test_a_prefix_in_every_example_equals_a_loop():
    rng = np.random.default_rng(0)
    segment_BL = np.sort(rng.integers(0, 4, (3, 9)), axis=1)[:, ::-1]
    prefix_BL = rng.integers(0, 2, (3, 9))
    mask_BLM = np.asarray(causal_mask(segment_BL, prefix_BL))
    for b, i, j in np.ndindex(3, 9, 9):
        is_same = segment_BL[b, i] == segment_BL[b, j] != 0
        assert mask_BLM[b, i, j] == (is_same and (j <= i or prefix_BL[b, j] == 1))
