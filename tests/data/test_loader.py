# SPDX-License-Identifier: Apache-2.0
"""The loader: batches by seed, exact to resume, the same on any shards; evaluation batches."""

import itertools
import json
import logging
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures, batch_digest
from switchx.data.loader import (
    BatchConfig,
    Prefetch,
    RowBatches,
    Shard,
    TrainLoader,
    evaluation_batches,
    join_rows,
    merge_states,
)
from switchx.data.mixtures import Mixture
from switchx.data.objectives import InputsToTargets, PrefixLM, SpanCorruption
from switchx.data.tasks import Task
from switchx.data.tokenizers import ByteVocabulary
from tests.data.fakes import (
    NumberVocabulary,
    make_plan,
    make_task,
    numbers,
    pair_corpus,
    text_corpus,
)
from tests.data.refusals import refused

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


def test_a_shard_may_have_gaps_and_divides_the_batch(load):
    assert Shard((0, 2), 4).rows(8) == (0, 1, 4, 5)
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
    with pytest.raises(ValueError, match="batch_size=4 is not divisible by the 3 parts"):
        load(shard=Shard((0,), 3))
    with pytest.raises(
        ValueError, match="num_workers=3 for 2 rows of a process; use 2 or fewer"
    ):
        load(shard=Shard((0,), 2), prefetch=Prefetch(num_workers=3))
    with pytest.raises(ValueError, match="Prefetch.num_batches=-1; use at least 0"):
        Prefetch(num_batches=-1)
    with pytest.raises(ValueError, match="seed=-1; use 0 or more"):
        load(seed=-1)


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


VOCABULARY = NumberVocabulary()
CONFIG = BatchConfig(FEATURES, batch_size=4)
SPANS = Task(
    "spans", text_corpus(*(numbers(100 + i, 20 + i) for i in range(9))), VOCABULARY,
    SpanCorruption(),
)  # fmt: skip
PAIRS = Task(
    "pairs", pair_corpus(*((numbers(10, 1 + i % 5), str(50 + i)) for i in range(23))),
    VOCABULARY, InputsToTargets(),
)  # fmt: skip
MIXTURE = Mixture((SPANS, PAIRS), rates=(0.4, 0.6))
SYNCHRONOUS = Prefetch(num_batches=0)


