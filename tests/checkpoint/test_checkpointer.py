# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: bit-equal on any mesh, kept by recency and score, whole or not loaded."""

import math
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from switchx import whole_folders
from switchx.checkpoint.checkpointer import Checkpointer, Retention, SaveError
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.tree import num_bytes
from tests.cases import slow
from tests.data.refusals import refused
from tests.processes import ROOT
from tests.training.saved_runs import kept
from tests.training.train_states import assert_same, big_state, damage, filled_state, shapes

KEEP_ALL = Retention(keep_last=100, keep_best=0)


def save_all(folder, steps, retention=KEEP_ALL, metrics=None):
    """Checkpoints of `filled_state(step)`; `metrics` by step."""
    with Checkpointer(RunFolder(folder), retention) as checkpointer:
        for step in steps:
            scores = {"neg_log_perplexity": metrics[step]} if metrics else None
            checkpointer.save(step, filled_state(step), {"position": step}, scores)


def reopened(folder, retention=KEEP_ALL):
    return Checkpointer(RunFolder(folder), retention)


@pytest.mark.parametrize("data_state", [b"\x00\xff bytes", {"position": [1, 2]}, None])
def test_state_and_data_iterator_come_back_bit_equal(tmp_path, data_state):
    state = filled_state(7, optax.adafactor(1e-3))  # tuples of named tuples and empty ones
    with Checkpointer(RunFolder(tmp_path), KEEP_ALL) as checkpointer:
        checkpointer.save(7, state, data_state)
        checkpointer.wait()
        got, got_data = checkpointer.restore(shapes(state))
    assert_same(got, state)
    assert got_data == [data_state]
    assert float(jax.random.uniform(got.key)) == float(jax.random.uniform(jax.random.key(7)))


def test_saved_on_one_mesh_restored_on_others(tmp_path):
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 devices; set XLA_FLAGS=--xla_force_host_platform_device_count=8")
    auto = (jax.sharding.AxisType.Auto,) * 2
    meshes = {
        n: jax.make_mesh((n, 8 // n), ("data", "expert"), axis_types=auto) for n in (1, 2, 8)
    }
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)

    def state_on(sharding):
        params = {"w_in_EF": jax.device_put(jnp.array(values), sharding)}
        return {"params": params, "step": jnp.asarray(3)}

    saved_on = jax.NamedSharding(meshes[2], jax.P("expert", "data"))
    with Checkpointer(RunFolder(tmp_path), KEEP_ALL) as checkpointer:
        checkpointer.save(3, state_on(saved_on))
        checkpointer.wait()
        for sharding in (
            saved_on,
            jax.NamedSharding(meshes[8], jax.P(None, "data")),
            jax.NamedSharding(meshes[1], jax.P("expert")),
            jax.NamedSharding(meshes[1], jax.P()),
            jax.sharding.SingleDeviceSharding(devices[5]),
        ):
            target = shapes(state_on(sharding))
            target["params"]["w_in_EF"] = jax.ShapeDtypeStruct(
                (16, 8), jnp.float32, sharding=sharding
            )
            got, _ = checkpointer.restore(target)
            assert got["params"]["w_in_EF"].sharding == sharding
            np.testing.assert_array_equal(np.asarray(got["params"]["w_in_EF"]), values)
        got, _ = checkpointer.restore(shapes(state_on(saved_on)))  # no sharding asked for
        assert got["params"]["w_in_EF"].devices() == {devices[0]}


def test_donated_and_overwritten_memory_does_not_reach_the_checkpoint(tmp_path):
    """The state of step n is donated, and a NumPy leaf overwritten, while n is written."""
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)

    def arrays():
        keys = jax.random.split(jax.random.key(0), 8)
        return {f"w{i}_DF": jax.random.normal(key, (512, 1024)) for i, key in enumerate(keys)}

    expected = jax.tree.map(lambda x: np.array(x, copy=True), arrays())
    jax.block_until_ready(overwrite(arrays()))  # compiled before, to come quickly after save()
    with Checkpointer(RunFolder(tmp_path), KEEP_ALL) as checkpointer:
        for step in range(3):
            params, on_host = jax.block_until_ready(arrays()), np.full(1000, float(step))
            checkpointer.save(step, {"params": params, "counts": on_host})
            on_host[:] = -1
            for _ in range(4):
                params = jax.block_until_ready(overwrite(params))
            checkpointer.wait()
            target = {"params": expected, "counts": on_host}
            got, _ = checkpointer.restore(shapes(target), step)
            jax.tree.map(np.testing.assert_array_equal, got["params"], expected)
            np.testing.assert_array_equal(got["counts"], np.full(1000, float(step)))


