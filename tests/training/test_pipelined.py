# SPDX-License-Identifier: Apache-2.0
"""Pipelined gradients against the unpipelined model's: raw, dropout on, on eight devices."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.compiled.flops import matrix_flops
from switchx.models.config import RouterConfig
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules, param_shardings
from switchx.pipeline.schedule import ScheduleSpec
from switchx.training.evaluate import eval_step
from switchx.training.pipelined import build_schedule, pipelined_gradients
from switchx.training.programs import compiled_program
from switchx.training.step import StepConfig
from tests.cases import slow
from tests.data.refusals import refused
from tests.training.jobs import (
    DENSE,
    ENCODER_DECODER,
    LENGTH,
    MODERN,
    SPARSE,
    WEIGHTY,
    make_batch,
    make_job,
    make_params,
    with_padded_rows,
    with_switch,
)
from tests.training.pipelines import (
    MICROBATCHES,
    ROWS,
    assert_equal,
    pipelined,
    stacked,
    unpipelined,
)

PIPELINE_MOE = Rules(expert_params=(("N", ("pipe",)), ("E", ("model",)), ("D", ("fsdp",))))


BOTH = with_switch(SPARSE, sublayers="both", dispatcher="einsum")


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (  # experts inside of the tensor-parallel group
            stacked(SPARSE, 4, dispatcher="sliced"),
            MeshSpec(pipe=2, data=2, model=2, rules=PIPELINE_MOE),
        ),
        slow(stacked(MODERN, 4), MeshSpec(pipe=2, data=2, model=2)),
        # two Switch layers a sparse block
        slow(stacked(BOTH, 4), MeshSpec(pipe=2, data=4)),
    ],
    ids=["sliced", "modern", "both"],
)
def test_a_pipeline_is_invariant_to_stages_microbatches_and_padding(config, mesh):
    """The auxiliary losses too, where some of the routing groups are all padding."""
    batch = with_padded_rows(make_batch(config, ROWS), 1, 6, 7)
    want = unpipelined(config, num_microbatches=1, batch=batch)
    got = pipelined(config, mesh, batch=batch)
    assert_equal(got, want)
    assert got[3].groups.tolist() == [ROWS - 3] * len(config.sparse_layer_names)


@pytest.mark.slow
def test_groups_need_not_divide_over_the_devices_of_a_stage():
    """XLA ended the process where it gathered from split slots beside the stages."""
    config = with_switch(
        SPARSE, every=1, group_size=12, router=RouterConfig(exploration="none")
    )
    config = dataclasses.replace(config, num_decoder_layers=2, scan_layers=True)
    step, measured = StepConfig(num_microbatches=2), []
    for mesh in (MeshSpec(pipe=2, data=2, expert=2), MeshSpec()):
        job = make_job(config, mesh=mesh, batch_size=ROWS, step=step)
        program = compiled_program(job, jax.devices()[: mesh.num_devices(1)])
        with program.scope():
            state = program.init_state(
                jax.device_put(make_params(config), program.shardings.params)
            )
            batch = program.place(make_batch(config, ROWS))
            measured.append(jax.device_get(program.train_step(state, batch)[1]))
    assert measured[0].loss == pytest.approx(measured[1].loss, rel=1e-5)
    assert measured[0].grad_norm == pytest.approx(measured[1].grad_norm, rel=2e-5)


@pytest.mark.slow  # 10 s of compilation
def test_lengths_need_not_divide_over_the_stages():
    """14 places over 4 stages: logits of 4, 4, 4 and 2."""
    config = stacked(DENSE, 4)
    batch = {name: x[:, :14] for name, x in make_batch(config, ROWS).items()}
    got = pipelined(config, MeshSpec(pipe=4, data=2), batch=batch)
    assert_equal(got, unpipelined(config, batch=batch))


@pytest.mark.slow
def test_each_stage_computes_its_share_of_the_logits():
    """FLOPs of the products of a model that is nearly all logits, by the compiled program."""
    config = dataclasses.replace(stacked(DENSE, 4), vocab_size=16384)
    batch = make_batch(config, ROWS)
    flops = {}
    for stages in (1, 4):
        schedule = build_schedule(config, ScheduleSpec(), stages, MICROBATCHES)
        compute = functools.partial(pipelined_gradients, config, WEIGHTY, schedule)
        mesh = MeshSpec(pipe=stages, data=1).build(jax.devices()[:stages])
        with use_mesh(mesh, Rules()):
            params = param_shardings(Rules(), mesh, make_params(config))
            placed = jax.device_put(make_params(config), params)
            lowered = jax.jit(compute).lower(placed, batch, key=jax.random.key(1))
        # Every tick is counted with the branch that computes more.
        flops[stages] = matrix_flops(lowered.compile().as_text()) / schedule.num_ticks
    assert flops[4] < 1.1 * flops[1] / 4


# The embedding's rows over the devices that have different tokens (SE-MoE, section 4.3).
VOCAB_ROWS = Rules(params=(("N", ("pipe",)), ("V", ("data",))), may_stay_whole=())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh", "spec"),
    [
        (stacked(DENSE, 2), MeshSpec(pipe=2, data=4, rules=VOCAB_ROWS), ScheduleSpec()),
        (stacked(DENSE, 4), MeshSpec(pipe=4, data=2), ScheduleSpec("gpipe")),
        (stacked(SPARSE, 8, dropout_rate=0.1), MeshSpec(pipe=4, expert=2), ScheduleSpec()),
        (
            stacked(SPARSE, 4, dropout_rate=0.1, dispatcher="all_to_all"),
            MeshSpec(pipe=2, data=2, expert=2),
            ScheduleSpec(),
        ),
        (
            stacked(ENCODER_DECODER, 8, dropout_rate=0.1),
            MeshSpec(pipe=4, model=2),
            ScheduleSpec(),
        ),
        (
            stacked(ENCODER_DECODER, 8, dropout_rate=0.1),
            MeshSpec(pipe=2, data=2, model=2),
            ScheduleSpec("interleaved", 2),
        ),
    ],
)
def test_every_schedule_equals_the_unpipelined_step(config, mesh, spec):
    assert_equal(pipelined(config, mesh, spec), unpipelined(config))


def evaluated(config, mesh: MeshSpec, spec=None):
    """Sums, statistics and the sample of a batch by the stages of `mesh`, and on one device."""
    spec = ScheduleSpec() if spec is None else spec
    step = StepConfig(num_microbatches=MICROBATCHES)
    job = make_job(config, mesh=mesh, step=step, pipeline=spec, batch_size=ROWS)
    program, batch = compiled_program(job), with_padded_rows(make_batch(config, ROWS), 1, 6)
    params = make_params(config)
    with program.scope():
        placed = jax.device_put(params, program.shardings.params)
        got = program.eval_step(placed, program.place(batch))
    if config.switch is not None:
        config = with_switch(config, dispatcher="gather")
    return got, jax.jit(functools.partial(eval_step, config))(params, batch)


SEVERAL_ROWS = with_switch(SPARSE, group_size=2 * LENGTH)


@pytest.mark.parametrize(
    ("config", "mesh", "spec"),
    [
        (
            stacked(SEVERAL_ROWS, 4, dispatcher="sliced"),
            MeshSpec(pipe=2, data=2, model=2, rules=PIPELINE_MOE),
            ScheduleSpec(),
        ),
        slow(stacked(DENSE, 4), MeshSpec(pipe=4, data=2), ScheduleSpec("gpipe")),
        slow(
            stacked(ENCODER_DECODER, 8, dropout_rate=0.1),
            MeshSpec(pipe=2, data=2, model=2),
            ScheduleSpec("interleaved", 2),
        ),
    ],
    ids=["groups_of_rows", "dense", "interleaved"],
)
def test_staged_evaluation_is_that_of_one_device(config, mesh, spec):
    """The sample of choices too, in the batch's order."""
    got, want = jax.device_get(evaluated(config, mesh, spec))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    leaves = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
    for (path, mine), right in zip(*leaves, strict=True):
        name = jax.tree_util.keystr(path)
        rtol = {"f": 1e-3 if right.dtype == np.float16 else 2e-5}.get(right.dtype.kind, 0)
        # A margin is a difference of two probabilities, with the rounding of these.
        atol = 1e-6 if name.endswith("margin_NBL") else rtol * 1e-2
        np.testing.assert_allclose(mine, right, rtol=rtol, atol=atol, err_msg=name)


