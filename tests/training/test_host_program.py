# SPDX-License-Identifier: Apache-2.0
"""Training with experts in host memory against the resident program: gradients, steps, runs."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from switchx import tree
from switchx.checkpoint.items import read_items
from switchx.checkpoint.run_folder import RunFolder
from switchx.models.stages import is_of_experts
from switchx.optim.protocol import Optax
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import MeshSpec
from switchx.training.loop import train
from switchx.training.offload import host_program, host_ring
from switchx.training.offload.host_program import HostProgram, require_host_memory
from switchx.training.offload.host_step import (
    host_gradients,
    join_state,
    sliced_update,
    split_state,
    tree_of_stacks,
    with_host_stacks,
)
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig, gradients
from tests.cases import slow_unless
from tests.compare import assert_close
from tests.data.refusals import refused
from tests.partitioning.ring_orders import forwards
from tests.training.disk_jobs import OPTIMIZERS
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    MODERN,
    SPARSE,
    WEIGHTY,
    Events,
    make_batch,
    make_job,
    make_params,
    stacked,
)
from tests.training.saved_runs import arrays_of
from tests.training.steps import trained
from tests.training.train_states import assert_same_gradients

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

ROWS = 16
# Three periods: an odd number.
DECODER = stacked(SPARSE, 6)
BOTH = stacked(ENCODER_DECODER, 6)
# Without dense blocks between: half as much to compile.
SPARSE_ALONE = stacked(SPARSE, 3, every=1)
HOST = StorageSpec("host")


def job_of(model=DECODER, storage=HOST, optimizer="adamw", mesh=MeshSpec(data=1), **changes):
    optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    step = StepConfig(num_microbatches=2, clip_norm=0.5)
    fields = dict(step=step, loss=WEIGHTY, batch_size=ROWS)
    return make_job(
        model, storage=storage, optimizer=optimizer, mesh=mesh, **(fields | changes)
    )


def program_of(*arguments, num_devices=1, **changes) -> TrainingProgram:
    return compiled_program(job_of(*arguments, **changes), jax.devices()[:num_devices])


def raw_gradients(program: TrainingProgram, slots: int | None = None):
    """Gradients by path and loss, dropout on; and the squares of the experts' by path."""
    job = program.job

    def compute(params, batch):
        parts, key = (job.model, job.loss, job.step), jax.random.key(7)
        if slots is None:
            return gradients(*parts, params, batch, key=key)
        return host_gradients(*parts, with_host_stacks(params, slots), batch, key=key)

    with program.scope():
        params = jax.device_put(make_params(job.model), program.shardings.params)
        grads, value, *_ = jax.jit(compute)(params, program.place(make_batch(job.model, ROWS)))
    leaves = tree_of_stacks(grads)
    squares = {name: leaf.squares for name, leaf in leaves.items() if hasattr(leaf, "squares")}
    arrays = {name: np.asarray(getattr(g, "value", g)) for name, g in leaves.items()}
    return arrays, float(value), squares


CELLS = {
    "decoder": dict(model=DECODER),
    "both": dict(model=BOTH),
    "slots_3": dict(model=DECODER, slots=3),
    "microbatch": dict(model=BOTH, step=StepConfig()),
    "expert_mesh": dict(model=DECODER, mesh=MeshSpec(data=2, expert=4), num_devices=8),
    "modern": dict(model=stacked(MODERN, 4)),
    "fsdp_mesh": dict(model=SPARSE_ALONE, mesh=MeshSpec(fsdp=2, expert=4), num_devices=8),
}
DEFAULT = ("fsdp_mesh",)