def test_keeps_the_last_and_the_best_together_also_after_reopening(tmp_path):
    metrics = {1: -3.0, 2: -1.0, 3: float("nan"), 4: -2.5, 5: -2.0, 6: -4.0, 7: -0.5, 8: -9.0}
    retention = Retention(keep_last=2, keep_best=1)
    save_all(tmp_path, range(1, 6), retention, metrics)
    assert kept(tmp_path) == [2, 4, 5]
    save_all(tmp_path, [6], retention, metrics)  # 2 is known as the best from its manifest
    assert kept(tmp_path) == [2, 5, 6]
    assert restore_params(tmp_path, "best")["embedding_VD"][0, 0] == 2
    save_all(tmp_path, [7, 8], retention, metrics)
    assert kept(tmp_path) == [7, 8]
    lowest = Retention(keep_last=1, keep_best=2, best_mode="min")
    save_all(tmp_path / "lowest", range(1, 9), lowest, metrics)
    assert kept(tmp_path / "lowest") == [6, 8]
    periodic = Retention(keep_last=1, keep_best=0, keep_period=3)
    save_all(tmp_path / "periodic", range(1, 9), periodic, metrics)
    assert kept(tmp_path / "periodic") == [3, 6, 8]
    assert not list(tmp_path.glob("**/expired"))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def files_of(newest):
    """Orbax' own two files of the commit hold nothing of the state; nothing reads them."""
    files = [
        path
        for path in sorted(newest.rglob("*"))
        if path.is_file() and (path.parent != newest or path.name == "manifest.json")
    ]
    assert len(files) > 10
    return files


@pytest.mark.parametrize("harm", [truncate, slow(os.remove)])
def test_a_file_cut_or_gone_is_skipped_by_name_and_never_deleted(tmp_path, caplog, harm):
    save_all(tmp_path, [10, 20])
    newest = tmp_path / "checkpoints" / "20"
    for path in files_of(newest):
        contents = path.read_bytes()
        harm(path)
        caplog.clear()
        with reopened(tmp_path) as checkpointer:
            assert checkpointer.latest_complete_step() == 10, path
        assert f"checkpoint {newest} is skipped: it" in caplog.text
        assert str(path.relative_to(newest)) in caplog.text
        aside = newest.with_name("20.damaged-1")
        assert f"It is kept as {aside.name}" in caplog.text
        (aside / path.relative_to(newest)).write_bytes(contents)  # nothing else was touched
        aside.rename(newest)
        with reopened(tmp_path) as checkpointer:
            assert checkpointer.latest_complete_step() == 20


def test_values_that_changed_are_set_aside_and_the_older_taken(tmp_path, caplog):
    with reopened(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, big_state(2) | {"step": jnp.asarray(step)})
    newest = tmp_path / "checkpoints" / "2"
    damage(max((newest / "params").rglob("*"), key=os.path.getsize))
    with pytest.raises(ValueError, match="its "):
        restore_params(tmp_path)
    with reopened(tmp_path) as checkpointer:
        step, state, _ = checkpointer.resume(shapes(big_state(2)))
    assert step == state["step"] == 1
    assert_same(state["params"], big_state(2)["params"])
    assert f"checkpoint {newest} is skipped: its " in caplog.text
    assert "It is kept as 2.damaged-1" in caplog.text


def test_what_a_save_took_is_known_when_it_is_done(tmp_path):
    state = big_state(4)
    with reopened(tmp_path) as checkpointer:
        assert checkpointer.meter.last is None
        checkpointer.save(3, state)
        checkpointer.wait()
        cost = checkpointer.meter.last
    files = [path for path in (tmp_path / "checkpoints" / "3").rglob("*") if path.is_file()]
    assert cost.step == 3
    assert 0 < cost.blocking_seconds <= cost.seconds
    assert cost.process_hashed_bytes == num_bytes(state)
    total = sum(path.stat().st_size for path in files)
    assert 3 << 20 < cost.process_written_bytes < cost.bytes < total
    with reopened(tmp_path) as again:  # which has not saved yet
        assert again.meter.seconds_to_save() == cost.seconds
        again.meter.begin()  # one is under way, of which nothing is done
        assert 1.9 * cost.seconds < again.meter.seconds_to_save() <= 2 * cost.seconds
        again.meter.failed()
    with reopened(tmp_path / "another") as other:
        assert other.meter.seconds_to_save() is None


