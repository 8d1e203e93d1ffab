# SPDX-License-Identifier: Apache-2.0
"""Training with experts on a disk against the resident program, and against itself."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest

import switchx
from switchx import tree
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.items import stored_items, to_items
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.verify import checkpoint_faults
from switchx.cli.simulate import _record_bytes
from switchx.inference.config import ExpertSlots
from switchx.models.params import abstract_params
from switchx.storage.simulation import run_policy
from switchx.storage.snapshot import Snapshot
from switchx.storage.trace import read_trace
from switchx.training.loop import train
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.host_program import HostProgram
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from tests.cases import slow
from tests.compare import assert_close
from tests.compilation import on_devices
from tests.data.refusals import refused
from tests.training.disk_jobs import MODEL, OPTIMIZERS, E, disk_job, disk_program, saved_files
from tests.training.jobs import DENSE, SPARSE, Events, make_batch, stacked
from tests.training.saved_runs import arrays_of, lines
from tests.training.steps import trained
from tests.training.train_states import assert_same

pytestmark = pytest.mark.usefixtures("steps_traced_once")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_simulated_cache_has_records_of_as_many_bytes(tmp_path, optimizer):
    job, program = disk_job(optimizer=optimizer), disk_program(tmp_path, optimizer=optimizer)
    of_parameters, whole = (
        _record_bytes(job, MODEL.sparse_layer_names, is_training) for is_training in (0, 1)
    )
    assert whole == program.experts.layout.record_bytes > of_parameters


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """Of an optimizer, after five steps: state, measurements, records and their folder, and an
    evaluation."""

    @functools.cache
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        program = disk_program(folder, optimizer=name)
        with program.scope():
            state, measured = trained(program)
            batch = program.place(make_batch(MODEL, 8, seed=9))
            evaluated = program.eval_step(state.params, batch)
            files = saved_files(program, folder / "saved")
            return state, measured, files, folder / "saved", evaluated

    return of


@pytest.mark.parametrize("name", ["adamw", slow("adafactor")])
def test_training_is_that_of_the_resident_program(name, on_disk):
    job = disk_job(optimizer=name, storage=StorageSpec())
    resident = compiled_program(job, jax.devices()[:1])
    batch = make_batch(MODEL, 8, seed=9)
    with resident.scope():
        want, want_measured = trained(resident)
        want_sums, want_stats, want_sample = resident.eval_step(
            want.params, resident.place(batch)
        )
    state, measured, _, folder, (sums, stats, sample) = on_disk(name)
    np.testing.assert_allclose(measured, want_measured, rtol=1e-5)
    np.testing.assert_allclose(sums.loss, want_sums.loss, rtol=1e-5)
    np.testing.assert_array_equal(stats.load_E, want_stats.load_E)
    assert_close(sample, want_sample, rtol=1e-7, atol=1e-3)
    leaves, right = tree.named_leaves(state), tree.named_leaves(want)
    snapshot = Snapshot(folder)
    of_records = snapshot.read(0).arrays.keys()
    assert right.keys() == leaves.keys() | of_records
    for label, leaf in leaves.items():
        np.testing.assert_allclose(leaf, right[label], rtol=1e-4, atol=2e-5, err_msg=label)
    for key in range(snapshot.layout.num_keys):
        (n, e), record = divmod(key, E), snapshot.read(key)
        assert record.updates == 5
        for label, array in record.arrays.items():
            whole = np.asarray(right[label])[n, e]
            np.testing.assert_allclose(array, whole, rtol=1e-4, atol=2e-5, err_msg=label)


@pytest.mark.parametrize("policy", ["next_use", *(slow(p) for p in ("lru", "decayed_lfu"))])
def test_cache_and_policy_change_no_bit_and_are_as_simulated(policy, on_disk, tmp_path):
    record_bytes = disk_program(tmp_path).experts.layout.record_bytes
    storage = StorageSpec("disk", host_bytes=(E + 5) * record_bytes, policy=policy)
    program = disk_program(tmp_path, storage=storage)
    with program.scope():
        state, measured = trained(program)
        metrics = program.experts.metrics()
        files = saved_files(program, tmp_path / "saved")
        hit_rate = program.experts._cached.cache
    want, want_measured, want_files, *_ = on_disk("adamw")
    assert files == want_files and measured == want_measured
    assert_same(jax.device_get(state), jax.device_get(want))
    assert 0 < metrics["hit_rate"] < 1 and metrics["read_bytes"] > 0
    assert 0 < metrics["touched_share"] < 1
    trace = read_trace(tmp_path / "storage" / "trace.npz")
    hits, _ = run_policy(trace, E + 5, policy)
    assert int(np.sum(hits)) == hit_rate.num_hits and len(hits) == hit_rate.num_requested


def test_a_step_that_is_not_finite_leaves_every_record_as_it_was(tmp_path):
    program = disk_program(tmp_path)
    with program.scope():
        state, _ = trained(program, 2)
        before = saved_files(program, tmp_path / "before")
        batch = make_batch(MODEL, 8, seed=7)
        infinite = np.full_like(batch["decoder_loss_weights"], np.inf)
        broken = batch | {"decoder_loss_weights": infinite}
        params = jax.device_get(state.params)
        state, metrics = program.train_step(state, program.place(broken))
        assert int(metrics.is_skipped) == 1
        assert saved_files(program, tmp_path / "after") == before
        assert_same(jax.device_get(state.params), params)
        state, metrics = program.train_step(state, program.place(batch))
        assert int(metrics.is_skipped) == 0
        assert saved_files(program, tmp_path / "next") != before


# Whole runs.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Four steps with all experts in the cache: the run's folder."""
    run = RunFolder(tmp_path_factory.mktemp("finished"))
    with on_devices(1):
        train(disk_job(), run, Events())
    return run


