# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from switchx.data.batches import (
    BatchConfig,
    RowBatches,
    Shard,
    join_rows,
)
from switchx.data.features import EncoderDecoderFeatures
from switchx.data.objectives import SpanCorruption
from tests.data.fakes import make_plan, make_task, numbers, text_corpus

FEATURES = EncoderDecoderFeatures(16, 8)
TASK = make_task("t", text_corpus(*(numbers(100, 20 + i) for i in range(9))), SpanCorruption())
PLAN = make_plan(TASK, features=FEATURES, num_rows=5)


def row_batches():
    return RowBatches(PLAN, True, range(5), np.tile(PLAN.new_cursor(), (5, 1)))


@pytest.mark.parametrize("batch_size, count", [(8, 1), (8, 2), (8, 8), (6, 3)])
def test_shards_partition_the_rows(batch_size, count):
    parts = [Shard((index,), count).rows(batch_size) for index in range(count)]
    assert [row for part in parts for row in part] == list(range(batch_size))
    assert len(set(map(len, parts))) == 1


def test_a_shard_may_have_gaps():
    assert Shard((0, 2), 4).rows(8) == (0, 1, 4, 5)


def test_shards_must_divide_the_batch():
    with pytest.raises(
        ValueError,
        match="batch_size=4 is not divisible by the 3 parts that processes share; use "
        "batch_size=3 or 6, or a mesh whose parts divide 4",
    ):
        Shard((0,), 3).rows(4)
    with pytest.raises(ValueError, match="by the 8 parts .* use batch_size=8, or"):
        Shard((0,), 8).rows(4)
    for parts, named in (((2,), "2"), ((1, 0), "1, 0"), ((0, 0), "0, 0"), ((), "none")):
        with pytest.raises(ValueError, match=f"parts {named} of 2; use some of 0 to count - 1"):
            Shard(parts, 2)
    with pytest.raises(ValueError, match="batch_size=0; use at least 1"):
        BatchConfig(FEATURES, 0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_workers_parts_make_up_the_batch(num_workers):
    parts = []
    for worker in range(num_workers):
        dataset = row_batches()
        dataset.set_slice(slice(worker, None, num_workers))
        parts.append(next(iter(dataset)))
    batch, cursors = next(iter(row_batches()))
    joined, joined_cursors = join_rows(parts)
    assert joined.keys() == batch.keys()
    for name in batch:
        np.testing.assert_array_equal(joined[name], batch[name])
    np.testing.assert_array_equal(joined_cursors, cursors)