def test_jobs_that_do_not_divide_are_refused():
    mesh, step = MeshSpec(pipe=4, data=2), StepConfig(num_microbatches=4)
    job = functools.partial(make_job, mesh=mesh, step=step)
    with refused(
        "4 decoder blocks, 2 periods of 2, do not divide over 4 stages<any>use 8 blocks"
    ):
        compiled_program(job(stacked(SPARSE, 4)))
    with refused("mesh axis 'pipe' of size 4 with ModelConfig.scan_layers=False"):
        compiled_program(job(SPARSE))
    switch = dataclasses.replace(SPARSE.switch, encoder_layers=(), decoder_layers=(1,))
    with refused("mesh axis 'pipe' of size 4 with sparse blocks that are named: stages are"):
        compiled_program(job(dataclasses.replace(SPARSE, scan_layers=False, switch=switch)))
    rules = Rules(params=(("V", ("model",)),))
    with refused("Rules.params does not split"):
        compiled_program(job(stacked(SPARSE, 8), mesh=dataclasses.replace(mesh, rules=rules)))
    with refused("num_microbatches=4 of an interleaved schedule<any>use 8 microbatches"):
        compiled_program(
            make_job(
                stacked(SPARSE, 32),
                mesh=MeshSpec(pipe=8),
                step=step,
                pipeline=ScheduleSpec("interleaved", 2),
            )
        )


def test_stages_hold_their_own_blocks_and_optimizer_state():
    program = compiled_program(
        make_job(
            stacked(SPARSE, 8),
            mesh=MeshSpec(pipe=4, data=2),
            step=StepConfig(num_microbatches=4),
        )
    )
    leaves = tree.named_leaves(program.abstract_state)
    shardings = tree.named_leaves(program.shardings)
    stored = {name: shardings[name].shard_shape(leaf.shape) for name, leaf in leaves.items()}
    blocks = [name for name in leaves if "/blocks/" in name and leaves[name].ndim]
    assert any(name.startswith("opt_state") for name in blocks)
    for name in blocks:
        assert stored[name][0] * 4 == leaves[name].shape[0], name