@pytest.fixture
def load():
    """`TrainLoader` whose threads and processes end with the test."""
    loaders = []

    def make(source=MIXTURE, config=CONFIG, seed=0, prefetch=SYNCHRONOUS, **options):
        loaders.append(TrainLoader(source, config, seed=seed, prefetch=prefetch, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def read(loader, count):
    return list(itertools.islice(loader, count))


def digests(batches):
    return [batch_digest(batch) for batch in batches]


def joined(parts):
    """Global batches from the lists of batches of all shards."""
    return [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        for step in zip(*parts, strict=True)
    ]


def test_batches_are_a_function_of_the_seed_and_have_their_shapes(load):
    batches = digests(read(load(), 10))
    assert batches == digests(read(load(), 10))
    assert len(set(batches)) == 10
    assert not set(batches) & set(digests(read(load(seed=1), 10)))
    for batch in read(load(prefetch=Prefetch()), 3):
        for name, array in batch.items():
            assert array.shape == (4, 16 if name.startswith("encoder") else 8)
            assert type(array) is np.ndarray
            assert array.dtype == (np.float32 if "weights" in name else np.int32)


def test_the_task_chooses_whether_its_prefix_is_bidirectional(load):
    seen = {}
    for choice in (True, False):
        objective = PrefixLM(is_prefix_bidirectional=choice)
        task = Task("text", text_corpus(numbers(100, 50)), VOCABULARY, objective)
        loader = load(task, BatchConfig(DecoderOnlyFeatures(8), 4))
        (seen[choice],) = read(loader, 1)
        # A state from before there was a choice names the objective so.
        assert loader.state()["pipeline"]["text.objective"] == "PrefixLM()"
    is_prefix_BL = seen[True].pop("decoder_prefix_mask") > 0
    assert is_prefix_BL.any(axis=1).all()
    assert not seen[False].pop("decoder_prefix_mask").any()
    assert batch_digest(seen[True]) == batch_digest(seen[False])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("prefetch", [SYNCHRONOUS, Prefetch(num_batches=3)])
def test_goes_on_exactly(load, packed, prefetch):
    config = BatchConfig(FEATURES, batch_size=4, packed=packed)
    loader = load(config=config, prefetch=prefetch)
    expected, states = [], [loader.state()]
    for batch in itertools.islice(loader, 12):
        expected.append(batch_digest(batch))
        states.append(loader.state())
    for step in (0, 1, 5, 11):
        resumed = load(config=config, prefetch=prefetch)
        read(resumed, 2)
        resumed.restore(json.loads(json.dumps(states[step])))
        assert resumed.state() == states[step]
        assert digests(read(resumed, 12 - step)) == expected[step:]
        assert resumed.state() == states[12]


def test_worker_processes_change_nothing(load):
    expected = digests(read(load(), 6))
    beginning, workers = load(), load(prefetch=Prefetch(num_batches=2, num_workers=2))
    read(beginning, 2)
    workers.restore(beginning.state())
    assert digests(read(workers, 2)) == expected[2:4]
    beginning.restore(workers.state())
    assert digests(read(beginning, 2)) == expected[4:]


@pytest.mark.parametrize("count", [2, 4])
def test_shards_make_up_the_same_batch(load, count):
    expected = digests(read(load(), 6))
    loaders = [load(shard=Shard((index,), count)) for index in range(count)]
    assert digests(joined([read(loader, 6) for loader in loaders])) == expected


def test_another_number_of_shards_goes_on(load):
    expected = digests(read(load(), 6))
    halves = [load(shard=Shard((index,), 2)) for index in range(2)]
    for half in halves:
        read(half, 3)
    state = merge_states([half.state() for half in reversed(halves)])
    whole, quarters = load(), [load(shard=Shard((index,), 4)) for index in range(4)]
    for loader in (whole, *quarters):
        loader.restore(state)
    assert digests(read(whole, 3)) == expected[3:]
    assert digests(joined([read(loader, 3) for loader in quarters])) == expected[3:]
    with pytest.raises(
        ValueError,
        match="state holds the rows 2, 3 of each batch and not 0, 1, which this process reads; "
        "pass merge_states",
    ):
        whole.restore(halves[1].state())


def test_shards_may_have_gaps_and_rows_in_common(load):
    """Machines on an axis inside of `data`, and processes that share rows."""
    expected = read(load(), 5)
    shards = [Shard((0, 2), 4), Shard((1, 3), 4), Shard((1, 3), 4)]
    loaders = [load(shard=shard) for shard in shards]
    for shard, loader in zip(shards, loaders, strict=True):
        rows = list(shard.rows(4))
        for batch, whole in zip(read(loader, 3), expected, strict=False):
            for name in whole:
                np.testing.assert_array_equal(batch[name], whole[name][rows])
    merged = merge_states([json.loads(json.dumps(loader.state())) for loader in loaders])
    assert merged["rows"] == [0, 1, 2, 3]
    alone = load()
    alone.restore(merged)
    assert digests(read(alone, 2)) == digests(expected[3:])
    with refused("holds the rows 0, 2 of each batch and not 1, 3, which"):
        alone.restore(loaders[0].state())


def test_states_must_belong_together(load):
    loaders = [load(shard=Shard((index,), 2)) for index in (0, 1, 1)]
    states = [loader.state() for loader in loaders]
    read(loaders[2], 1)
    later = loaders[2].state()
    with pytest.raises(ValueError, match="are of steps 0 and 1; pass those of one checkpoint"):
        merge_states([states[0], later])
    with pytest.raises(ValueError, match="disagree about where row 2 of a batch goes on"):
        merge_states([*states[:2], later | {"step": 0}])


@pytest.mark.parametrize(
    "change, named",
    [
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"config": BatchConfig(FEATURES, 8)}, "batch_size: 4 there, 8 here"),
        ({"config": BatchConfig(FEATURES, 4, packed=False)}, "packed: True there, False here"),
        (
            {"config": BatchConfig(EncoderDecoderFeatures(16, 9), 4)},
            "targets_length=8.*length=9",
        ),
        ({"source": Mixture((SPANS, PAIRS), (0.5, 0.5))}, "probabilities"),
        ({"source": SPANS}, "pairs.objective: .InputsToTargets.* there, None here"),
    ],
)
def test_state_of_another_pipeline_is_refused(load, change, named):
    state = load().state()
    loader = load(**change)
    before = loader.state()
    with pytest.raises(ValueError, match=f"taken from another pipeline .*{named}"):
        loader.restore(state)
    assert loader.state() == before


def test_corpora_smaller_than_a_batch_repeat(load):
    tiny = Task("tiny", pair_corpus(("10", "11"), ("12", "13")), VOCABULARY, InputsToTargets())
    config = BatchConfig(FEATURES, batch_size=8, packed=False)
    shards = [load(source=tiny, config=config, shard=Shard((i,), 2)) for i in range(2)]
    for batch in joined([read(shard, 3) for shard in shards]):
        assert sorted(batch["encoder_input_tokens"][:, 0]) == [10] * 4 + [12] * 4


