# SPDX-License-Identifier: Apache-2.0
import collections
import itertools

import numpy as np
import pytest

from switchx.data.features import EncoderDecoderFeatures
from switchx.data.objectives import InputsToTargets, SpanCorruption
from switchx.data.streams import RowStream
from tests.data.fakes import (
    make_plan,
    make_task,
    numbers,
    pair_corpus,
    stream_of,
    take,
    text_corpus,
)

PAIR_FEATURES = EncoderDecoderFeatures(6, 6)
PAIRS = make_task(
    "pairs", pair_corpus(*((str(10 + i), str(50 + i)) for i in range(7))), InputsToTargets()
)


def test_mixture_draws_at_its_rates():
    plan = make_plan(
        make_task("a", pair_corpus(("10", "11")), InputsToTargets()),
        make_task("b", pair_corpus(("20", "21")), InputsToTargets()),
        make_task("c", pair_corpus(("30", "31")), InputsToTargets()),
        features=PAIR_FEATURES,
        probabilities=[0.1, 0.6, 0.3],
    )
    count = 4000
    drawn = collections.Counter(int(e.inputs[0]) for e in take(stream_of(plan), count))
    for token, probability in ((10, 0.1), (20, 0.6), (30, 0.3)):
        deviation = np.sqrt(count * probability * (1 - probability))
        assert abs(drawn[token] - count * probability) < 4 * deviation


def test_peek_does_not_use_up():
    stream, plain = stream_of(make_plan(PAIRS, features=PAIR_FEATURES)), []
    for _ in range(5):
        assert stream.peek() is stream.peek()
        cursor = stream.cursor
        plain.append(stream.take())
        assert not np.array_equal(stream.cursor, cursor)
    again = take(stream_of(make_plan(PAIRS, features=PAIR_FEATURES)), 5)
    assert [e.inputs.tolist() for e in plain] == [e.inputs.tolist() for e in again]


@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_go_on_from_every_cursor(is_packed):
    words = make_task(
        "words",
        text_corpus(numbers(100, 11), numbers(200, 3), numbers(300, 30)),
        SpanCorruption(),
    )
    features = EncoderDecoderFeatures(12, 8)
    plan = make_plan(words, PAIRS, features=features, probabilities=[0.3, 0.7], num_rows=2)
    stream = RowStream(plan, 1, is_packed, plan.new_cursor())
    rows, cursors = [], [stream.cursor]
    for row in itertools.islice(stream, 30):
        rows.append([(e.inputs.tolist(), e.targets.tolist()) for e in row])
        cursors.append(stream.cursor)
    assert max(map(len, rows)) > 1 if is_packed else set(map(len, rows)) == {1}
    for start in range(30):
        resumed = RowStream(plan, 1, is_packed, cursors[start])
        for expected in rows[start : start + 3]:
            row = next(resumed)
            assert [(e.inputs.tolist(), e.targets.tolist()) for e in row] == expected