@pytest.mark.parametrize("cell", [slow_unless(c in DEFAULT, c) for c in CELLS])
def test_raw_gradients_are_those_of_the_resident_program(cell):
    changes = dict(CELLS[cell])
    slots = changes.pop("slots", 2)
    resident = program_of(**changes, storage=StorageSpec())
    on_host = program_of(**changes, storage=StorageSpec("host", slots=slots))
    assert isinstance(on_host, HostProgram) and not isinstance(resident, HostProgram)
    wanted, want_value, _ = raw_gradients(resident)
    got, value, squares = raw_gradients(on_host, slots)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    assert_same_gradients(got, wanted)
    assert squares.keys() == {name for name, g in got.items() if is_of_experts(name, g)}
    for name, each in squares.items():
        np.testing.assert_allclose(each, np.sum(got[name] ** 2), rtol=1e-5)


STEPS = {
    "adamw": dict(optimizer="adamw", model=dataclasses.replace(DECODER, remat="full")),
    "adafactor": dict(
        optimizer="adafactor", model=BOTH, mesh=MeshSpec(fsdp=2, expert=4), num_devices=8
    ),
}


@pytest.mark.slow  # raw gradients: above; a run: test_runs_go_on_between_device_host_and_disk
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_steps_are_those_of_the_resident_program(name):
    changes = STEPS[name]
    resident = program_of(**changes, storage=StorageSpec())
    program = program_of(**changes)
    batch = make_batch(changes["model"], ROWS, seed=9)
    with resident.scope():
        want, want_measured = trained(resident, 3)
        want_sums, want_stats, _ = resident.eval_step(want.params, resident.place(batch))
    with program.scope():
        first = jax.device_get(program.init_state())
        state, measured = trained(program, 3)
        sums, stats, _ = program.eval_step(state.params, program.place(batch))
        infinite = np.full_like(batch["decoder_loss_weights"], np.inf)
        broken = program.place(batch | {"decoder_loss_weights": infinite})
        before = jax.device_get((state.params, state.opt_state))
        got = tree.named_leaves(jax.device_get(state))
        skipped, metrics = program.train_step(state, broken)
    with resident.scope():
        same = jax.device_get(resident.init_state())
    jax.tree.map(np.testing.assert_array_equal, first, same)
    np.testing.assert_allclose(measured, want_measured, rtol=1e-5)
    np.testing.assert_allclose(sums.loss, want_sums.loss, rtol=1e-5)
    np.testing.assert_array_equal(stats.load_E, want_stats.load_E)
    assert_close(got, tree.named_leaves(want), rtol=1e-4, atol=2e-5)
    assert int(metrics.is_skipped) == 1 and int(skipped.skipped) == 1
    after = jax.device_get((skipped.params, skipped.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)


ITEM = {"params": None}
SHAPES = {"blocks/experts/w_in_EDF": (3, 2, 4, 6), "blocks/experts/b_in_EF": (3, 2, 6)}


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}


def sliced(optimizer, steps: int = 3):
    """Parameters and state of each array after some updates by slices; the last is left out."""
    found = {}
    for name in SHAPES:
        params = tree.nested({name: jax.numpy.asarray(draw(0)[name])})
        state = optimizer.init(params)

        @jax.jit
        def update(params, state, grads, is_finite):
            changes = dict(gradient_scale=0.5, is_finite=is_finite)
            return sliced_update(optimizer, params, state, grads, **changes)

        for step in range(steps + 1):
            grads = tree.nested({name: draw(step + 1)[name]})
            params, new = update(params, state, grads, step < steps)
            # What it counts is counted once for all arrays, by the step.
            state = jax.tree.map(lambda a: a if a.ndim else jax.numpy.minimum(a + 1, 3), new)
        found[name] = tree.named_leaves(params)[name], tree.named_leaves(state)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_by_slices_are_those_of_whole_stacks(name):
    optimizer = OPTIMIZERS[name].build(Constant(1e-2))
    for path, (got, state) in sliced(optimizer).items():
        params = tree.nested({path: draw(0)[path]})
        whole = optimizer.init(params)
        for step in range(3):
            grads = tree.nested({path: draw(step + 1)[path]})
            updates, whole = optimizer.update(grads, whole, params, gradient_scale=0.5)
            params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(got, tree.named_leaves(params)[path], rtol=1e-5, atol=1e-7)
        for label, leaf in tree.named_leaves(whole).items():
            np.testing.assert_allclose(state[label], leaf, rtol=1e-5, err_msg=label)