@pytest.mark.parametrize(
    "error",
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory"), OSError(24, "files")),
)
def test_what_a_reader_lacks_is_no_damage(error, tmp_path, monkeypatch):
    with reopened(tmp_path) as checkpointer:
        checkpointer.save(1, filled_state(1))
    with monkeypatch.context() as patch, reopened(tmp_path) as checkpointer:
        for reader in (ocp.StandardCheckpointer, ocp.PyTreeCheckpointer):
            patch.setattr(reader, "restore", Mock(side_effect=error))
        with pytest.raises(OSError, match="nothing says that it is damaged: run the same"):
            checkpointer.resume(shapes(filled_state(0)))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale file handle"):
        stale = OSError(116, "Stale file handle")
        patch.setattr(whole_folders, "files_in", Mock(side_effect=stale))
        reopened(tmp_path)
    with reopened(tmp_path) as checkpointer:
        assert checkpointer.resume(shapes(filled_state(0)))[0] == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space"), SaveError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_save_that_orbax_does_not_begin_ends_at_once(error, raised, tmp_path, monkeypatch):
    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", Mock(side_effect=error))
    with pytest.raises(raised), reopened(tmp_path) as checkpointer:
        checkpointer.save(1, filled_state(1))
    assert kept(tmp_path) == []


def test_a_save_that_is_interrupted_is_no_other_error(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), reopened(tmp_path) as checkpointer:
        checkpointer.save(1, filled_state(1))
        monkeypatch.setattr("switchx.checkpoint.checkpointer.to_items", interrupted)
        checkpointer.save(2, filled_state(2))
    assert kept(tmp_path) == [1]


def test_a_save_past_its_deadline_is_an_error_that_names_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("switchx.checkpoint.parts.crc32_of", lambda array: time.sleep(3) or 0)
    with (
        pytest.raises(SaveError, match="checkpoint 1 .*Retention.save_deadline_s=1; a larger"),
        reopened(tmp_path, Retention(save_deadline_s=1)) as checkpointer,
    ):
        checkpointer.save(1, big_state(1))
        checkpointer.wait()
    assert kept(tmp_path) == []


def test_saving_again_at_a_damaged_step_keeps_the_damaged_one(tmp_path, caplog):
    save_all(tmp_path, [10, 20])
    folder = tmp_path / "checkpoints"
    for number in (1, 2):
        with reopened(tmp_path) as checkpointer:
            truncate(folder / "20" / "data" / "process_0_of_1.json")  # while the trainer runs
            checkpointer.save(20, filled_state(20), number)
            checkpointer.wait()
            assert checkpointer.steps == (10, 20)
            assert checkpointer.restore(shapes(filled_state(0)))[1] == [number]
        assert f"It is kept as 20.damaged-{number}" in caplog.text
    assert sorted(path.name for path in folder.glob("20*")) == [
        "20",
        "20.damaged-1",
        "20.damaged-2",
    ]


def test_complete_step_is_not_saved_over(tmp_path):
    with Checkpointer(RunFolder(tmp_path), KEEP_ALL) as checkpointer:
        checkpointer.save(10, filled_state(10))
        with pytest.raises(
            ValueError, match="step 10 has a complete checkpoint, .*/10; save ano"
        ):
            checkpointer.save(10, filled_state(11))
        got, _ = checkpointer.restore(shapes(filled_state(0)))
        assert_same(got, filled_state(10))


def test_half_written_save_is_kept_and_a_cut_deletion_finished(tmp_path, caplog):
    save_all(tmp_path, [10])
    folder = tmp_path / "checkpoints"
    unfinished = folder / "20.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "part").write_bytes(bytes(3 << 20))
    (folder / "30").mkdir()  # a folder without a manifest
    (folder / "expired" / "5").mkdir(parents=True)
    with reopened(tmp_path) as checkpointer:
        assert checkpointer.steps == (10,)
        checkpointer.save(20, filled_state(20))
    assert f"checkpoint {unfinished} is skipped: its save did not finish" in caplog.text
    assert "It is kept as 20.unfinished-1" in caplog.text
    assert (
        "*.damaged-* and *.unfinished-* there take 3.0 MiB and are yours to delete"
        in caplog.text
    )
    assert f"checkpoint {folder / '30'} is skipped: it has no manifest.json" in caplog.text
    assert (folder / "20.unfinished-1" / "part").stat().st_size == 3 << 20
    assert (folder / "30.damaged-1").is_dir()
    assert not (folder / "expired").exists()
    assert kept(tmp_path) == [10, 20]


