# SPDX-License-Identifier: Apache-2.0
"""Training with experts on a disk on meshes of devices, against the resident program."""

import functools

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.checkpoint.run_folder import RunFolder
from switchx.compiled.collectives import executed_collectives
from switchx.compiled.hlo import parse
from switchx.models.stages import split_blocks
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.training.offload.disk_periods import Kind
from switchx.training.offload.disk_program import LayeredProgram
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.programs import compiled_program
from tests.cases import slow
from tests.data.refusals import refused
from tests.training.disk_jobs import MESH_E, MESH_MODEL, MESH_ROWS, mesh_job, saved_files
from tests.training.jobs import make_batch, make_params
from tests.training.steps import raw_gradients, trained
from tests.training.train_states import assert_same, assert_same_gradients

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

# Pipeline MoE's: experts are on devices that share their tokens.
SLICED = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))


def program_of(job, folder) -> LayeredProgram:
    return LayeredProgram(job, RunFolder(folder), jax.devices()[: job.mesh.num_devices(1)])


class KeptGradients:
    """A program's records, which also keep the gradients of experts, and what was used.

    Attributes:
        grads: `[N, E, ...]` by path, as of the whole step.
    """

    def __init__(self, experts, like):
        names = {n.removeprefix("params/") for n in experts.abstract}
        self.grads = {name: np.zeros_like(like[name]) for name in names & like.keys()}
        self.used, self._experts = [], experts

    def __getattr__(self, name):
        return getattr(self._experts, name)

    def keep_gradients(self, period, used_JE, bank):
        self._experts.keep_gradients(period, used_JE, bank)
        self.used += list(used_JE)
        for n, names in zip(period.layers, period.names, strict=True):
            experts, rows = self._experts._gradients[n]
            for name in names:
                self.grads[name][period.number, experts] = rows[name]


@functools.cache
def resident_step():
    """Parameters, and the raw gradients of a step with all of them on one device."""
    program = compiled_program(mesh_job(MeshSpec(data=1), StorageSpec()), jax.devices()[:1])
    params = jax.device_get(make_params(MESH_MODEL))
    grads, *_ = raw_gradients(program, params=params)
    return params, tree.named_leaves(jax.device_get(grads))


