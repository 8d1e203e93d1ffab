# SPDX-License-Identifier: Apache-2.0
"""Two processes train with experts on disks: each stores those of its own two devices."""

import json
import os
import pathlib
import shutil
import signal
import sys
import traceback

import numpy as np
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.verify import checkpoint_faults
from switchx.cli.main import main as switchx_main
from switchx.distributed import connect, distributed
from switchx.partitioning.mesh import MeshSpec
from switchx.storage.snapshot import parts_of
from switchx.storage.store import RecordStore
from switchx.training.loop import train
from switchx.training.offload.storage_spec import StorageSpec
from tests import compare
from tests.compilation import on_devices
from tests.processes import child_environment, free_port, run_together
from tests.training.disk_jobs import MESH_E, MESH_MODEL, mesh_job
from tests.training.jobs import Events
from tests.training.saved_runs import arrays_of, losses_of
from tests.training.train_states import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_compiled_once")]

# Each process has half of the experts; or, where both have slices of D, all of them.
MESHES = {
    "expert": MeshSpec(data=1, expert=2, model=2),
    "fsdp": MeshSpec(data=1, fsdp=2, expert=2),
}
ONE_DEVICE = MeshSpec(data=1)
# Room for the experts of one layer that a process has: all that is changed is soon written.
HOST_BYTES = MESH_E // 2 * 3 * 2 * 4 * MESH_MODEL.d_model * MESH_MODEL.d_ff


def ending(at: int | None):
    """A process that ends itself after a step, as `kill -9` does."""
    return lambda step: step == at and os.kill(os.getpid(), signal.SIGKILL)


def main(port: str, index: str, name: str, folder: str, changes: str) -> None:
    """One of the two processes; the second one has the faults."""
    changes = json.loads(changes)
    killed_at, full_at = (changes.pop(each, None) for each in ("killed_at", "full_at"))
    is_second = index == "1"
    host_bytes = None if full_at is None else HOST_BYTES
    storage = StorageSpec("disk", path=f"{folder}/stores", host_bytes=host_bytes)
    job = mesh_job(MESHES[name], storage, **changes)
    peers = connect(f"localhost:{port}", 2, int(index), {}, start_s=120, silence_s=20)
    if is_second and full_at is not None:
        _fill_the_disk(full_at)
    try:
        with distributed(peers):
            events = Events(ending(killed_at if is_second else None))
            train(job, RunFolder(f"{folder}/run"), events)
            print(json.dumps(events.notes))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the ordinary way out would wait for the other process


def _fill_the_disk(full_at: str) -> None:
    """Writes fail: in the update of a step, or when records are linked for a checkpoint."""
    whole, number = RecordStore._put, 0

    def put(self, name, data):
        nonlocal number
        number += 1
        if number > MESH_E + 4:  # after the first records
            raise self._write_error(name, len(data), ValueError("os_error_code='28'"))
        whole(self, name, data)

    def snapshot(self, folder, keys=None):
        raise self._write_error("00000", 1, ValueError("os_error_code='28'"))

    if full_at == "write":
        RecordStore._put = put
    else:
        RecordStore.snapshot = snapshot


@pytest.fixture
def run_two(session_cache):
    """Trains in two processes: their exit statuses and what they print."""

    def run(name: str, folder: pathlib.Path, **changes):
        code = f"from {__name__} import main; import sys; main(*sys.argv[1:])"
        words, port = (name, str(folder), json.dumps(changes)), str(free_port())
        commands = [[sys.executable, "-c", code, port, index, *words] for index in "01"]
        outcomes = run_together(commands, child_environment(session_cache, devices=2))
        return [status for status, _ in outcomes], [output for _, output in outcomes]

    return run


