# SPDX-License-Identifier: Apache-2.0
"""Programs over a mesh: shardings, raw gradients as on one device, shapes for the planner."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.compiled.collectives import collectives
from switchx.compiled.workload import fitting_group_size, workload_of
from switchx.data.objectives import InputsToTargets
from switchx.data.tasks import Task
from switchx.models.adapters import LoRASpec
from switchx.models.config import RouterConfig
from switchx.moe.capacity import group_shape
from switchx.optim.adafactor import Adafactor
from switchx.optim.updates import global_norm
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.pipeline.schedule import ScheduleSpec
from switchx.planner.layout import Layout
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.cases import slow, slow_unless
from tests.compare import assert_close_to_largest
from tests.data.fakes import pair_corpus
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    LENGTH,
    SPARSE,
    TASK,
    WEIGHTY,
    make_batch,
    make_job,
    make_params,
    run_model,
    with_switch,
)
from tests.training.saved_runs import save_run
from tests.training.steps import raw_gradients
from tests.training.train_states import assert_same

MESH = MeshSpec(data=2, expert=4)
PIPELINE_MOE = Rules(expert_params=(("E", ("model",)), ("D", ("fsdp",))))
# SE-MoE: the vocabulary's rows on devices with different tokens.
VOCABULARY_ROWS = Rules(params=(("D", ("fsdp",)), ("V", ("data",))), may_stay_whole=())


def make_program(model, mesh=MESH, devices=None, **changes) -> TrainingProgram:
    optimizer = Adafactor(min_dim_size_to_factor=8, beta1=0.9)
    job = make_job(
        model, mesh=mesh, optimizer=optimizer, loss=WEIGHTY, batch_size=16, **changes
    )
    return compiled_program(job, devices)


def one_device(model, **changes) -> TrainingProgram:
    return make_program(model, MeshSpec(), jax.devices()[:1], **changes)


def shard_shapes(array) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in array.addressable_shards}


@pytest.fixture(scope="module")
def want():
    """Raw gradients on one device."""
    return raw_gradients(one_device(ENCODER_DECODER))


# Switch Transformers, Figure 9: its columns on eight devices; then what it does not have.
MESHES = {
    "data": (MeshSpec(), "gather"),
    "model and data": (MeshSpec(model=2), "gather"),
    "expert and data": (MeshSpec(data=2, expert=4), "gather"),
    "expert, model and data": (MeshSpec(expert=2, model=2), "gather"),
    "fsdp": (MeshSpec(fsdp=4), "gather"),
    "fsdp, dropless": (MeshSpec(fsdp=2, model=2), "dropless"),
    "all-to-all": (MeshSpec(fsdp=2, expert=2, model=2), "all_to_all"),
    "hierarchical": (MeshSpec(node=2, expert=2), "hierarchical"),
    "ragged": (MeshSpec(expert=4), "ragged_all_to_all"),
    "vocabulary rows": (MeshSpec(rules=VOCABULARY_ROWS), "gather"),
    "vocabulary rows, fsdp": (MeshSpec(fsdp=2, expert=2, rules=VOCABULARY_ROWS), "all_to_all"),
    "pipeline moe": (MeshSpec(model=2, rules=PIPELINE_MOE), "sliced"),
    "pipeline moe, split tokens": (MeshSpec(model=2, rules=PIPELINE_MOE), "sliced_scatter"),
}


def assert_gradients_of_one_device(got, want):
    (grads, _, _, stats), (want_grads, _, _, want_stats) = got, want
    assert all(np.max(np.abs(leaf)) > 1e-4 for leaf in jax.tree.leaves(want_grads))
    assert_close_to_largest(grads, want_grads, 1e-5)
    np.testing.assert_allclose(global_norm(grads), global_norm(want_grads), rtol=3e-6)
    for name in ("load_E", "dropped", "tokens"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(want_stats, name))
    assert float(np.sum(want_stats.dropped)) > 0  # capacity is at work


# Every axis; Pipeline MoE's experts: test_pipelined.py; a split vocabulary:
# tests/layers/test_split_table.py.
@pytest.mark.parametrize("name", [slow_unless(each == "all-to-all", each) for each in MESHES])
def test_raw_gradients_on_every_mesh_are_those_of_one_device(want, name):
    """Not through the optimizer: Adafactor hides a gradient that is k times too large."""
    mesh, dispatcher = MESHES[name]
    model = with_switch(ENCODER_DECODER, dispatcher=dispatcher)
    assert_gradients_of_one_device(raw_gradients(make_program(model, mesh)), want)


# Random numbers are those of a row in the batch, of experts' slots those of a group. Groups of
# two rows stay together.
RANDOM = dataclasses.replace(
    with_switch(SPARSE, every=1, group_size=2 * LENGTH, router=RouterConfig(jitter=0.3)),
    num_decoder_layers=1,
    dropout_rate=0.2,
)


@pytest.mark.parametrize(
    "mesh", [MeshSpec(data=2, expert=2, model=2), slow(MeshSpec(data=4, fsdp=2))], ids=str
)
def test_replicas_draw_and_balance_as_one_device_does(mesh):
    step = StepConfig(num_microbatches=2)
    want = raw_gradients(one_device(RANDOM, step=step))
    got = raw_gradients(make_program(RANDOM, mesh, step=step))
    assert_gradients_of_one_device(got, want)
    np.testing.assert_array_equal(got[3].groups, want[3].groups)


# Each of two microbatches has two groups, on four replicas.
WIDE = with_switch(SPARSE, group_size=4 * LENGTH, capacity_factor=1.0)
IN_TWO = StepConfig(num_microbatches=2)


def test_groups_on_several_replicas_are_said():
    mesh = MeshSpec(data=4, expert=2)
    (note,) = make_program(WIDE, mesh, step=IN_TWO).notes
    assert "over data in each of 2 microbatches" in note and "4 replicas" in note
    assert make_program(SPARSE, mesh, step=IN_TWO).notes == ()
    # Of one microbatch it matters where each replica wants its slice.
    cut = dataclasses.replace(mesh, rules=Rules(optimizer_slices=("data",)))
    wider = with_switch(SPARSE, group_size=8 * LENGTH)
    assert make_program(wider, mesh).notes == ()
    (note,) = make_program(wider, cut).notes
    assert "gradients are summed whole on all of data: some routing group" in note
    # Smaller groups are no way out where the whole batch is counted first.
    whole = with_switch(SPARSE, router=RouterConfig(jitter=0.0, balance_scope="batch"))
    (note,) = make_program(whole, mesh, step=IN_TWO).notes
    assert "with balance_load='previous_step', or" in note and "group_size" not in note


def test_a_norm_that_takes_the_scale_away_is_said():
    normed = dataclasses.replace(SPARSE, qk_norm="head")
    (note,) = make_program(normed, MeshSpec()).notes
    assert "scores begin sqrt(K) too large" in note
    assert (
        make_program(dataclasses.replace(normed, scale_attention=True), MeshSpec()).notes == ()
    )


@pytest.mark.parametrize("by", ["init_from", "lora", "distillation"])
def test_inputs_that_are_read_otherwise_than_where_a_run_begins_are_said(by, tmp_path):
    base = str(save_run(tmp_path / "base", DENSE))
    begins = {
        "init_from": base,
        "lora": LoRASpec(base, 9),
        "distillation": Distillation(base, starts_from_teacher=True),
    }[by]
    pairs = Task("pairs", pair_corpus(("abc", "d")), TASK.vocabulary, InputsToTargets())

    def notes(objective) -> list[str]:
        task = dataclasses.replace(pairs, objective=objective)
        job = make_job(DENSE, source=task, **{by: begins})
        notes = compiled_program(job, jax.devices()[:1]).notes
        return [note for note in notes if "causally" in note]

    (said,) = notes(InputsToTargets())
    assert base in said and "--gin.InputsToTargets.is_prefix_bidirectional=False" in said
    assert not notes(InputsToTargets(is_prefix_bidirectional=False))


@pytest.mark.slow  # of smaller groups: above
def test_groups_on_several_replicas_keep_their_numbers():
    program = make_program(WIDE, MeshSpec(data=4, expert=2), step=IN_TWO)
    want = raw_gradients(one_device(WIDE, step=IN_TWO))
    assert_gradients_of_one_device(raw_gradients(program), want)


# Three groups, the last with a place of padding.
UNDIVIDED = with_switch(
    SPARSE, group_size=6 * LENGTH, router=RouterConfig(jitter=0.0, overflow="dropless")
)


@pytest.mark.parametrize("mesh", [MeshSpec(data=4, model=2), slow(MeshSpec(fsdp=8))], ids=str)
def test_where_nothing_is_dropped_devices_need_no_whole_groups(mesh):
    want = raw_gradients(one_device(UNDIVIDED))
    program = make_program(with_switch(UNDIVIDED, dispatcher="auto"), mesh)
    assert program.job.model.switch.dispatches_rows
    got = raw_gradients(program)
    assert_close_to_largest(got[0], want[0], 1e-5)
    assert float(got[1]) == pytest.approx(float(want[1]), rel=1e-6)
    np.testing.assert_array_equal(got[3].load_E, want[3].load_E)


def test_rows_lose_no_token_where_experts_are_split_and_groups_are_not():
    """Each device receives more of 4 rows than the groups of 3 tokens have capacity for."""
    router = RouterConfig(jitter=0.0, overflow="dropless")
    model = with_switch(SPARSE, group_size=3, router=router, dispatcher="dropless")
    rng, params = np.random.default_rng(0), make_params(model)
    batch = {
        "decoder_input_tokens": rng.integers(3, 380, (4, 20)).astype(np.int32),
        "decoder_segment_ids": np.ones((4, 20), np.int32),
        "decoder_positions": np.tile(np.arange(20, dtype=np.int32), (4, 1)),
    }
    want, _ = run_model(model, params, batch, is_training=False)
    mesh = MeshSpec(data=1, expert=4)
    with use_mesh(mesh.build(jax.devices()[:4]), mesh.rules):
        got, _ = run_model(model, params, batch, is_training=False)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def stepped():
    """A sharded program, its compiled step, its first state (donated) and what came of it."""
    program = make_program(SPARSE)
    with program.scope():
        params = jax.device_put(make_params(SPARSE), program.shardings.params)
        state = program.init_state(params)
        batch = program.place(make_batch(SPARSE, 16))
        compiled = program.train_step.lower(state, batch).compile()
        after, metrics = compiled(state, batch)
    return program, compiled, state, after, metrics


def test_expert_weights_and_their_statistics_are_split_over_the_expert_axis(stepped):
    program, _, _, after, _ = stepped
    experts = "decoder/blocks/layer_1/ffn/experts"
    params = tree.named_leaves(after.params)
    statistics = tree.named_leaves(after.opt_state.statistics)
    for array, shape in (
        (params[f"{experts}/w_in_EDF"], (2, 16, 24)),
        (params[f"{experts}/w_out_EFD"], (2, 24, 16)),
        (params["decoder/blocks/layer_1/ffn/w_router_DE"], (16, 8)),
        (params["embedding/embedding_VD"], (384, 16)),
        (statistics[f"{experts}/w_in_EDF/v_row_ED"], (2, 16)),
        (statistics[f"{experts}/w_in_EDF/v_col_EF"], (2, 24)),
        (statistics[f"{experts}/w_in_EDF/momentum_EDF"], (2, 16, 24)),
        (statistics[f"{experts}/w_out_EFD/v_col_ED"], (2, 16)),
        (after.key_data, after.key_data.shape),
        (after.step, ()),
    ):
        assert shard_shapes(array) == {shape}
    # Each expert is on the two devices of one column of the mesh, and nowhere else.
    by_device = {
        shard.device.id: shard.index[0].start or 0
        for shard in params[f"{experts}/w_in_EDF"].addressable_shards
    }
    assert by_device == {i: 2 * (i % 4) for i in range(8)}
    assert program.shardings.params["embedding"]["embedding_VD"].is_fully_replicated


def assert_placed(arrays, shardings) -> None:
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(shardings), strict=True)
    assert all(leaf.sharding.is_equivalent_to(sharding, leaf.ndim) for leaf, sharding in pairs)


def test_the_state_keeps_its_shardings_and_the_old_one_is_donated(stepped):
    program, _, before, after, _ = stepped
    assert_placed(after, program.shardings)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert int(after.step) == 1
    # A checkpoint is read to where the state lives.
    targets = program.abstract_state
    for leaf, target in zip(jax.tree.leaves(after), jax.tree.leaves(targets), strict=True):
        assert (leaf.shape, leaf.dtype) == (target.shape, target.dtype)
    assert_placed(after, jax.tree.map(lambda target: target.sharding, targets))


def test_the_sharded_step_communicates_and_one_device_does_not(stepped):
    _, compiled, _, _, metrics = stepped
    kinds = {each.kind for each in collectives(compiled.as_text())}
    assert "all-reduce" in kinds
    # Tokens travel to their experts and back.
    assert kinds & {"all-to-all", "all-gather"}
    assert np.isfinite(metrics.loss) and metrics.loss.sharding.is_fully_replicated
    program = one_device(dataclasses.replace(DENSE, num_decoder_layers=1))
    with program.scope():
        batch = jax.eval_shape(lambda: program.place(make_batch(DENSE, 16)))
        lowered = program.train_step.lower(program.abstract_state, batch)
        assert collectives(lowered.compile().as_text()) == []


def test_each_device_gets_its_rows_of_the_batch():
    program, batch = make_program(DENSE, MeshSpec(data=4, expert=2)), make_batch(DENSE, 16)
    for name, array in program.place(batch).items():
        assert array.sharding.spec == PartitionSpec(("data", "expert"))
        assert shard_shapes(array) == {(2, LENGTH)}
        np.testing.assert_array_equal(array, batch[name])


def test_given_parameters_are_those_of_the_state_and_in_memory_once():
    program, params = make_program(DENSE), jax.device_get(make_params(DENSE))
    given = jax.device_put(params, program.shardings.params)
    state = program.init_state(given)
    assert_same(jax.device_get(state.params), params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize(("num_microbatches", "multiple"), [(1, 8), (4, 32)])
def test_a_batch_that_the_devices_do_not_divide_is_refused(num_microbatches, multiple):
    job = make_job(
        DENSE, mesh=MESH, batch_size=12, step=StepConfig(num_microbatches=num_microbatches)
    )
    with refused(
        f"batch_size=12 in {num_microbatches} microbatches is not divisible by the 8 devices "
        f"that the mesh splits rows over; use a multiple of {multiple}, fewer "
        "microbatches (NUM_MICROBATCHES), or a smaller mesh"
    ):
        compiled_program(job)


def test_a_split_vocabulary_and_its_statistics_take_a_part_of_the_memory():
    program = make_program(DENSE, MeshSpec(rules=VOCABULARY_ROWS))
    params = jax.device_put(make_params(DENSE), program.shardings.params)
    state = program.init_state(params)
    assert shard_shapes(state.params["embedding"]["embedding_VD"]) == {(48, 16)}
    statistics = tree.named_leaves(state.opt_state.statistics)
    table = "embedding/embedding_VD"
    assert shard_shapes(statistics[f"{table}/v_row_V"]) == {(48,)}
    assert shard_shapes(statistics[f"{table}/momentum_VD"]) == {(48, 16)}


def test_a_schedule_without_stages_is_refused():
    with refused("TrainingJob.pipeline=<any> on a mesh of one stage: nothing would follow it"):
        make_program(DENSE, MeshSpec(), pipeline=ScheduleSpec("gpipe"))


def test_storage_without_effect_is_said():
    """configs/storage/host.gin may follow a file that bound fields of a disk."""
    storage = StorageSpec(slots=3, host_bytes=2**20, path="/ssd")
    (note,) = compiled_program(make_job(SPARSE, storage=storage)).notes
    assert "slots=3, StorageSpec.host_bytes=1048576, StorageSpec.path='/ssd'" in note
    assert "without effect with StorageSpec.experts='device'" in note
    for experts, number in (("disk", 0), ("host", 2)):
        other = dataclasses.replace(storage, experts=experts)
        assert len(make_job(SPARSE, storage=other).unused_storage) == number


def test_groups_capacity_and_refusals_are_the_dispatchers():
    job = make_job(SPARSE)
    workload = workload_of(job)
    assert workload.routing(8, 8)[:2] == group_shape(64, 8)
    layout = Layout(expert=8, dispatcher="all_to_all")
    assert workload.refusal(layout, 8, 8) is None
    assert "keeps routing groups whole" in workload.refusal(layout, 4, 16)


def test_group_size_that_fits_some_devices():
    job = make_job(with_switch(SPARSE, group_size=8192), batch_size=16)
    size = fitting_group_size(job, 8)
    assert group_shape(16 * 8, size)[0] % 8 == 0
    assert group_shape(16 * 8, size + 1)[0] % 8 != 0
    assert fitting_group_size(make_job(dataclasses.replace(SPARSE, switch=None)), 8) is None
