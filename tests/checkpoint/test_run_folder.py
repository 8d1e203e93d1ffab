# SPDX-License-Identifier: Apache-2.0
"""Run folders: writability, the lock between trainers, one folder for all processes."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import switchx
from switchx.checkpoint import items
from switchx.checkpoint.restore import restore_params, stored_params
from switchx.checkpoint.run_folder import RunFolder, require_shared, write_converted
from switchx.data.tokenizers import ByteVocabulary, TokenIdVocabulary
from switchx.tree import named_leaves
from tests.data.refusals import refused
from tests.training.jobs import SPARSE, make_params
from tests.training.train_states import damage


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"cannot be written \(Not a directory: .*give a folder"
    ):
        RunFolder(tmp_path / "file" / "run").create()
    path = "/proc/self/run"  # writable for nobody, root included
    if not os.path.isdir("/proc/self"):
        pytest.skip("this system has no /proc")
    with pytest.raises(ValueError, match=f"model_dir='{path}' cannot be written"):
        RunFolder(path).create()


def test_second_trainer_is_refused_and_told_who_holds_the_folder(tmp_path):
    run = RunFolder(tmp_path).create()
    code = (
        "import sys; from switchx.checkpoint.run_folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).locked(): print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "locked\n"
        message = rf"is being trained by process {holder.pid} on .*; wait for it, end it"
        with pytest.raises(ValueError, match=message), run.locked():
            pass
    finally:
        holder.kill()  # SIGKILL: the system must free the lock
        holder.communicate()
    with run.locked():
        assert re.search(rf'"pid": {os.getpid()}\b', run.lock_file.read_text())


def test_found_describes_what_is_there_and_create_leaves_nothing(tmp_path):
    assert RunFolder(tmp_path / "none").found() == "nothing is there"
    assert RunFolder(tmp_path).found() == "empty"
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "a").mkdir()
    assert RunFolder(tmp_path).found() == "found a, b.txt"
    assert RunFolder(tmp_path / "b.txt").found() == "a file is there"
    run = RunFolder(tmp_path / "a" / "run").create()
    assert run.root.is_dir()
    assert list(run.root.iterdir()) == []
    assert RunFolder(str(run.path)).create().root == run.root


@pytest.fixture
def of_two(monkeypatch):
    """`of_two(index, seen)`: this is process `index` of two, and so they see the token."""

    def be(index: int, seen: list[bool] | None):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda value: value)
        monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda name: None)
        votes = []

        def gather(vote):
            votes.append(bool(vote))
            return np.array(votes * 2 if seen is None else seen)

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        return votes

    return be


def test_the_first_writes_what_all_see_and_another_folder_is_refused(tmp_path, of_two):
    votes = of_two(0, None)
    require_shared(RunFolder(tmp_path), 0.0)
    assert votes == [True] and not list(tmp_path.iterdir())
    votes = of_two(1, [True, False])
    with refused(
        f"model_dir='{tmp_path}' is not one folder for all processes: process 1 does not see "
        "what process 0 writes there; give a folder on a file system that all machines share"
    ):
        require_shared(RunFolder(tmp_path), 0.1)
    assert votes == [False]


@pytest.fixture
def folder(tmp_path):
    params = named_leaves(make_params(SPARSE))
    tree = {}
    for name, leaf in params.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = np.asarray(leaf)
    write_converted(RunFolder(tmp_path), SPARSE, tree, ByteVocabulary(), "elsewhere")
    return tmp_path


def test_it_is_loaded_as_a_run_is(folder):
    model = switchx.load(folder)
    assert (model.config, model.step, model.vocabulary) == (SPARSE, 0, ByteVocabulary())
    want = named_leaves(make_params(SPARSE))
    got = named_leaves(restore_params(folder))
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        np.testing.assert_array_equal(got[name], leaf)


@pytest.mark.parametrize("most_bytes", [0, 1 << 25])
def test_parameters_are_read_array_by_array(folder, most_bytes, monkeypatch):
    """One at a time, or small ones together, and nothing before it is asked for."""
    monkeypatch.setattr(items, "_TOGETHER_BYTES", most_bytes)
    groups, read_leaves = [], items.read_leaves
    monkeypatch.setattr(
        items, "read_leaves", lambda path, of: groups.append(list(of)) or read_leaves(path, of)
    )
    want = named_leaves(make_params(SPARSE))
    config, found = stored_params(folder, 0, SPARSE)
    found = named_leaves(found)
    assert config == SPARSE and groups == [] and found.keys() == want.keys()
    for name, leaf in want.items():
        np.testing.assert_array_equal(np.asarray(found[name]), leaf)
        np.testing.assert_array_equal(np.asarray(found[name][0]), np.asarray(leaf)[0])
    with refused("checkpoint <any> does not fit"):
        stored_params(folder, 0, dataclasses.replace(SPARSE, d_ff=SPARSE.d_ff + 1))
    assert len(groups) == (1 if most_bytes else len(want))
    assert [name for group in groups for name in group] == [f"params/{name}" for name in want]


def test_a_changed_byte_is_found(folder):
    largest = max((folder / "checkpoints/0").rglob("*"), key=lambda path: path.stat().st_size)
    damage(largest)
    said = (
        f"checkpoint {folder}/checkpoints/0 is damaged: its array params/<any> is not what was "
        "saved (CRC-32); `switchx checkpoint verify` names all faults. Use another step; "
        "training goes on from an older one by itself"
    )
    with refused(said):
        switchx.load(folder)
    _, found = stored_params(folder, 0, SPARSE)
    with refused(said):
        list(map(np.asarray, named_leaves(found).values()))


def test_parameters_and_vocabularies_of_other_models(tmp_path):
    params = make_params(SPARSE)
    del params["embedding"]
    with pytest.raises(ValueError, match="the converted model does not fit; 1 of"):
        write_converted(RunFolder(tmp_path), SPARSE, params, ByteVocabulary(), "elsewhere")
    with refused("the vocabulary has 385 ids, the model's embedding 384 rows"):
        write_converted(
            RunFolder(tmp_path), SPARSE, make_params(SPARSE), TokenIdVocabulary(385), "x"
        )
    assert list(tmp_path.iterdir()) == []
