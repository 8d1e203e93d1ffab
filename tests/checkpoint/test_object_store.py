# SPDX-License-Identifier: Apache-2.0
"""Runs in object stores: what is written last, who owns a folder, what is cut or damaged."""

import gzip
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from orbax.checkpoint._src.serialization import tensorstore_utils

import switchx
from switchx import object_store
from switchx.checkpoint import checkpointer as checkpointer_module
from switchx.checkpoint.checkpointer import Checkpointer, SaveError
from switchx.checkpoint.local_copies import renew_identity
from switchx.checkpoint.restore import choose_step, restore_params
from switchx.checkpoint.retention import Retention, rewind
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.data.corpora.text_files import TextFiles
from switchx.data.tokenizers import ByteVocabulary
from switchx.data.vocabularies import SavedVocabulary
from switchx.object_store import files_in, mirror, remove
from switchx.training.loop import train
from switchx.training.saving import Saving
from switchx.whole_folders import new_folder
from tests.cases import slow
from tests.checkpoint import stores
from tests.checkpoint.two_processes import in_two
from tests.data.refusals import refused
from tests.processes import ROOT
from tests.training.jobs import Events, tiny_job
from tests.training.train_states import assert_same, filled_state, shapes


@pytest.fixture(scope="module", params=["s3", slow("gs")])
def bucket(request):
    with stores.running(request.param) as address:
        yield address


@pytest.fixture
def run(bucket, request):
    """An empty run folder, as a process sees it that has just begun."""
    mirror.cache_clear()
    name = request.node.name.translate(str.maketrans("[] ", "___"))
    return RunFolder(f"{bucket}/{name}").create()


def saved(run, *steps, keep_last=2):
    with Checkpointer(run, Retention(keep_last=keep_last, keep_best=0)) as checkpointer:
        for step in steps:
            checkpointer.save(step, filled_state(step), {"position": step})
            checkpointer.wait()


def steps_of(run) -> set[str]:
    return {name.split("/")[0] for name in files_in(run.checkpoints)}


def test_what_is_saved_comes_back_and_older_ones_go(run):
    saved(run, 1, 2, 3)
    assert steps_of(run) == {"2", "3"}
    names = files_in(run.checkpoints / "3")
    assert {"manifest.json", "params/checksums/process_0_of_1.json"} < names.keys()
    listed = json.loads((run.checkpoints / "3" / "manifest.json").read_text())["files"]
    commit = {"_CHECKPOINT_METADATA", "commit_success.txt", "manifest.json"}
    assert listed.keys() == names.keys() - commit
    with Checkpointer(run, Retention()) as checkpointer:
        step, state, data = checkpointer.resume(shapes(filled_state(0)))
    assert (step, data) == (3, [{"position": 3}])
    assert_same(state, filled_state(3))


def test_a_check_of_every_step_lists_nothing_unless_a_save_is_under_way(run, monkeypatch):
    listed, paths = [], checkpointer_module.checkpoint_paths

    def counted(folder):
        listed.append(folder)
        return paths(folder)

    with Checkpointer(run, Retention(keep_last=1, keep_best=0)) as checkpointer:
        monkeypatch.setattr(checkpointer_module, "checkpoint_paths", counted)
        for _ in range(10):
            checkpointer.check()
        assert listed == []
        for step in (1, 2):
            checkpointer.save(step, filled_state(step))
            while checkpointer.meter.last is None:
                time.sleep(0.01)
                checkpointer.check()
            checkpointer.meter.last = None
        assert steps_of(run) == {"2"}  # the check that found the save done removed the older
        listed.clear()
        for _ in range(10):
            checkpointer.check()
        assert listed == []


