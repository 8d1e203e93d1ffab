# SPDX-License-Identifier: Apache-2.0
import collections

import numpy as np
import pytest

from switchx.data.features import EncoderDecoderFeatures
from switchx.data.objectives import CausalLM, InputsToTargets, SpanCorruption
from switchx.data.streams import LANES
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
    with pytest.raises(
        ValueError, match=r"100 examples in a row are too long for a row of \(6, 6\)"
    ):
        stream_of(make_plan(task, features=PAIR_FEATURES)).take()
    task = make_task("t", text_corpus("", " "), CausalLM())
    with pytest.raises(ValueError, match="task 't': 201 documents in a row have no text"):
        stream_of(make_plan(task)).take()
