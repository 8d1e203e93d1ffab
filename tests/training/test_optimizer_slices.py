# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1: steps with slices of the optimizer's state against steps without, and what they move.

Of two replicas a reduce-scatter's sums are those of an all-reduce, so AdamW is bit-equal there;
Adafactor's means over slices, and gradient norms, have another order. With one microbatch the
compiler adds up the token table's gradients of lookups and logits after it has reduced each.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from switchx import tree
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.collectives import executed_collectives
from switchx.optim.adafactor import Adafactor
from switchx.optim.adamw import AdamW
from switchx.optim.protocol import Optax
from switchx.optim.schedules import Constant
from switchx.partitioning.mesh import MeshSpec
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    SPARSE,
    make_batch,
    make_job,
    make_params,
    with_switch,
)

# Each with a usual learning rate; momentum, so that something large is kept. Parameters of
# gradient descent show raw gradients, which the others scale.
OPTIMIZERS = {
    "adamw": (AdamW(), Constant(1e-3)),
    "adafactor": (Adafactor(min_dim_size_to_factor=8, beta1=0.9), Constant(1e-2)),
    "momentum": (Optax(optax.sgd, {"momentum": 0.9}), Constant(0.1)),
}
ROWS, STEPS = 16, 3
_TRAINED: dict[str, tuple] = {}
BOUND = 1e-6


def sliced(job):
    rules = dataclasses.replace(job.mesh.rules, optimizer_slices=("data",))
    return dataclasses.replace(job, mesh=dataclasses.replace(job.mesh, rules=rules))


def trained(job, has_slices: bool):
    """The program, its compiled step, the state after some steps and each step's metrics."""
    key = repr((job, has_slices))
    if key not in _TRAINED:
        _TRAINED[key] = _train(job, has_slices)
    return _TRAINED[key]


def _train(job, has_slices: bool):
    program = compiled_program(sliced(job) if has_slices else job)
    with program.scope():
        params = jax.device_put(make_params(job.model), program.shardings.params)
        state, metrics = program.init_state(params), []
        batches = [
            program.place_for_training(make_batch(job.model, ROWS, seed))
            for seed in range(STEPS)
        ]
        step = program.train_step.lower(state, batches[0], *program.beside).compile()
        for batch in batches:
            state, measured = step(state, batch, *program.beside)
            metrics.append(measured)
    return program, step, state, metrics


def difference(job) -> float:
    """The largest of any parameter, and of loss and gradient norm as a share of them."""
    whole, cut = (trained(job, each) for each in (False, True))
    pairs = zip(
        *(map(np.asarray, jax.tree.leaves(each[2].params)) for each in (whole, cut)),
        strict=True,
    )
    largest = [np.max(np.abs(a - b)) for a, b in pairs]
    for a, b in zip(whole[3], cut[3], strict=True):
        largest += [abs(a.loss / b.loss - 1), abs(a.grad_norm / b.grad_norm - 1)]
    return float(max(largest))


def job_on(mesh: MeshSpec, optimizer: str, model=SPARSE, **step):
    optimizer, schedule = OPTIMIZERS[optimizer]
    return make_job(
        model, mesh=mesh, optimizer=optimizer, schedule=schedule, batch_size=ROWS,
        step=StepConfig(**step),
    )  # fmt: skip


STACKED = dataclasses.replace(SPARSE, num_decoder_layers=4, scan_layers=True)
# Without dense blocks between: half as much to compile.
ALONE = dataclasses.replace(with_switch(STACKED, every=1), num_decoder_layers=2)
# Both sum their gradients once a step, those of two replicas.
SMALL = job_on(MeshSpec(data=2, expert=4), "adamw", ALONE, num_microbatches=2, ema_decay=0.9)


def test_steps_are_bit_equal_to_those_of_a_whole_state():
    states = [trained(SMALL, each)[2] for each in (False, True)]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)
    assert difference(SMALL) <= BOUND  # of the norms, too


def test_each_replica_keeps_its_slice():
    (whole, *_), (cut, *_) = (trained(SMALL, each) for each in (False, True))

    def bytes_of(program, part):
        leaves = jax.tree.leaves(getattr(program.abstract_state, part))
        return sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    assert bytes_of(cut, "params") == bytes_of(whole, "params")
    for part in ("opt_state", "average"):
        assert bytes_of(cut, part) == pytest.approx(bytes_of(whole, part) / 2, rel=0.01)
    assert not cut.notes
    state = trained(SMALL, True)[2]
    for name, leaf in tree.named_leaves(state.opt_state).items():
        expected = tree.named_leaves(cut.abstract_state.opt_state)[name].sharding
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim)
    pairs = zip(
        jax.tree.leaves(state.params), jax.tree.leaves(state.evaluated_params), strict=True
    )
    for w, averaged in pairs:
        assert averaged.sharding.is_equivalent_to(w.sharding, w.ndim)