@pytest.mark.slow  # seconds by a store's server
def test_a_save_that_was_cut_short_is_deleted_and_the_older_taken(run, caplog):
    saved(run, 1, 2)
    (run.checkpoints / "2" / "manifest.json").unlink()  # which is written last
    assert choose_step(run) == 1
    assert steps_of(run) == {"1", "2"}  # a reader changes nothing
    saved(run, 2)
    assert f"checkpoint {run.checkpoints}/2 is deleted: its save did not finish" in caplog.text
    np.testing.assert_array_equal(restore_params(run.path)["embedding_VD"][0, 0], 2)
    for step in ("1", "2"):  # as of a run that was killed in its first save
        (run.checkpoints / step / "manifest.json").unlink()
    with Checkpointer(run, Retention()) as checkpointer:
        assert checkpointer.latest_complete_step() is None and steps_of(run) == set()


@pytest.mark.slow
def test_a_missing_shard_is_named_and_nothing_deleted(run):
    saved(run, 1, 2)
    path = run.checkpoints / "2"
    names = files_in(path)
    shard = max((name for name in names if "/d/" in name), key=names.get)
    (path / shard).unlink()
    assert choose_step(run) == 1
    with refused(
        f"checkpoint {path} is not whole: its file {shard} is missing. A store cannot rename "
        "it: move it away or delete it, then run the same command to go on from an older one"
    ):
        Checkpointer(run, Retention())
    assert files_in(path).keys() == names.keys() - {shard}
    remove(path, "manifest.json")
    saved(run, 2)
    assert choose_step(run) == 2


def test_a_save_that_fails_leaves_the_complete_one(run, monkeypatch):
    def refused_by_the_store(folder, about):
        raise OSError(5, "503 Slow Down")

    saved(run, 1, keep_last=1)
    monkeypatch.setattr(checkpointer_module, "write_manifest", refused_by_the_store)
    with pytest.raises(SaveError, match="503 Slow Down. Intact: 1. Run the same"):
        saved(run, 2, keep_last=1)
    assert choose_step(run) == 1


def test_a_save_that_was_killed_at_its_very_end_is_whole(run):
    saved(run, 1)
    remove(run.checkpoints / "1/commit_success.txt", "")
    with Checkpointer(run, Retention()) as checkpointer:
        assert checkpointer.steps == (checkpointer.latest_complete_step(),) == (1,)


def test_the_trainer_before_ends_at_its_next_save(run, caplog):
    with run.locked():
        with Checkpointer(run, Retention()) as checkpointer:
            checkpointer.save(1, filled_state(1))
            checkpointer.wait()
            checkpointer._retention = Retention(keep_last=1)
            checkpointer._preservation.kept = lambda steps: set()  # by its own scores
            owner = json.loads((run.where / "trainer.json").read_text())
            other = json.dumps(owner | {"token": "another", "pid": 4711, "host": "node002"})
            (run.where / "trainer.json").write_text(other)
            with refused(
                f"model_dir='{run.path}' was taken over by process 4711 on node002, whose "
                f"token is in {run.where}/trainer.json; this process ends. What it saved "
                "before is intact. Train in a folder with one trainer"
            ):
                checkpointer.save(2, filled_state(2))
        run.config.write_text("{}")
    assert steps_of(run) == {"1"}
    assert "config.json" not in files_in(run.where)  # it is the other's folder now
    assert json.loads((run.where / "trainer.json").read_text())["token"] == "another"
    with run.locked():
        assert "was held by process 4711 on node002 since " in caplog.text
    assert "trainer.json" not in files_in(run.where)


def test_a_trainer_that_was_taken_over_puts_no_logs(run):
    with run.locked(), Checkpointer(run, Retention()) as checkpointer:
        run.metrics.write_text("1\n")
        run.put()
        (run.where / "trainer.json").write_text(json.dumps({"token": "another"}))
        run.metrics.write_text("1\n2\n")
        saving = Saving(run, Retention(), checkpointer, None, print, is_new=False)
        with pytest.raises(ValueError, match="was taken over by process"):
            saving.save(2, filled_state(2), None, None)
    assert (run.where / run.metrics.name).read_text() == "1\n"