DATA, MODEL_AXIS = MeshSpec(data=2, expert=4), MeshSpec(data=1, model=2, expert=2)
FSDP = MeshSpec(data=2, fsdp=2, expert=2)
MESHES = {
    "fsdp": (FSDP, "gather"),
    "data": (DATA, "gather"),
    "model": (MODEL_AXIS, "gather"),
    "fsdp_alone": (MeshSpec(data=1, fsdp=2, expert=2), "gather"),
    "all_to_all": (DATA, "all_to_all"),
    "ragged_all_to_all": (FSDP, "ragged_all_to_all"),
    "einsum": (MeshSpec(data=2, expert=2, model=2), "einsum"),
    "hierarchical": (MeshSpec(data=1, node=2, expert=2), "hierarchical"),
    "sliced": (MeshSpec(data=2, fsdp=2, model=2, rules=SLICED), "sliced"),
    "dropless": (MeshSpec(data=2, fsdp=2), "dropless"),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # given ones
@pytest.mark.parametrize("name", ["fsdp", *(slow(n) for n in MESHES if n != "fsdp")])
def test_raw_gradients_are_those_of_one_device_with_all_experts(name, tmp_path):
    mesh, dispatcher = MESHES[name]
    params, want = resident_step()
    program = program_of(mesh_job(mesh, dispatcher=dispatcher), tmp_path)
    with program.scope():
        state = program.init_state(params)
        banks = KeptGradients(program.experts, want)
        programs = Lowered(program._layered)
        program.experts.begin_sweeps(is_training=True)
        batch = program.place(make_batch(MESH_MODEL, MESH_ROWS))
        grads, _ = programs.layered.gradients(state.params, batch, banks, key=jax.random.key(0))
        targets = jax.tree.leaves(program.shardings.params)
        for leaf, target in zip(jax.tree.leaves(grads), targets, strict=True):
            assert leaf.sharding.is_equivalent_to(target, leaf.ndim)
    assert not np.all(banks.used)  # an expert without tokens
    assert_same_gradients(tree.named_leaves(grads) | banks.grads, want)
    if name == "fsdp":
        assert_dense_slices_are_gathered_a_run_ahead(programs.hlo, state.params)


class Lowered:
    """Compiled programs of a step.

    Attributes:
        layered: what is to be called; the programs are kept.
        hlo: texts by the program's name and the number of its period.
    """

    def __init__(self, layered):
        self.layered, self.hlo = layered, {}
        for name in ("_begin", "_forward", "_backward"):
            setattr(layered, name, self._kept(name, getattr(layered, name)))

    def _kept(self, name, jitted):
        def call(*arguments):
            places = [int(each) for each in arguments if isinstance(each, np.int32)]
            program = jitted.lower(*arguments).compile()
            self.hlo[name.removeprefix("_"), *places] = program.as_text()
            return program(*(x for x in arguments if not isinstance(x, Kind | bool)))

        return call


def assert_dense_slices_are_gathered_a_run_ahead(hlo, dense):
    """SE-MoE's horizontal prefetch, in the compiled programs of two periods on an `fsdp`
    mesh."""
    (blocks,), _ = split_blocks(MESH_MODEL, dense)
    shapes = sorted((1, *leaf.shape[1:]) for leaf in jax.tree.leaves(blocks))

    def gathered(*key):
        found = executed_collectives(hlo[key])
        arrays = [
            shape
            for one, count in found.items()
            if one.kind == "all-gather"
            for _, shape in one.arrays * count
        ]
        return sorted(shape for shape in arrays if shape in shapes)

    # The first period's own before it begins, then each period the next one's; likewise back.
    assert gathered("begin") == shapes
    assert gathered("forward", 0) == gathered("backward", 1) == shapes
    assert gathered("forward", 1) == gathered("backward", 0) == []
    for key in (("forward", 0), ("backward", 1)):
        assert_nothing_waits_for_the_gathered(hlo[key], shapes)


def assert_nothing_waits_for_the_gathered(text, shapes):
    """All-gathers of these shapes read the stacks alone, and no loop reads what they give."""
    entry = parse(text).entry

    def read(each):
        """All instructions that one depends on."""
        return {each}.union(*map(read, each.operands))

    gathers = (each for each in entry if each.opcode == "all-gather")
    ahead = {each for each in gathers if each.arrays[0].shape in shapes}
    assert len(ahead) == len(shapes)
    for each in ahead:
        arguments = [one for one in read(each) if one.opcode == "parameter"]
        assert arguments
        for argument in arguments:
            assert argument.op_name.startswith(("blocks[", "period")), argument
    loops = [each for each in entry if each.opcode == "while"]
    assert loops and not any(read(loop) & ahead for loop in loops)


@pytest.mark.slow  # tests/training/test_disk_program.py has one device
@pytest.mark.parametrize("name", ["fsdp", "model"])
def test_steps_on_a_mesh(name, tmp_path):
    """Losses are the resident program's; the cache changes no bit; a step that is not finite
    changes no record."""
    mesh, _ = MESHES[name]
    resident = compiled_program(mesh_job(MeshSpec(data=1), StorageSpec()), jax.devices()[:1])
    with resident.scope():
        _, want = trained(resident, 4)
    program = program_of(mesh_job(mesh), tmp_path / "all")
    with program.scope():
        state, measured = trained(program, 4)
        files = saved_files(program, tmp_path / "saved")
        dense = jax.device_get(state.params)
    np.testing.assert_allclose(measured, want, rtol=1e-5)
    few = (MESH_E + 3) * program.experts.layout.record_bytes
    storage = StorageSpec("disk", host_bytes=few, policy="lru")
    program = program_of(mesh_job(mesh, storage), tmp_path / "few")
    with program.scope():
        state, again = trained(program, 4)
        assert 0 < program.experts.metrics()["hit_rate"] < 1
        assert again == measured and saved_files(program, tmp_path / "saved_too") == files
        assert_same(jax.device_get(state.params), dense)
        batch = make_batch(MESH_MODEL, MESH_ROWS, seed=9)
        infinite = np.full_like(batch["decoder_loss_weights"], np.inf)
        state, metrics = program.train_step(
            state, program.place(batch | {"decoder_loss_weights": infinite})
        )
        assert int(metrics.is_skipped) == 1
        assert saved_files(program, tmp_path / "after") == files
        sums, _, _ = program.eval_step(state.params, program.place(batch))
    with resident.scope():
        state, _ = trained(resident, 4)
        expected, _, _ = resident.eval_step(state.params, resident.place(batch))
    np.testing.assert_allclose(sums.loss, expected.loss, rtol=1e-5)


def test_what_does_not_divide_is_refused(tmp_path):
    with refused("expert dimension E=16 is not divisible by mesh axis 'expert' of size 3"):
        program_of(mesh_job(MeshSpec(data=1, expert=3), batch_size=18), tmp_path)
    with refused("mesh axis 'pipe' of size 2 with StorageSpec.experts='disk'<any>use pipe=1"):
        program_of(mesh_job(MeshSpec(data=1, pipe=2)), tmp_path)