def test_a_run_says_what_its_storage_did(finished):
    logged = lines(finished.metrics)
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    assert all(line["storage"]["hit_rate"] > 0.5 for line in logged[1:])
    assert sum(line["storage"]["read_bytes"] for line in logged) > 0
    trace = read_trace(finished.storage / "trace.npz")
    assert trace.layers == ("decoder 0", "decoder 1") and trace.sweeps == 3


def test_checkpoints_have_records_that_are_sound_and_whole(finished, tmp_path):
    path = finished.checkpoints / "4"
    record = path / "experts" / "decoder_1" / "00002"
    assert record.stat().st_nlink > 1  # the store's own file
    assert checkpoint_faults(finished, 4) == []
    shapes = tree.named_leaves(stored_items(path)["params"])
    expected = tree.named_leaves(abstract_params(MODEL))
    assert {n: x.shape for n, x in shapes.items()} == {n: x.shape for n, x in expected.items()}
    params = restore_params(finished.root, 4)
    assert tree.named_leaves(params).keys() == expected.keys()


def test_its_checkpoint_is_read_into_host_memory(finished):
    program = HostProgram(disk_job(storage=StorageSpec("host")), jax.devices()[:1])
    with Checkpointer(finished, Retention()) as checkpointer:
        state, _ = checkpointer.restore(program.abstract_state, 4, model=MODEL)
    got, want = tree.named_leaves(to_items(state)), arrays_of(finished, 4)
    for name, leaf in got.items():
        np.testing.assert_array_equal(leaf, want[name], err_msg=name)
    assert any("experts/w_in" in name for name in got)


@pytest.mark.slow  # decoding of any checkpoint: test_chosen_experts.py
def test_its_checkpoint_decodes_with_a_quarter_of_the_experts_in_host_memory(finished):
    """Records have the optimizer's statistics, too, which are not kept."""
    prompts, E_bytes = [[5, 6, 7], [9, 5]], 2 * 4 * MODEL.d_model * MODEL.d_ff
    want = switchx.load(finished.root).generate(prompts, max_length=3)
    asked = ExpertSlots(E // 4, host_bytes=2 * E // 4 * E_bytes, prefetch=True)
    model = switchx.load(finished.root, expert_slots=asked)
    assert model.generate(prompts, max_length=3) == want
    traffic = model.experts.traffic
    assert traffic.expert_bytes == 2 * E * E_bytes == 4 * traffic.stored.host_bytes
    assert traffic.stored.read_bytes > 0 and traffic.predicted > 0
    assert model.num_params == switchx.load(finished.root).num_params


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(finished, one_device, tmp_path):
    run = RunFolder(tmp_path)
    train(disk_job(train_steps=2), run, Events())
    small = StorageSpec("disk", host_bytes=10**6, policy="lru", path=str(tmp_path / "fast"))
    train(disk_job(storage=small), run, events := Events())
    assert any("resumed from step 2" in note for note in events.notes)
    assert_same(arrays_of(run, 4), arrays_of(finished, 4))


@pytest.mark.slow  # compiles both layouts
def test_layers_may_be_unrolled_between_device_and_disk(finished, one_device, tmp_path):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(finished.root, run.root)
    unrolled = dataclasses.replace(MODEL, scan_layers=False)
    train(disk_job(unrolled, storage=StorageSpec(), train_steps=5), run, Events())
    train(disk_job(train_steps=6), run, Events())
    before = tree.named_leaves(restore_params(run.root, 5)["decoder"]["blocks"]["layer_1"])
    after = tree.named_leaves(restore_params(run.root, 6)["decoder"]["blocks"]["layer_0"])
    for name, leaf in before.items():  # after one update
        np.testing.assert_allclose(after[name][1], leaf, atol=0.012, err_msg=name)
    fresh = RunFolder(tmp_path / "fresh")
    train(disk_job(train_steps=1, init_from=str(run.root)), fresh, Events())
    begun, read = (tree.named_leaves(restore_params(r.root)) for r in (run, fresh))
    for name, leaf in begun.items():
        np.testing.assert_allclose(read[name], leaf, atol=0.012, err_msg=name)


def test_what_does_not_fit_a_disk_is_refused(one_device, tmp_path):
    def program(model=MODEL, **changes):
        return LayeredProgram(disk_job(model, **changes), RunFolder(tmp_path))

    with refused("StorageSpec.slots=1: "):
        StorageSpec("disk", slots=1)
    with refused("StorageSpec.slots=3, but the model has 2 periods of blocks (decoder)"):
        program(storage=StorageSpec("disk", slots=3))
    # What host memory refuses too: test_host_program.py.
    with refused("a dense model with StorageSpec.experts='disk'"):
        program(DENSE)
    least = E * program().experts.layout.record_bytes
    with refused(f"StorageSpec.host_bytes={least - 1:,} holds 23 experts<any>least {least:,}"):
        program(storage=StorageSpec("disk", host_bytes=least - 1))
    with (
        program().scope(),
        refused("is the store of another run that is not done"),
        program().scope(),
    ):
        pass


def test_records_of_another_model_are_refused(finished, one_device, tmp_path):
    other = disk_program(tmp_path, model=stacked(SPARSE, 2, every=1, num_experts=12))
    with other.scope(), refused("is of another model or optimizer: its number of experts: 24"):
        other.experts.restore(finished.checkpoints / "4" / "experts")
    other = disk_program(tmp_path, optimizer="adafactor")
    with other.scope(), refused("is of another model or optimizer: its arrays of decoder 0"):
        other.experts.restore(finished.checkpoints / "4" / "experts")