def test_a_run_begins_again_after_unfinished_saves_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    for _ in range(2):  # the second start finds what the first has renamed
        with reopened(tmp_path) as checkpointer:
            assert checkpointer.latest_complete_step() is None
        assert [path.name for path in folder.iterdir()] == ["10.unfinished-1"]
    # As versions before this one named a save that was cut short.
    (folder / "10.unfinished-1").rename(folder / "10.damaged-9")
    with reopened(tmp_path) as checkpointer:
        assert checkpointer.latest_complete_step() is None
    (folder / "10.damaged-9").rename(folder / "10.unfinished-1")
    save_all(tmp_path, [10])
    truncate(folder / "10" / "data" / "process_0_of_1.json")
    for _ in range(2):
        with (
            reopened(tmp_path) as checkpointer,
            refused(f"no checkpoint in {folder} is what was saved"),
        ):
            checkpointer.latest_complete_step()
    assert {path.name for path in folder.iterdir()} == {"10.unfinished-1", "10.damaged-1"}


TRAINER = """
import sys, jax.numpy as jnp
from switchx.checkpoint.checkpointer import Checkpointer
from switchx.checkpoint.checkpointer import Retention
from switchx.checkpoint.run_folder import RunFolder
from tests.training.train_states import filled_state
with Checkpointer(RunFolder(sys.argv[1]), Retention(keep_last=2, keep_best=1)) as checkpointer:
    step = (checkpointer.latest_complete_step() or 0) + 1
    while True:
        print(step, flush=True)
        metrics = {"neg_log_perplexity": -float(step % 7)}
        checkpointer.save(step, filled_state(step, size=256), {"position": step}, metrics)
        step += 1
"""


