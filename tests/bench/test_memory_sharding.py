# SPDX-License-Identifier: Apache-2.0
"""What is read off compiled steps is what the arithmetic says."""

import pytest

from switchx.bench.memory_sharding import bucket_collectives, embedding_bytes


def test_a_split_table_takes_an_eighth_of_the_bytes():
    ratio, rows = embedding_bytes()
    assert ratio == 1 / 8
    replicated, split, *table_4 = rows
    saved = replicated["argument_bytes"] - split["argument_bytes"]
    # Parameter and two moments of 16384 words of 32 numbers, on seven of eight devices.
    assert saved == 12 * 16384 * 32 * 7 // 8
    # The notes' 18.6, 17.2 and 20.3 bytes a parameter, over 16.
    errors = [row["error"] for row in table_4]
    assert errors == pytest.approx([16 / 18.6 - 1, 16 / 17.2 - 1, 16 / 20.3 - 1], abs=3e-3)


def test_collectives_are_those_of_the_buckets():
    ratio, rows = bucket_collectives()
    assert ratio == 1
    one_each, several, one = rows
    assert one["buckets"] == 3  # outside of blocks, the dense block, the sparse one
    assert one["buckets"] < several["buckets"] < one_each["buckets"]
    assert len({row["all_reduces"] for row in rows}) == 1