def assert_close(got: RunFolder, want: RunFolder, step: int) -> None:
    compare.assert_close(arrays_of(got, step), arrays_of(want, step), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", MESHES)
def test_two_processes_train_as_one_device_with_all_experts(name, run_two, tmp_path):
    statuses, printed = run_two(name, tmp_path, train_steps=4)
    assert statuses == [0, 0], printed
    run, alone = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "alone")
    with on_devices(1):
        train(mesh_job(ONE_DEVICE, StorageSpec(), train_steps=4), alone, Events())
    np.testing.assert_allclose(losses_of(run), losses_of(alone), rtol=1e-5)
    assert_close(run, alone, 4)
    assert checkpoint_faults(run, 4) == []
    # The store of process 1 is in that of process 0, as they share the folder.
    records = [
        {path.relative_to(records): path for path in records.glob("*/*")}
        for records in (tmp_path / "stores/records", tmp_path / "stores/process_1/records")
    ]
    parts = parts_of(run.checkpoints / "4" / "experts")
    saved = [{each.relative_to(part) for each in part.glob("*/*")} for part in parts]
    assert len(saved) == 2 and len(saved[0] | saved[1]) == 2 * MESH_E
    if name == "expert":
        assert [set(each) for each in records] == saved and not saved[0] & saved[1]
    else:  # both have all, equal to the bit; the first saves them
        assert len(records[0]) == 2 * MESH_E and not saved[1]
        for path, file in records[0].items():
            assert file.read_bytes() == records[1][path].read_bytes(), path


def test_a_run_that_was_killed_goes_on_to_the_bit(run_two, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_two("expert", whole, train_steps=4)[0] == [0, 0]
    statuses, printed = run_two("expert", cut, train_steps=4, killed_at=3)
    assert statuses == [1, -signal.SIGKILL] and "process 1" in printed[0]
    statuses, printed = run_two("expert", cut, train_steps=4)
    assert statuses == [0, 0] and "resumed from step 2" in printed[0], printed
    assert_same(*(arrays_of(RunFolder(folder / "run"), 4) for folder in (cut, whole)))
    # One device goes on, with all experts resident; so do four devices of one process.
    resident, on_disk = RunFolder(tmp_path / "resident"), RunFolder(tmp_path / "on_disk")
    for run, number, mesh, storage in (
        (resident, 1, ONE_DEVICE, StorageSpec()),
        (on_disk, 4, MESHES["fsdp"], StorageSpec("disk", path=str(whole / "stores"))),
    ):
        shutil.copytree(whole / "run", run.root)
        with on_devices(number):
            train(mesh_job(mesh, storage, train_steps=5), run, events := Events())
        assert any("resumed from step 4" in note for note in events.notes)
    assert_close(on_disk, resident, 5)
    assert not (whole / "stores/process_1").exists()  # of a process that is no more
    assert switchx_main(["checkpoint", "inspect", str(whole / "run")]) == 0


def test_two_processes_go_on_from_a_resident_checkpoint(run_two, tmp_path):
    run, alone = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "alone")
    with on_devices(1):
        train(mesh_job(ONE_DEVICE, StorageSpec(), train_steps=2), run, Events())
        shutil.copytree(run.root, alone.root)
        train(mesh_job(ONE_DEVICE, StorageSpec(), train_steps=4), alone, Events())
    statuses, printed = run_two("expert", tmp_path, train_steps=4)
    assert statuses == [0, 0] and "resumed from step 2" in printed[0], printed
    assert_close(run, alone, 4)
    before = arrays_of(alone, 4)
    fresh = tmp_path / "fresh"
    statuses, printed = run_two("fsdp", fresh, train_steps=1, init_from=str(alone.root))
    assert statuses == [0, 0] and "parameter arrays" in printed[0], printed
    after = arrays_of(RunFolder(fresh / "run"), 1)
    for name in (name for name in after if name.startswith("params/")):  # after one update
        np.testing.assert_allclose(after[name], before[name], atol=0.012, err_msg=name)


@pytest.mark.parametrize("full_at", ["write", "snapshot"])
def test_a_full_disk_of_one_process_ends_both_with_its_cause(full_at, run_two, tmp_path):
    statuses, printed = run_two("expert", tmp_path, train_steps=4, full_at=full_at)
    assert statuses == [1, 1]
    assert "SaveError" in printed[1] and "No space left on device" in printed[1]
    (reason,) = (line for line in printed[0].splitlines() if "failed:" in line)
    assert reason.startswith("switchx: process 1") and "No space left on device" in reason
