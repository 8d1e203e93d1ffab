# SPDX-License-Identifier: Apache-2.0
"""Saved on any mesh, restored on any other: bit-equal, with the optimizer and the data."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.scan_conversion import write_converted_layout
from switchx.data.loader import TrainLoader, merge_states
from switchx.models.unroll import scanned_blocks, unrolled_blocks
from switchx.optim.adamw import AdamW
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.training.program import TrainingProgram
from switchx.training.resume import write_run_config
from switchx.training.step import StepConfig
from tests.training.jobs import SPARSE, SWITCH, make_job

STEP = 3
# 4 blocks, every other one sparse: a scan over 2 repeats of a run of 2.
MODEL = dataclasses.replace(
    SPARSE, num_decoder_layers=4, switch=dataclasses.replace(SWITCH, num_experts=8)
)
PIPELINE_MOE = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))
MESHES = {
    "data": MeshSpec(),
    "fsdp": MeshSpec(fsdp=8),
    "expert": MeshSpec(data=2, expert=4),
    "model": MeshSpec(data=4, model=2),
    "hierarchical": MeshSpec(data=1, node=2, expert=4),
    "sliced": MeshSpec(data=4, model=2, rules=PIPELINE_MOE),
    "all": MeshSpec(data=1, fsdp=2, expert=2, model=2),
    "one": MeshSpec(data=1),
    "pipe": MeshSpec(pipe=2, data=2, expert=2),
}
QUICK = [("data", "all"), ("pipe", "expert"), ("hierarchical", "pipe"), ("all", "one")]


def job_on(mesh: str, *, is_scanned: bool, optimizer=None):
    model = dataclasses.replace(MODEL, scan_layers=is_scanned)
    changes = {} if optimizer is None else {"optimizer": optimizer}
    if mesh == "pipe":  # a microbatch a stage
        changes["step"] = StepConfig(num_microbatches=2)
    return make_job(model, mesh=MESHES[mesh], **changes)


def program_of(job) -> TrainingProgram:
    return TrainingProgram(job, jax.devices()[:1] if job.mesh == MESHES["one"] else None)


def filled(program: TrainingProgram):
    """A state on the program's mesh, each number its own: as NumPy, and as it is there."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return np.full(leaf.shape, STEP, leaf.dtype)
        return rng.normal(size=leaf.shape).astype(leaf.dtype)

    values = jax.tree.map(draw, program.abstract_state)
    placed = jax.tree.map(
        lambda value, sharding: jax.device_put(jnp.array(value), sharding),
        values,
        program.shardings,
    )
    return values, placed


def loader_at(job, step: int) -> TrainLoader:
    loader = TrainLoader(job.source, job.batches, seed=job.seed)
    for _ in range(step):
        next(loader)
    return loader


def save(run: RunFolder, job):
    """A checkpoint of the job's mesh; its values, and the batch that comes next."""
    write_run_config(run.create(), job)
    program = program_of(job)
    values, placed = filled(program)
    with contextlib.closing(loader_at(job, STEP)) as loader:
        with program.scope(), Checkpointer(run, Retention()) as checkpointer:
            checkpointer.save(STEP, placed, loader.state(), {"neg_log_perplexity": -1.0})
        return values, next(loader)


def assert_restores(run: RunFolder, job, values, batch) -> None:
    """Bit for bit, each leaf on the mesh of the job as its program wants it."""
    program = program_of(job)
    with program.scope(), Checkpointer(run, Retention()) as checkpointer:
        state, data_states = checkpointer.restore(program.restore_target(), STEP)
    wanted, shardings = tree.named_leaves(values), tree.named_leaves(program.shardings)
    got = tree.named_leaves(state)
    assert got.keys() == wanted.keys()
    for name, leaf in got.items():
        assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name
        assert leaf.dtype == wanted[name].dtype
        assert np.asarray(leaf).tobytes() == wanted[name].tobytes(), name
    with contextlib.closing(loader_at(job, 0)) as loader:
        loader.restore(merge_states(data_states))
        for name, rows in next(loader).items():
            np.testing.assert_array_equal(rows, batch[name])


@pytest.mark.parametrize(("saved", "restored"), QUICK)
def test_meshes(tmp_path, saved, restored):
    run = RunFolder(tmp_path)
    values, batch = save(run, job_on(saved, is_scanned=True))
    assert_restores(run, job_on(restored, is_scanned=True), values, batch)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, AdamW()], ids=["adafactor", "adamw"])
@pytest.mark.parametrize("is_scanned", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("saved", MESHES)
def test_every_mesh_to_every_mesh(tmp_path, saved, is_scanned, optimizer):
    if saved == "pipe" and not is_scanned:
        pytest.skip("a pipeline's layers are scanned")
    run = RunFolder(tmp_path)
    values, batch = save(run, job_on(saved, is_scanned=is_scanned, optimizer=optimizer))
    for restored in MESHES:
        if restored != "pipe" or is_scanned:
            job = job_on(restored, is_scanned=is_scanned, optimizer=optimizer)
            assert_restores(run, job, values, batch)


def test_a_matrix_is_split_where_its_mesh_says():
    """Without which restoring would have nothing to do."""
    specs = set()
    for mesh in MESHES:
        shardings = tree.named_leaves(program_of(job_on(mesh, is_scanned=True)).shardings)
        (name,) = [
            each for each in shardings if each.startswith("params") and "w_in_EDF" in each
        ]
        specs.add(str(shardings[name].spec))
    assert len(specs) >= 6


@pytest.mark.parametrize(
    ("optimizer", "saved", "restored"),
    [(None, "expert", "model"), (AdamW(), "all", "data")],
    ids=["adafactor", "adamw"],
)
def test_layouts_of_layers(tmp_path, optimizer, saved, restored):
    """Scanned to unrolled and back, each onto another mesh."""
    scanned, unrolled, again = (RunFolder(tmp_path / each) for each in ("a", "b", "c"))
    values, batch = save(scanned, job_on(saved, is_scanned=True, optimizer=optimizer))
    unrolled.create()
    write_converted_layout(scanned, STEP, unrolled.root, is_scanned=False)
    cut = dataclasses.replace(
        values,
        params=unrolled_blocks(values.params),
        opt_state=cut_state(values.opt_state),
    )
    job = job_on(restored, is_scanned=False, optimizer=optimizer)
    assert_restores(unrolled, job, cut, batch)
    again.create()
    write_converted_layout(unrolled, STEP, again.root, is_scanned=True)
    assert_restores(
        again, job_on(restored, is_scanned=True, optimizer=optimizer), values, batch
    )
    got = tree.named_leaves(restore_params(again.root))
    for name, leaf in tree.named_leaves(values.params).items():
        assert np.asarray(got[name]).tobytes() == leaf.tobytes()


def cut_state(opt_state):
    """The optimizer's state with every dictionary of parameters unrolled."""
    return jax.tree.map(
        lambda each: unrolled_blocks(each) if isinstance(each, dict) else each,
        opt_state,
        is_leaf=lambda each: isinstance(each, dict),
    )


def test_cutting_is_what_the_unrolled_program_has():
    values, _ = filled(program_of(job_on("data", is_scanned=True)))
    target = program_of(job_on("data", is_scanned=False)).abstract_state
    params = unrolled_blocks(values.params)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, target.params)
    assert jax.tree.structure(scanned_blocks(params, 2)) == jax.tree.structure(values.params)