def test_gradients_are_scattered_and_parameters_gathered_once():
    """As many bytes as the device's parameters, each; what is left of all-reduces is `expert`'s
    of what is no expert's, and scalars."""
    program, step, *_ = trained(SMALL, True)
    sizes = {
        name: int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * 4
        for name, leaf in tree.named_leaves(program.abstract_state.params).items()
    }
    executed = executed_collectives(step.as_text())
    across_data = {"reduce-scatter": 0, "all-gather": 0, "all-reduce": 0}
    for one, count in executed.items():
        if {0, 4} <= set(one.groups[0]) and one.kind in across_data:
            across_data[one.kind] += one.num_bytes * count
    assert across_data["reduce-scatter"] == across_data["all-gather"] == sum(sizes.values())
    assert across_data["all-reduce"] < 0.02 * sum(sizes.values())


@pytest.mark.slow
def test_checkpoints_do_not_depend_on_slices(tmp_path):
    """Saved of slices and restored whole, and back."""
    for saved, restored in ((1, 0), (0, 1)):
        state, target = trained(SMALL, saved)[2], trained(SMALL, restored)[0].abstract_state
        folder = tmp_path / str(saved)
        with Checkpointer(RunFolder(folder), Retention()) as checkpointer:
            checkpointer.save(STEPS, state, None, None)
            checkpointer.wait()
            got, _ = checkpointer.restore(target)
        for a, b, like in zip(*map(jax.tree.leaves, (state, got, target)), strict=True):
            assert b.sharding.is_equivalent_to(like.sharding, b.ndim)
            np.testing.assert_array_equal(a, b)


def test_what_does_not_divide_is_said():
    model = dataclasses.replace(DENSE, d_model=12, d_ff=20)
    job = sliced(job_on(MeshSpec(), "adamw", model))
    (note,) = compiled_program(job).notes
    assert "9 of 19 parameters (1,020 elements)" in note and "w_in_DF (12, 20)" in note
    assert "not sliced over data" in note
    assert not compiled_program(job_on(MeshSpec(), "adamw", model)).notes


def test_buckets_and_experts_in_storage_are_refused():
    model = dataclasses.replace(SPARSE, scan_layers=True, remat="minimal")
    with refused("StepConfig.bucket_bytes=<any> with Rules.optimizer_slices"):
        compiled_program(sliced(job_on(MeshSpec(fsdp=2), "adamw", model, bucket_bytes=1024)))
    job = sliced(make_job(dataclasses.replace(SPARSE, scan_layers=True)))
    storage = dataclasses.replace(job.storage, experts="host")
    with refused("Rules.optimizer_slices=('data',) with StorageSpec.experts='host'"):
        dataclasses.replace(job, storage=storage).require_storage({})


CASES = {
    "data, scanned": (MeshSpec(), STACKED, {}),
    "data, clipped": (MeshSpec(), SPARSE, {"clip_norm": 0.1}),
    "data, T5": (MeshSpec(data=4, model=2), ENCODER_DECODER, {"clip_norm": 0.1}),
    "microbatches": (MeshSpec(data=4, model=2), STACKED, {"num_microbatches": 2}),
    "experts, microbatches": (
        MeshSpec(data=2, expert=4),
        STACKED,
        {"num_microbatches": 2, "clip_norm": 0.1},
    ),
    "fsdp, model": (MeshSpec(data=2, fsdp=2, model=2), STACKED, {"ema_decay": 0.9}),
    "pipeline": (MeshSpec(data=4, pipe=2), STACKED, {"num_microbatches": 4, "clip_norm": 0.1}),
    "pipeline, fsdp": (MeshSpec(data=2, fsdp=2, pipe=2), STACKED, {"num_microbatches": 2}),
    "multipliers": (
        MeshSpec(data=4, model=2),
        SPARSE,
        {"rate_multipliers": ((".*self_attention/.*", 0.0), (".*experts/.*", 0.5))},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_whole_state_on_every_mesh(case, optimizer):
    mesh, model, step = CASES[case]
    assert difference(job_on(mesh, optimizer, model, **step)) <= BOUND