def test_a_state_is_taken_apart_and_joined():
    program = program_of(storage=StorageSpec())
    state = program.abstract_state
    parts = split_state(program.optimizer, state)
    assert join_state(state, parts) == state
    names = tree.named_leaves(parts.dense.params)
    assert not any(is_of_experts(name, leaf) for name, leaf in names.items())


# Whole runs.


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["disk", "device"])
def test_runs_go_on_between_device_host_and_disk(one_device, tmp_path, begin):
    resident, moved = RunFolder(tmp_path / "resident"), RunFolder(tmp_path / "moved")
    # Evaluated at step 0 alone: the others' programs of evaluation are not compiled.
    job = functools.partial(job_of, eval_every=100)
    train(job(storage=StorageSpec()), resident, Events())
    train(job(train_steps=1, storage=StorageSpec(begin)), moved, Events())
    train(job(train_steps=2), moved, events := Events())
    assert any("experts='host' on CPU" in note for note in events.notes)
    train(job(train_steps=3, storage=StorageSpec()), moved, Events())
    train(job(), moved, events := Events())
    assert any("resumed from step 3" in note for note in events.notes)
    assert_close(arrays_of(moved, 4), arrays_of(resident, 4), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(one_device, tmp_path):
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    train(job_of(train_steps=1, storage=StorageSpec(), seed=1), first, Events())
    train(job_of(train_steps=1, init_from=str(first.root)), second, events := Events())
    assert any("optimizer and step are fresh" in note for note in events.notes)
    # After one update, each weight is as far as the learning rate allows.
    for name, leaf in tree.named_leaves(read_items(second.checkpoints / "1", ITEM)).items():
        np.testing.assert_allclose(leaf, arrays_of(first, 1)[name], atol=0.05, err_msg=name)


def test_what_cannot_be_in_host_memory_is_refused(monkeypatch):
    with refused("a dense model with StorageSpec.experts='host'"):
        program_of(DENSE)
    with refused("ModelConfig.scan_layers=False<any>use scan_layers=True"):
        program_of(dataclasses.replace(DECODER, scan_layers=False))
    with refused("StepConfig.bucket_bytes=1024"):
        program_of(step=StepConfig(bucket_bytes=1024))
    with refused("mesh axis 'pipe' of size 3 with<any>use pipe=1"):
        program_of(mesh=MeshSpec(data=1, pipe=3), num_devices=3)
    with refused("StorageSpec.slots=4, but the decoder has 3 periods<any>use at most 3"):
        program_of(storage=StorageSpec("host", slots=4))
    with refused("StorageSpec.slots=1: "):
        StorageSpec("host", slots=1)
    with refused("TrainingJob.optimizer=@Optax() with<any>use AdamW or Adafactor"):
        program_of(optimizer=Optax(optax.lion))

    class Device:
        platform, device_kind = "other", "some accelerator"

        def addressable_memories(self):
            return []

    class Mesh:
        devices = np.array([Device()])

    with refused("StorageSpec.experts='host' on some accelerator<any>'pinned_host'"):
        require_host_memory(Mesh())


def test_a_jax_that_reads_layers_in_a_wrong_order_is_refused_on_gpus(monkeypatch):
    program = program_of()
    program.require_memory()
    monkeypatch.setattr(host_ring, "_fetched", forwards)
    program.require_memory()  # on CPU no program has memory kinds
    monkeypatch.setattr(host_program, "needs_sound_ring", lambda device: True)
    with pytest.raises(RuntimeError, match="openxla/xla#46231"):
        program.require_memory()