def test_a_run_that_begins_again_has_another_identity_on_every_machine(run):
    run.identity.write_text("00" * 16)
    run.put()
    renew_identity(run)
    run.put()
    renewed = run.identity.read_text()
    mirror.cache_clear()
    assert run.identity.read_text() == renewed != "00" * 16


@pytest.mark.slow
def test_a_trainer_that_is_taken_over_while_it_writes_leaves_no_manifest(run, monkeypatch):
    with run.locked(), Checkpointer(run, Retention()) as checkpointer:
        checkpointer.save(1, filled_state(1))
        checkpointer.wait()
        checkpointer._clear_the_way(2)
        monkeypatch.setattr(checkpointer, "_clear_the_way", lambda step: None)
        (run.where / "trainer.json").write_text(json.dumps({"token": "another"}))
        checkpointer.save(2, filled_state(2))
        with pytest.raises(SaveError, match="was taken over by process unknown"):
            checkpointer.wait()
    assert choose_step(run) == 1 and "manifest.json" not in files_in(run.checkpoints / "2")


@pytest.mark.slow
@pytest.mark.usefixtures("programs_compiled_once")
def test_training_in_a_store_resumes_and_is_read_as_in_a_folder(run, tmp_path, capsys):
    train(tiny_job(), RunFolder(tmp_path / "local"), Events())
    train(tiny_job(train_steps=2), run, Events())
    assert "trainer.json" not in files_in(run.where)
    mirror.cache_clear()  # as another process, on another machine
    events = Events()
    train(tiny_job(), run, events)
    assert events[:2] == [
        ("note", f"resumed from step 2 in {run.checkpoints / '2'}"), ("begin", 2, 4),
    ]  # fmt: skip
    mirror.cache_clear()
    lines = run.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert any(name.startswith("tensorboard/") for name in files_in(run.where))
    want = restore_params(tmp_path / "local")
    assert_same(restore_params(run.path), want)
    other = RunFolder(tmp_path / "other")
    train(tiny_job(init_from=str(run.path), train_steps=0), other, events := Events())
    assert any(str(run.checkpoints / "4") in note for note in events.notes)
    assert SavedVocabulary(str(run.path)).resolved == ByteVocabulary()
    model = switchx.load(str(run.path), "best")
    assert_same(model.params, restore_params(run.path, model.step))
    for action in ("inspect", "verify"):
        assert main(["checkpoint", action, str(run.path)]) == 0
        said = capsys.readouterr().out
        assert str(run.path) in said
    assert said.count(": sound\n") == 2


