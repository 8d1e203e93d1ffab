# SPDX-License-Identifier: Apache-2.0
"""Relative position buckets against numbers worked by hand from the formula."""

import numpy as np

from switchx.layers.positions import relative_buckets


def bucket(distance: int, is_bidirectional: bool) -> int:
    """Bucket of a key `distance` positions before the query (negative: after it)."""
    size = 2 * abs(distance) + 1
    buckets_LM = relative_buckets(
        size, size, is_bidirectional=is_bidirectional, num_buckets=32, max_distance=128
    )
    query = size // 2
    return int(buckets_LM[query, query - distance]) if distance else int(buckets_LM[0, 0])


def test_causal_buckets():
    # 32 buckets: 16 exact, then 16 + floor(16 * ln(d / 16) / ln(8)), at most 31.
    for distance in range(16):
        assert bucket(distance, False) == distance
    assert bucket(16, False) == 16
    assert bucket(20, False) == 17  # 16 * ln(1.25) / 2.079 = 1.72
    assert bucket(32, False) == 21  # 16 * ln(2) / 2.079 = 5.33
    assert bucket(100, False) == 30  # 16 * ln(6.25) / 2.079 = 14.1
    assert bucket(128, False) == bucket(400, False) == 31
    assert bucket(-3, False) == bucket(-200, False) == 0


def test_bidirectional_buckets():
    # 16 a side: 8 exact, then 8 + floor(8 * ln(d / 8) / ln(16)); keys after the query: +16.
    for distance in range(8):
        assert bucket(distance, True) == distance
        assert bucket(-distance, True) == (16 + distance if distance else 0)
    assert bucket(10, True) == 8  # 8 * ln(1.25) / 2.77 = 0.64
    assert bucket(12, True) == 9  # 8 * ln(1.5) / 2.77 = 1.17
    assert bucket(64, True) == 14  # 8 * ln(8) / 2.77 = 6.0
    assert bucket(200, True) == 15
    assert bucket(-200, True) == 31


def test_one_step_of_decoding_is_a_row_of_the_table():
    arguments = dict(is_bidirectional=False, num_buckets=32, max_distance=128)
    table_LM = relative_buckets(40, 40, **arguments)
    row_LM = relative_buckets(1, 40, first_query=33, **arguments)
    np.testing.assert_array_equal(row_LM[0], table_LM[33])
