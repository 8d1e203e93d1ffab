# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk in training: named, and nothing of what is damaged is computed with."""

import contextlib
import dataclasses
import pathlib
import resource
import subprocess
import sys
import zlib
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from switchx.checkpoint.checkpointer import SaveError
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.verify import checkpoint_faults
from switchx.storage.trace import Trace
from switchx.training.loop import train
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.storage_spec import StorageSpec
from tests.processes import ROOT, child_environment
from tests.training.disk_jobs import MODEL, E, disk_job, disk_program
from tests.training.jobs import Events, make_batch
from tests.training.steps import trained

pytestmark = pytest.mark.usefixtures("steps_traced_once")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A program with room for one of its two layers, the state after a step, its records.

    Its scope opens the store anew.
    """
    folder = tmp_path_factory.mktemp("run")
    record_bytes = disk_program(folder).experts.layout.record_bytes
    program = disk_program(folder, storage=StorageSpec("disk", host_bytes=E * record_bytes))
    with program.scope():
        state, _ = trained(program, 1)
        program.experts.save(folder / "saved")
    return program, jax.device_get(state), folder


def copied(state):
    """On the device, in memory of its own: a step is given away what it begins with."""
    return jax.device_put(jax.tree.map(lambda leaf: leaf.copy(), state))


def replaced(path, data: bytes) -> None:
    """Puts another file in the place of one, whose links stay as they are."""
    path.unlink()
    path.write_bytes(data)


def short(path, other):
    replaced(path, path.read_bytes()[:-9])


def flipped(path, other):
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    replaced(path, bytes(data))


def missing(path, other):
    path.unlink()


def exchanged(path, other):
    one, two = path.read_bytes(), other.read_bytes()
    replaced(path, two)
    replaced(other, one)


def foreign(path, other):
    data = bytearray(path.read_bytes())
    data[8:12] = (99).to_bytes(4, "little")  # after the magic
    replaced(path, data[:-8] + b"%08x" % zlib.crc32(data[:-8]))


FAULTS = {
    short: "it has .* bytes of",
    flipped: "its bytes have changed since it was written",
    missing: "it is missing",
    exchanged: "it is the record of 'decoder_./00003', not of",
    foreign: "it has format version 99, and this switchx reads",
}


def test_a_damaged_record_ends_the_step_and_is_named(begun):
    program, state, folder = begun
    records = folder / "storage" / "experts" / "records"
    batch = make_batch(MODEL, 8, seed=5)
    with program.scope():
        for damage, words in FAULTS.items():
            program.experts.restore(folder / "saved")
            # The cache is empty, and all experts were used lately: the step reads all of them.
            damage(records / "decoder_0" / "00003", records / "decoder_1" / "00003")
            # No wrong input: from the checkpoint another attempt goes on.
            with pytest.raises(SaveError, match=rf"decoder_\d/00003: {words}.*checkpoint"):
                program.train_step(copied(state), program.place(batch))
            assert program.experts.updates == 1
        # Links to the records were not what was damaged.
        program.experts.restore(folder / "saved")
        _, metrics = program.train_step(copied(state), program.place(batch))
        assert int(metrics.is_skipped) == 0 and program.experts.updates == 2


def test_read_is_what_was_used_and_a_lost_trace_hides_no_error(begun, monkeypatch, caplog):
    program, state, folder = begun
    experts, fault = program.experts, OSError(28, "No space left on device")
    monkeypatch.setattr(Trace, "save", Mock(side_effect=fault))
    with pytest.raises(SaveError, match="the end"), program.scope():
        experts.restore(folder / "saved")
        experts.metrics()
        assert all(experts.expected(period).all() for period in experts.periods)
        program.train_step(copied(state), program.place(make_batch(MODEL, 8)))
        experts.begin_sweeps(is_training=True)
        expected = np.mean([experts.expected(period) for period in experts.periods])
        assert expected == pytest.approx(experts.metrics()["touched_share"]) and expected < 1
        raise SaveError("the end")
    assert "trace.npz is not written (No space left on device)" in caplog.text


def test_a_write_that_the_system_refuses_ends_the_step(begun):
    program, state, folder = begun
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with program.scope():
        program.experts.restore(folder / "saved")
        state, batch = copied(state), program.place(make_batch(MODEL, 8))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(
                SaveError, match=r"decoder_\d/\d+ cannot be written .* are free"
            ):
                for _ in range(3):  # the first one may keep all that it changes in the cache
                    state, _ = program.train_step(state, batch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("death", [MemoryError("no memory left"), SystemExit("asked to end")])
def test_a_dead_reader_thread_ends_the_step_with_its_cause(begun, monkeypatch, death):
    program, state, folder = begun

    def die(data, name):
        raise death

    with program.scope():
        program.experts.restore(folder / "saved")
        monkeypatch.setattr("switchx.storage.store.decode", die)
        with pytest.raises(
            SaveError, match=rf"decoder_\d/\d+ cannot be read: .*{death}"
        ) as error:
            program.train_step(copied(state), program.place(make_batch(MODEL, 8)))
        assert error.value.__cause__.__cause__ is death


# A whole run whose experts are on a file system that is full.


def filling(ballast: pathlib.Path, at: int):
    """Fills a folder's file system with one file after a step."""

    def fill(step: int) -> None:
        if step == at:
            with contextlib.suppress(OSError), ballast.open("wb", 0) as file:
                while True:
                    file.write(bytes(4096))

    return Events(fill)


def train_on_a_full_disk(run_folder: str, mounted: str) -> None:
    """Trains until the disk is full, prints the error, makes space, and goes on."""
    job = disk_job()
    storage = StorageSpec("disk", host_bytes=10**6, path=f"{mounted}/experts")
    one_layer = LayeredProgram(job, RunFolder(run_folder)).experts.layout.record_bytes * E
    storage = dataclasses.replace(storage, host_bytes=one_layer)
    job = dataclasses.replace(job, storage=storage)
    ballast = pathlib.Path(mounted) / "ballast"
    try:
        train(job, RunFolder(run_folder), filling(ballast, at=3))
    except SaveError as error:
        print(error)
    ballast.unlink()
    train(job, RunFolder(run_folder), events := Events())
    print(events.notes)


@pytest.mark.slow  # a process with a file system of its own
def test_a_full_disk_ends_a_run_that_goes_on_when_there_is_space(tmp_path, session_cache):
    can_mount = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True
    )
    if can_mount.returncode:
        pytest.skip(f"needs file systems of its own: {can_mount.stderr.decode()}")
    (mounted := tmp_path / "mounted").mkdir()
    code = (
        f"from {__name__} import train_on_a_full_disk as run; run(*__import__('sys').argv[1:])"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs "$1" && shift && "$@"']
        + ["sh", str(mounted), sys.executable, "-c", code, str(tmp_path / "run"), str(mounted)],
        cwd=ROOT,
        env=child_environment(session_cache, devices=1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    error, notes = done.stdout.splitlines()[-2:]
    assert "No space left on device" in error and "are free" in error and "go on from" in error
    assert "resumed from step 2" in notes
    assert checkpoint_faults(RunFolder(tmp_path / "run"), 4) == []