SAVING = """
import sys
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from tests.training.train_states import filled_state
run = RunFolder(sys.argv[1]).create()
with run.locked(), Checkpointer(run, Retention(keep_last=2, keep_best=0)) as checkpointer:
    for step in range(int(sys.argv[2]), 1000):
        checkpointer.save(step, filled_state(step, size=256), {"position": step})
        print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_moment_leaves_a_complete_checkpoint(run):
    newest = 0
    for round_ in range(4):
        words = [sys.executable, "-c", SAVING, str(run.path), str(newest + 1)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, text=True)
        for _ in range(2 + round_):
            line = process.stdout.readline()
        process.kill()
        process.wait()
        started = int(line)
        with run.locked(), Checkpointer(run, Retention()) as checkpointer:
            newest, state, data = checkpointer.resume(shapes(filled_state(0, size=256)))
        assert started - 2 <= newest <= started + 1
        assert_same(state, filled_state(newest, size=256))
        assert data == [{"position": newest}]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("what", "newest"), [("save", 2), ("save killed", 1)])
def test_two_processes_save_and_resume(run, session_cache, what, newest):
    outcomes = in_two(run.path, what, session_cache)
    assert [status == 0 for status, _ in outcomes] == [newest == 2] * 2, outcomes
    outcomes = in_two(run.path, "resume", session_cache)
    assert [output.splitlines()[-1] for _, output in outcomes] == [str(newest)] * 2, outcomes
    assert steps_of(run) == {"1", "2"} if newest == 2 else {"1"}


def test_what_a_store_cannot_do_is_refused(run):
    with refused(
        f"{run.where} is in a store, which cannot rename the checkpoints after step 1"
    ):
        rewind(run, 1)
    with refused(f"model_dir='{run.path}' is in a store, where records of experts cannot be "):
        Checkpointer(run, Retention(), experts=object())
    with refused(f"{run.path} is in a store, where a folder cannot get its name when it is "):
        new_folder(run.path).__enter__()
    none = RunFolder(str(run.path).replace("bucket", "no-such-bucket"))
    with refused(f"model_dir='{none.path}' cannot be written ("):
        none.create()
    with refused(f"no complete checkpoint in {run.where}: nothing is there"):
        choose_step(run)


def test_text_is_read_from_a_store_as_from_a_folder(bucket, tmp_path):
    texts = {"a.txt": "one\n\ntwo\n", "deep/b.jsonl": '{"text": "three"}\n'}
    packed = gzip.compress(b"four\r\n")
    for folder in (tmp_path / "texts", object_store.as_folder(f"{bucket}/texts")):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "c.txt.gz").write_bytes(packed)
    here, there = TextFiles(str(tmp_path / "texts")), TextFiles(f"{bucket}/texts")
    data_dir = str(tmp_path / "data")
    for split in ("train", "validation"):
        want, got = here.open(split, data_dir), there.open(split, data_dir)
        assert [got[i] for i in range(len(got))] == [want[i] for i in range(len(want))]
    one = TextFiles([f"{bucket}/texts/a.txt", f"{bucket}/texts/c.txt.gz"])
    before = len(one.open("train", data_dir))
    (object_store.as_folder(f"{bucket}/texts") / "a.txt").write_text("ONE\n\ntwo\n")
    assert one.open("train", data_dir).fingerprint != here.open("train", data_dir).fingerprint
    assert len(one.open("train", data_dir)) == before
    with refused(f"{bucket}/none does not exist"):
        TextFiles(f"{bucket}/none").open("train", data_dir)


def test_addresses_and_folders_and_the_drivers_that_orbax_has_for_them(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("four")
    assert files_in(tmp_path) == {"a/b": 4} and files_in(tmp_path / "none") == {}
    assert object_store.kvstore(tmp_path) == {"driver": "file", "path": f"{tmp_path}/"}
    assert object_store.free_bytes(tmp_path) < float("inf")
    assert os.fspath(object_store.as_folder("~")) == os.path.expanduser("~")
    # TensorStore refuses these dots, as of `--model_dir=../run`.
    assert object_store.as_folder(f"{tmp_path}/a/../a") == tmp_path / "a"
    # Without a store: a version of Orbax in which this is elsewhere fails here.
    object_store._teach_orbax_s3()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host:1")
    monkeypatch.setenv("AWS_REGION", "mars-1")
    build = tensorstore_utils.build_kvstore_tspec
    for scheme, driver in (("gs", "gcs"), ("s3", "s3")):
        spec = build(f"{scheme}://bucket/run/1/params", use_ocdbt=True)
        base = {"driver": driver, "bucket": "bucket", "path": "run/1/params"}
        if scheme == "s3":
            base |= {"endpoint": "http://host:1", "aws_region": "mars-1"}
        assert spec["driver"] == "ocdbt" and spec["base"] == base
    assert build("/run/1", use_ocdbt=False) == {"driver": "file", "path": "/run/1"}
    with refused(
        "model_dir='s3:/bucket/run' has lost a slash of its address, as a pathlib.Path"
    ):
        object_store.as_folder(pathlib.Path("s3://bucket/run"), "model_dir")
    for address in ("http://host/run", "s3://", "gs:///"):
        with refused(f"model_dir='{address}' is no address of a store"):
            RunFolder(address)
    object_store._prepare.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("model_dir is in a store gs://, for which the package gcsfs is needed"):
        RunFolder("gs://bucket/run")
    object_store._prepare.cache_clear()