def test_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path, caplog):
    target, command = shapes(filled_state(0, size=256)), [sys.executable, "-c", TRAINER]
    newest = 0
    for delay_s in (0.0, 0.05):
        trainer = subprocess.Popen(
            [*command, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        # It is about to save the third, so it has completed at least the first.
        assert [int(trainer.stdout.readline()) for _ in range(3)][0] == newest + 1
        time.sleep(delay_s)
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        with reopened(tmp_path, Retention(keep_last=2, keep_best=1)) as checkpointer:
            step = checkpointer.latest_complete_step()
            assert step > newest
            newest = step
            for each in checkpointer.steps:  # every kept one is whole, and all of one step
                got, data_state = checkpointer.restore(target, each)
                assert_same(got, filled_state(each, size=256))
                assert data_state == [{"position": each}]
    # Only saves that were cut short were set aside, never a deletion that was.
    reasons = [r.args[1] for r in caplog.records if r.name == "switchx.checkpoint.retention"]
    assert set(reasons) <= {"its save did not finish"}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_seen_before_saving(small_disk):
    with reopened(small_disk) as checkpointer:
        checkpointer.save(1, big_state(2))
        message = (
            r"checkpoint 2 could not be written to .*: it needs about 17.0 MiB; the disk has "
            r"6.\d MiB free. Intact: 1. Make room or mend the disk \(0.0 MiB are in "
            r"\*.damaged-\* and \*.unfinished-\* there\), then run the same command to resume"
        )
        with pytest.raises(SaveError, match=message):
            checkpointer.save(2, big_state(16))
        assert checkpointer.latest_complete_step() == 1
    assert kept(small_disk) == [1]


def test_disk_that_fills_while_saving(small_disk, monkeypatch, caplog):
    usage = type("Usage", (), {"free": 1 << 40})
    monkeypatch.setattr("switchx.checkpoint.checkpointer.shutil.disk_usage", lambda path: usage)
    checkpointer = reopened(small_disk)
    checkpointer.save(1, big_state(2))
    checkpointer.save(2, big_state(16))
    with pytest.raises(SaveError, match="checkpoint 2 could not be written to .*No space left"):
        while True:
            checkpointer.check()
            time.sleep(0.01)
    checkpointer.close()
    assert (small_disk / "checkpoints" / "2.orbax-checkpoint-tmp").is_dir()
    with reopened(small_disk) as again:
        assert again.latest_complete_step() == 1
        assert_same(again.restore(shapes(big_state(2)))[0], big_state(2))
    assert "2.orbax-checkpoint-tmp is skipped: its save did not finish" in caplog.text


LIMITED = """
import resource, sys
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from tests.training.train_states import big_state
keep_all = Retention(keep_last=100, keep_best=0)
with Checkpointer(RunFolder(sys.argv[1]), keep_all) as checkpointer:
    checkpointer.save(1, big_state(1))
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    checkpointer.save(2, big_state(8))
"""


def test_failing_write_ends_the_process_with_an_error_and_loses_nothing(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    last_line = done.stderr.strip().splitlines()[-1]
    assert "SaveError: checkpoint 2 could not be written to " in last_line
    assert "File too large" in last_line
    assert "Intact: 1. Make room" in last_line
    with reopened(tmp_path) as checkpointer:
        assert checkpointer.latest_complete_step() == 1
        assert_same(checkpointer.restore(shapes(big_state(1)))[0], big_state(1))


def test_orbax_says_nothing_of_its_own(tmp_path, capfd):
    save_all(tmp_path, [1, 2])
    with reopened(tmp_path) as checkpointer:
        checkpointer.restore(shapes(filled_state(0)))
    assert capfd.readouterr() == ("", "")


def test_a_higher_score_is_always_better():
    metrics = {"neg_log_perplexity": -2.0, "loss": 2.0}
    assert Retention().score(metrics) == -2.0
    lowest = Retention(best_metric="loss", best_mode="min")
    assert lowest.score({"loss": 1.0}) > lowest.score({"loss": 2.0})
    assert Retention().score(None) is None
    assert Retention().score({"neg_log_perplexity": math.nan}) is None


@pytest.mark.parametrize("prefix", ["", "tasks/cola/"])
def test_lower_is_better_of_losses_and_drops(prefix):
    def is_better(name, high, low, **mode):
        retention = Retention(best_metric=prefix + name, **mode)
        return retention.score({prefix + name: high}) > retention.score({prefix + name: low})

    for name in ("cross_entropy", "dropped_fraction"):
        assert not is_better(name, 0.5, 0.25)
        assert is_better(name, 0.5, 0.25, best_mode="max")
    for name in ("neg_log_perplexity", "accuracy"):
        assert is_better(name, 0.5, 0.25)


def test_checkpoints_of_another_retention_are_scored_by_this_one(tmp_path):
    """Versions before this one took the largest cross-entropy for the best."""
    save_all(tmp_path, [10, 20, 30], metrics={10: -3.0, 20: -2.0, 30: -4.0})
    lowest = Retention(keep_last=1, keep_best=1, best_mode="min")
    with reopened(tmp_path, lowest) as checkpointer:
        checkpointer.save(40, filled_state(40), None, {"neg_log_perplexity": -3.5})
        checkpointer.save(50, filled_state(50), None, {"neg_log_perplexity": -3.6})
    assert kept(tmp_path) == [30, 50]
    with reopened(tmp_path, Retention(best_metric="accuracy")) as checkpointer:
        assert checkpointer._scores == {}


def test_a_metric_of_a_task_is_named_with_its_task():
    texts = {"cola": {"accuracy": 60.0, "examples": 4}, "stsb": {"pearson": math.nan}}
    metrics = {"accuracy": 0.5, "tasks": {"cola": {"accuracy": 0.25}}, "texts": texts}
    for name, score in (
        ("accuracy", 0.5), ("cola/accuracy", 60.0), ("tasks/cola/accuracy", 0.25),
        ("stsb/pearson", None),  # of a constant predictor: never the best
    ):  # fmt: skip
        assert Retention(best_metric=name).score(metrics) == score
    with refused(
        "Retention.best_metric='bleu' is not among the metrics accuracy, "
        "tasks/cola/accuracy, cola/accuracy, cola/examples, stsb/pearson"
    ):
        Retention(best_metric="bleu").score(metrics)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_best": -1},
        {"keep_period": 0},
        {"best_mode": "most"},
        {"save_deadline_s": 0},
        {"local_every": 0},
        {"grace_s": 0},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong):
    ((name, value),) = wrong.items()
    with refused(f"Retention.{name}={value!r}"):
        Retention(**wrong)
