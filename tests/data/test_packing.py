# SPDX-License-Identifier: Apache-2.0
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.data.streams import pack_rows

FEATURES = EncoderDecoderFeatures(10, 8)


class Source:
    """Examples of given sizes, the i-th made of tokens 100 + i (inputs) and 200 + i."""

    def __init__(self, sizes):
        self.examples = [
            Example(np.full(n, 100 + i), np.full(m, 200 + i)) for i, (n, m) in enumerate(sizes)
        ]

    def peek(self):
        return self.examples[0] if self.examples else None

    def take(self):
        return self.examples.pop(0)


def who(rows):
    return [[int(example.targets[0]) - 200 for example in row] for row in rows]


def test_first_fit_by_hand():
    # Rows of 10. 6 opens the first, 7 does not fit: second. 4 fits the first, which is full;
    # 3 the second; 1 nowhere, and there is no third.
    source = Source([(6, 1), (7, 1), (4, 1), (3, 1), (1, 1)])
    assert who(pack_rows(source, FEATURES, num_rows=2)) == [[0, 2], [1, 3]]
    assert len(source.examples) == 1, "what closes the rows stays in the stream"
    assert who(pack_rows(source, FEATURES, num_rows=2)) == [[4]]
    assert pack_rows(source, FEATURES, num_rows=2) == []


def test_both_sides_must_fit():
    source = Source([(2, 6), (2, 6), (2, 2)])
    assert who(pack_rows(source, FEATURES, num_rows=2)) == [[0, 2], [1]]


def test_decoder_only_counts_both_sides_as_one():
    source = Source([(3, 3), (2, 2), (1, 4), (1, 2)])
    assert who(pack_rows(source, DecoderOnlyFeatures(10), num_rows=3)) == [[0, 1], [2, 3]]


SIZES = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 8)), max_size=60)


@given(SIZES, st.integers(1, 5))
def test_every_example_whole_and_once(sizes, num_rows):
    source, windows = Source(sizes), []
    while rows := pack_rows(source, FEATURES, num_rows):
        assert len(rows) <= num_rows and all(rows)
        windows.append(rows)
        batch = FEATURES.batch(rows)  # raises if a row overflows
        for b, row in enumerate(rows):
            for segment, example in enumerate(row, 1):
                for side, tokens in (("encoder", example.inputs), ("decoder", example.targets)):
                    is_mine = batch[f"{side}_segment_ids"][b] == segment
                    ids = batch[
                        f"{'encoder_input' if side == 'encoder' else 'decoder_target'}_tokens"
                    ]
                    np.testing.assert_array_equal(ids[b][is_mine], tokens)
                    positions = batch[f"{side}_positions"][b][is_mine]
                    np.testing.assert_array_equal(positions, np.arange(len(tokens)))
    order = sorted(i for rows in windows for row in who(rows) for i in row)
    assert order == list(range(len(sizes)))
    # Windows keep the order of the stream: no example waits longer than one window.
    last = -1
    for rows in windows:
        members = sorted(i for row in who(rows) for i in row)
        assert members == list(range(last + 1, last + 1 + len(members)))
        last = members[-1]
