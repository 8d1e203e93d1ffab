# SPDX-License-Identifier: Apache-2.0
"""Kept tokens are those of the tokenizer; whatever changes them has another key."""

import dataclasses
import multiprocessing
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchx.data.features import DecoderOnlyFeatures, EncoderDecoderFeatures
from switchx.data.loader import BatchConfig, TrainLoader, evaluation_batches
from switchx.data.objectives import InputsToTargets, PrefixLM
from switchx.data.tasks import open_task
from switchx.data.token_cache import Tokenizer, open_tokens
from switchx.data.tokenizers import ByteVocabulary
from tests.data.fakes import make_task, numbers, pair_corpus, text_corpus
from tests.data.refusals import refused

PAIRS = pair_corpus(("5 6", "7"), ("8", "9 10 11"), ("12", "13"))
TEXT = text_corpus("5 6 7", "", "8", numbers(20, 30))


def kept(task, folder, features=EncoderDecoderFeatures(8, 8)):
    opened = open_task(
        dataclasses.replace(task, cache_tokens=True), "train", str(folder), features
    )
    return opened.tokens


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "tokens").iterdir())


def test_tokens_are_those_of_the_tokenizer(tmp_path):
    task = make_task("pairs", PAIRS, InputsToTargets(prefix="3 4 "))
    for tokens in (kept(task, tmp_path), kept(task, tmp_path)):
        assert len(tokens) == 3
        assert [
            (e.inputs.tolist(), e.targets.tolist()) for e in map(tokens.__getitem__, (1, 0))
        ] == [
            ([3, 4, 8, 1], [9, 10, 11, 1]),
            ([3, 4, 5, 6, 1], [7, 1]),
        ]
        assert pickle.loads(pickle.dumps(tokens))[2].inputs.tolist() == [3, 4, 12, 1]
    text = make_task("text", TEXT, PrefixLM())
    tokens = kept(text, tmp_path, DecoderOnlyFeatures(8))
    assert [tokens[i].tolist() for i in range(3)] == [[5, 6, 7], [], [8]]
    assert len(folders(tmp_path)) == 2 and not list(tmp_path.glob("tokens/.prep*"))


@given(st.integers(0, 3))
def test_batches_are_the_same(tmp_path_factory, seed):
    folder = tmp_path_factory.mktemp("batches")
    for corpus, objective in ((PAIRS, InputsToTargets()), (TEXT, PrefixLM())):
        task = make_task("a", corpus, objective)
        config = BatchConfig(DecoderOnlyFeatures(12), 2)
        batches, states = [], []
        for source in (task, dataclasses.replace(task, cache_tokens=True)):
            loader = TrainLoader(source, config, seed=seed, data_dir=str(folder))
            batches.append([next(loader) for _ in range(4)])
            states.append(loader.state())
            batches[-1] += evaluation_batches(source, config, data_dir=str(folder))
        assert states[0] == states[1], "a run may go on with the cache or without"
        for plain, cached in zip(*batches, strict=True):
            for name, array in plain.items():
                np.testing.assert_array_equal(array, cached[name])


def test_whatever_changes_the_tokens_is_kept_elsewhere(tmp_path):
    task = make_task("pairs", PAIRS, InputsToTargets())
    changes = (
        {},
        {"corpus": pair_corpus(("5", "7"), name="other")},
        {"corpus": pair_corpus(*PAIRS.records, ("1", "2"))},
        {"objective": InputsToTargets(prefix="3 ")},
        {"vocabulary": dataclasses.replace(task.vocabulary, size=999)},
    )
    for number, change in enumerate(changes, 1):
        kept(dataclasses.replace(task, **change), tmp_path)
        assert len(folders(tmp_path)) == number
    # The name of the task and what is evaluated change no token.
    kept(dataclasses.replace(task, name="b", evaluation_split="test"), tmp_path)
    assert len(folders(tmp_path)) == len(changes)


def test_damage_is_refused(tmp_path):
    task = make_task("pairs", PAIRS, InputsToTargets())
    kept(task, tmp_path)
    (folder,) = (tmp_path / "tokens").iterdir()
    ids = folder / "ids.int32"
    whole = ids.read_bytes()
    for name, content in (
        ("ids.int32", whole[:-4]),
        ("description.json", b"{}"),
        ("ends.npy", b""),
        ("crc32.npy", b""),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with refused(f"the tokens in {folder} are damaged"):
            kept(task, tmp_path)
        (folder / name).write_bytes(before)

    def ids_of_all() -> list:
        opened = kept(task, tmp_path)
        return [[part.tolist() for part in opened[i][:2]] for i in range(3)]

    whole = ids_of_all()
    for name in ("ids.int32", "ends.npy", "crc32.npy"):  # any byte that is another one
        before = (folder / name).read_bytes()
        for at in range(len(before)):
            flipped = bytes([before[at] ^ 1 << at % 8])
            (folder / name).write_bytes(before[:at] + flipped + before[at + 1 :])
            try:
                found = ids_of_all()
            except ValueError as error:
                assert str(error).startswith(f"the tokens in {folder} are damaged")
            else:  # in a header, where it says nothing
                assert found == whole and name != "ids.int32"
        (folder / name).write_bytes(before)


def _keep(folder, barrier, results):
    barrier.wait()
    opened = kept(make_task("text", TEXT, PrefixLM()), folder, DecoderOnlyFeatures(8))
    results.put([opened[i].tolist() for i in range(len(opened))])


def test_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_keep, args=(tmp_path, barrier, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert found[0] == found[1]
    assert len(folders(tmp_path)) == 1


def test_a_killed_process_leaves_nothing_that_is_read(tmp_path, monkeypatch):
    source = open_task(
        make_task("text", TEXT, PrefixLM()), "train", None, DecoderOnlyFeatures(8)
    )
    broken = Tokenizer(source.records, PrefixLM(), ByteVocabulary())

    def stop(self, index):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "__getitem__", stop)
        with pytest.raises(KeyboardInterrupt):
            open_tokens(broken, str(tmp_path))
    assert folders(tmp_path) == []
    assert open_tokens(broken, str(tmp_path))[2].tolist() == [ord("8") + 3]