def test_packing_keeps_its_promise_through_the_loader(load):
    batches = read(load(), 20)
    assert any(batch["encoder_segment_ids"].max() > 1 for batch in batches)
    for batch in batches:
        for side in ("encoder", "decoder"):
            segments = batch[f"{side}_segment_ids"]
            assert np.all(np.diff(np.where(segments == 0, 99, segments)) >= 0)
        # Every segment has both its sides.
        assert np.array_equal(
            batch["encoder_segment_ids"].max(axis=1), batch["decoder_segment_ids"].max(axis=1)
        )


def test_counts(load):
    corpus = pair_corpus(("10", "11"), (numbers(20, 30), "21"))
    task = Task("t", corpus, VOCABULARY, InputsToTargets())
    loader = load(source=task, config=BatchConfig(FEATURES, 2, packed=False))
    assert loader.counts() == {"t/dropped": 0, "t/truncated": 0}
    read(loader, 40)
    assert 75 <= loader.counts()["t/dropped"] <= 81 and loader.counts()["t/truncated"] == 0


def test_errors_of_the_stream_arrive(load):
    task = Task("t", pair_corpus((numbers(20, 30), "1")), VOCABULARY, InputsToTargets())
    for prefetch in (SYNCHRONOUS, Prefetch()):
        with pytest.raises(ValueError, match="100 examples in a row are too long"):
            next(load(source=task, prefetch=prefetch))


def test_closed(load):
    loader = load(prefetch=Prefetch())
    first = next(loader)
    state = loader.state()
    loader.close()
    loader.close()
    with pytest.raises(
        ValueError, match="the loader is closed; restore a state of it, or make"
    ):
        next(loader)
    loader.restore(state)
    assert batch_digest(next(loader)) != batch_digest(first)


def test_program_ends_quietly():
    """With the loader still open, and a name of the program's own."""
    program = (
        "from tests.data.test_loader import *\n"
        "loader = TrainLoader(PAIRS, CONFIG, seed=0)\n"
        "next(loader)\n"
    )
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_keeps_up_with_training(load):
    """16 rows of 128/32 tokens in 20 ms of one core; it takes about 3."""
    words = " ".join(["switch", "transformers", "route", "each", "token", "to", "one"] * 100)
    task = Task("t", text_corpus(*[words] * 50), ByteVocabulary(), SpanCorruption())
    loader = load(source=task, config=BatchConfig(EncoderDecoderFeatures(128, 32), 16))
    next(loader)
    start = time.process_time()
    read(loader, 50)
    assert (time.process_time() - start) / 50 < 0.020


def evaluate(task, batch_size=4, features=FEATURES, packed=False, **options):
    return list(evaluation_batches(task, BatchConfig(features, batch_size, packed), **options))


def test_evaluation_is_the_same_each_time():
    assert digests(evaluate(SPANS)) == digests(evaluate(SPANS))
    assert digests(evaluate(SPANS, num_batches=2)) == digests(evaluate(SPANS))[:2]


@pytest.mark.parametrize("packed", [True, False])
def test_evaluation_sees_every_pair_once(packed):
    batches = evaluate(PAIRS, packed=packed)
    targets = np.concatenate([batch["decoder_target_tokens"].reshape(-1) for batch in batches])
    assert sorted(targets[targets >= 50]) == list(range(50, 73))
    if not packed:  # 23 examples in rows of 4: the last row of the sixth batch is padding
        assert len(batches) == 6
        assert batches[-1]["decoder_loss_weights"].sum(axis=1).tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("task", [SPANS, PAIRS])
def test_evaluation_shards_make_up_the_same_batches(task):
    parts = [evaluate(task, shard=Shard((index,), 2)) for index in range(2)]
    assert digests(joined(parts)) == digests(evaluate(task))


def test_evaluation_says_what_it_drops_and_needs_an_example(caplog):
    corpus = pair_corpus(("10", "11"), (numbers(20, 30), "21"))
    task = Task("t", corpus, VOCABULARY, InputsToTargets())
    with caplog.at_level(logging.WARNING):
        assert len(evaluate(task)) == 1
    assert "'t/dropped': 1" in caplog.text
    task = Task("t", pair_corpus((numbers(20, 30), "21")), VOCABULARY, InputsToTargets())
    with refused("task 't': split 'validation' has 1 records and no example that fits"):
        evaluate(task)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("fits", [[1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 0]])
@pytest.mark.parametrize("num_batches", [None, 1, 3])
def test_evaluation_counts_what_does_not_fit_wherever_it_stands(
    caplog, packed, fits, num_batches
):
    pairs = [("10", "11") if each else (numbers(20, 30), "21") for each in fits]
    task = Task("t", pair_corpus(*pairs), VOCABULARY, InputsToTargets())
    if not any(fits):
        with refused("'t/dropped': 3"):
            evaluate(task, packed=packed, num_batches=num_batches)
        return
    with caplog.at_level(logging.WARNING):
        evaluate(task, packed=packed, num_batches=num_batches)
    assert f"'t/dropped': {fits.count(0)}" in caplog.text
