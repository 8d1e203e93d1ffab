# SPDX-License-Identifier: Apache-2.0
"""Streams: shuffled records, readers of text and of records, packed rows, cursors."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, Example
from switchx.data.objectives import CausalLM, InputsToTargets, SpanCorruption
from switchx.data.packing import pack_rows
from switchx.data.streams import (
    LANES,
    RowStream,
    Shuffled,
    cursor_dtype,
)
from tests.data.fakes import (
    VOCABULARY,
    make_plan,
    make_task,
    numbers,
    pair_corpus,
    stream_of,
    take,
    text_corpus,
)
from tests.data.refusals import refused

# Powers of two and of 256 and their neighbours; Grain 0.2.18 loses the last of 4^k + 1.
_SIZES = [65_535, 65_536, 65_537, 65_538, 65_793]
_SIZES += [pytest.param(size, marks=pytest.mark.slow) for size in (131_073, 2**18 + 1)]


@pytest.mark.parametrize("num_records", _SIZES)
def test_each_record_is_read_once_whatever_their_number(num_records):
    shuffled = Shuffled(range(num_records), (3,))
    epoch = np.fromiter(map(shuffled.__getitem__, range(num_records)), np.int64)
    assert np.array_equal(np.sort(epoch), np.arange(num_records))
    assert np.mean(epoch[1:] > epoch[:-1]) < 0.6


@pytest.mark.parametrize("num_records", [50, 70_000])
def test_depends_on_seed_and_index_alone(num_records):
    indices = [5, num_records + 5, 3 * num_records, 6]
    first = [Shuffled(range(num_records), (0,))[i] for i in indices]
    shuffled = Shuffled(range(num_records), (0,))
    assert [shuffled[i] for i in reversed(indices)] == first[::-1]
    assert [Shuffled(range(num_records), (1,))[i] for i in indices] != first


def test_neighbouring_seeds_do_not_share_epochs():
    """Epoch e of seed s must not be epoch 0 of seed s + e."""
    later = [Shuffled(range(50), (0,))[50 + i] for i in range(50)]
    # Rows that are in epochs beside each other compute an order once.
    shuffled, epochs = Shuffled(range(50), (0,)), []
    order = shuffled._order
    shuffled._order = lambda epoch: epochs.append(epoch) or order(epoch)
    assert [shuffled[50 * (i % 4) + i] for i in range(40)] == [
        Shuffled(range(50), (0,))[50 * (i % 4) + i] for i in range(40)
    ]
    assert epochs == [0, 1, 2, 3]
    assert later != [Shuffled(range(50), (1,))[i] for i in range(50)]


TEXT = make_task("text", text_corpus("5 6", "7 8"), CausalLM())
ONE_PAIR = make_task("pairs", pair_corpus(("5", "6")), InputsToTargets())


def plan_of_both(**options):
    return make_plan(TEXT, ONE_PAIR, probabilities=[0.5, 0.5], **options)


def test_cursor_is_a_vector_of_integers():
    cursor = plan_of_both().new_cursor()
    assert cursor.dtype == np.int64 and cursor.shape == (2 + 2 * (2 + 2 * LANES),)
    fields = cursor.view(cursor_dtype(2))[0]
    fields["drawn"] = 7
    fields["tasks"]["dropped"] = [3, 4]
    assert cursor[1] == 7 and sorted(cursor)[-3:] == [3, 4, 7]


def test_counts_sum_over_rows():
    plan = plan_of_both()
    cursors = np.tile(plan.new_cursor(), (3, 1))
    fields = cursors.view(cursor_dtype(2))[:, 0]
    fields["tasks"]["dropped"][:, 1] = [1, 2, 3]
    fields["tasks"]["truncated"][2, 0] = 5
    assert plan.counts(cursors) == {
        "text/dropped": 0,
        "text/truncated": 5,
        "pairs/dropped": 6,
        "pairs/truncated": 0,
    }
    assert plan.counts(cursors[1])["pairs/dropped"] == 2


def test_tasks_on_one_corpus_are_shuffled_apart():
    corpus = text_corpus(*map(str, range(3, 50)))
    twins = (make_task("a", corpus, CausalLM()), make_task("b", corpus, CausalLM()))
    first, second = make_plan(*twins, probabilities=[0.5, 0.5]).order
    assert [first[i] for i in range(47)] != [second[i] for i in range(47)]


def test_generators_differ_by_purpose_and_seed():
    def draw(seed, *position):
        return make_plan(TEXT, seed=seed).generator(*position).random()

    assert draw(0, 0, 1, 2) == draw(0, 0, 1, 2)
    assert len({draw(0, 0, 1, 2), draw(0, 1, 1, 2), draw(0, 0, 1, 3), draw(1, 0, 1, 2)}) == 4


PAIR_FEATURES = EncoderDecoderFeatures(6, 6)
DOCUMENTS = [numbers(100, 11), numbers(200, 3), numbers(300, 30), numbers(400, 1)]
LM = make_task("lm", text_corpus(*DOCUMENTS), CausalLM())
PAIRS = make_task(
    "pairs", pair_corpus(*((str(10 + i), str(50 + i)) for i in range(7))), InputsToTargets()
)


def test_finite_text_loses_nothing():
    joined = [n for text in DOCUMENTS for n in [*VOCABULARY.encode(text), VOCABULARY.eos_id]]
    stream = stream_of(make_plan(LM, is_finite=True))
    chunks = [example.targets.tolist() for example in iter(stream.take, None)]
    assert sum(chunks, []) == joined
    assert [len(chunk) for chunk in chunks] == [8] * 6 + [1]
    assert stream.take() is None, "the end stays the end"


def test_span_corruption_joins_without_eos():
    features = EncoderDecoderFeatures(16, 8)
    task = make_task("spans", text_corpus(*DOCUMENTS), SpanCorruption())
    stream = stream_of(make_plan(task, features=features, is_finite=True))
    for example in iter(stream.take, None):
        assert VOCABULARY.eos_id not in [*example.inputs[:-1], *example.targets[:-1]]


def test_training_text_is_contiguous_and_evenly_read():
    plan = make_plan(LM, num_rows=3)
    count = 6000
    seen = collections.Counter()
    for row in range(3):
        for example in take(stream_of(plan, row), count // 3):
            tokens = example.targets
            steps = np.diff(tokens)
            is_boundary = (tokens[:-1] == VOCABULARY.eos_id) | (tokens[1:] == VOCABULARY.eos_id)
            assert np.all((steps == 1) | is_boundary)
            assert len(tokens) == 8
            seen.update(tokens.tolist())
    # 49 ids of which EOS comes four times an epoch, every other once.
    per_epoch = count * 8 / 49
    del seen[VOCABULARY.eos_id]
    assert len(seen) == 45
    assert all(abs(number / per_epoch - 1) < 0.2 for number in seen.values())


def test_rows_of_a_single_document_do_not_walk_in_step():
    task = make_task("one", text_corpus(numbers(100, 500)), CausalLM())
    plan = make_plan(task, num_rows=16)
    firsts = {int(stream_of(plan, row).take().targets[0]) for row in range(16)}
    assert len(firsts) >= 14


def test_lanes_have_their_own_documents():
    """Consecutive examples of a row come from different places of the corpus."""
    documents = [numbers(100 + 50 * i, 50) for i in range(16)]
    plan = make_plan(make_task("t", text_corpus(*documents), CausalLM()))
    examples = take(stream_of(plan), 24)
    documents_seen = {int(example.targets[0]) // 50 for example in examples}
    assert len(documents_seen) >= LANES - 2


def test_every_pair_once_an_epoch_in_another_order():
    num_rows = 2
    plan = make_plan(PAIRS, features=PAIR_FEATURES, num_rows=num_rows)
    streams = [stream_of(plan, row) for row in range(num_rows)]
    order = [int(stream.take().inputs[0]) for _ in range(14) for stream in streams]
    epochs = [tuple(order[i : i + 7]) for i in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(10, 17)) for epoch in epochs)
    assert len(set(epochs)) == 4
    other = stream_of(make_plan(PAIRS, features=PAIR_FEATURES, seed=1))
    assert [int(example.inputs[0]) for example in take(other, 7)] not in map(list, epochs)


def test_too_long_pairs_are_counted():
    corpus = pair_corpus(("10", "11"), (numbers(20, 9), "21"), ("30", numbers(40, 8)))

    def read(too_long):
        task = make_task("t", corpus, InputsToTargets(), too_long=too_long)
        plan = make_plan(task, features=PAIR_FEATURES)
        stream = stream_of(plan)
        examples = take(stream, 30)
        return plan.counts(stream.cursor), examples

    counts, examples = read("drop")
    assert {tuple(e.inputs) for e in examples} == {(10, 1)}
    assert 58 <= counts["t/dropped"] <= 60 and counts["t/truncated"] == 0  # 2 of 3
    counts, examples = read("truncate")
    assert counts == {"t/dropped": 0, "t/truncated": 20}
    assert (20, 21, 22, 23, 24, 1) in {tuple(e.inputs) for e in examples}
    with pytest.raises(
        ValueError,
        match=r"task 't': an example of \(10, 2\) tokens|task 't': an "
        r"example of \(2, 9\) tokens, a row holds \(6, 6\)",
    ):
        read("error")


def test_nothing_to_read():
    task = make_task("t", pair_corpus((numbers(20, 9), "21")), InputsToTargets())
    with refused("100 examples in a row are too long for a row of (6, 6)"):
        stream_of(make_plan(task, features=PAIR_FEATURES)).take()
    task = make_task("t", text_corpus("", " "), CausalLM())
    with pytest.raises(ValueError, match="task 't': 201 documents in a row have no text"):
        stream_of(make_plan(task)).take()


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
