# SPDX-License-Identifier: Apache-2.0
"""Which dispatcher runs: a few tokens do not cost a slot of every expert."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, NamedSharding, PartitionSpec

from switchx.hardware.spec import load_hardware
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.moe import dispatchers
from switchx.moe.dispatch import einsum_dispatch
from switchx.moe.dispatcher_traits import DISPATCHERS
from switchx.moe.dispatchers import FUNCTIONS, choose_dispatcher, refusal
from switchx.moe.dropless import gathered_dispatch
from switchx.moe.layer import SwitchFFN
from switchx.partitioning import collectives
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from switchx.planner.search import layouts
from tests.cases import slow
from tests.data.refusals import refused
from tests.moe.sharded import (
    HOMES,
    PIPELINE_MOE,
    C,
    T,
    answer,
    answer_on,
    answerer,
    assert_same,
    make_problem,
    name_of,
)
from tests.planner.workloads import make_workload

E, D, F, TOKENS = 128, 64, 256, 4


def layer(dispatcher="gather", d_model=D, d_ff=F):
    switch = SwitchConfig(E, every=1, dispatcher=dispatcher, router_init_scale=1.0)
    config = ModelConfig(
        "decoder_only", 8, d_model, d_ff, 2, 4, 1, activation="relu", switch=switch
    )
    return SwitchFFN(config, key=jax.random.key(0))


def decode(module, tokens=TOKENS):
    x_BLD = jnp.asarray(
        np.random.default_rng(0).normal(size=(tokens, 1, module.config.d_model))
    )
    is_token_BL = jnp.ones((tokens, 1), bool)
    run = jax.jit(lambda x_BLD: module(x_BLD, is_token_BL, is_training=False)[0])
    return run.lower(x_BLD).compile(), x_BLD


def test_four_tokens_of_decoding_cost_four_experts_not_all():
    """Issue 3: within 4 times of four tokens through one expert each, plus the router."""
    (few, x_BLD), (slots, _) = decode(layer()), decode(layer("einsum"))
    ideal = TOKENS * (2 * 2 * D * F + 2 * D * E)
    # XLA counts one turn of a loop: one row, in each of the two products, of four.
    turns = few.cost_analysis()["flops"] + (TOKENS - 1) * 2 * 2 * D * F
    assert ideal <= turns < 1.5 * ideal
    assert f"f32[1,{F}]" in few.as_text() and f"f32[1,{F},{D}]" in few.as_text()
    assert slots.cost_analysis()["flops"] > 50 * ideal
    np.testing.assert_allclose(few(x_BLD), slots(x_BLD), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gather", slow("einsum")])
def test_slots_that_do_not_divide_are_split_all_the_same(name):
    """20 slots of an expert on 8 devices: each has 3 at most, and not all 20."""
    rng, spec, own = np.random.default_rng(0), MeshSpec(), answerer(FUNCTIONS[name])
    problem = make_problem([[rng.permutation(8)[:1] for _ in range(96)]], capacity=20)
    whole = own.lower(*problem.arguments).compile().cost_analysis()["flops"]
    run = answerer(FUNCTIONS[name])
    with use_mesh(spec.build(), spec.rules):
        split = run.lower(*problem.arguments).compile().cost_analysis()["flops"]
    assert split < 0.25 * whole
    assert_same(answer_on(spec, name, problem, run), own(*problem.arguments))


@pytest.mark.parametrize("tokens", [slow(9), E])
def test_up_to_as_many_tokens_as_experts(tokens):
    (few, x_BLD), (slots, _) = decode(layer(), tokens), decode(layer("einsum"), tokens)
    np.testing.assert_allclose(few(x_BLD), slots(x_BLD), rtol=1e-4, atol=1e-5)


def test_training_computes_slots_whatever_their_number():
    """Gradients of all experts are formed anyway."""
    module, x_BLD = layer(), jnp.ones((TOKENS, 1, D))
    program = jax.make_jaxpr(
        lambda x_BLD: module(x_BLD, jnp.ones((TOKENS, 1), bool), is_training=True)[0]
    )(x_BLD)
    assert f"float32[{E},{TOKENS},{F}] = dot_general" in str(program).replace("f32", "float32")


def test_the_configuration_names_what_there_is():
    assert FUNCTIONS.keys() == DISPATCHERS.keys()


def why_not(name, spec, **sizes):
    return refusal(name, spec.build(), spec.rules, **sizes)


@pytest.mark.parametrize(
    "spec", [MeshSpec(), MeshSpec(expert=4), MeshSpec(model=4)], ids=name_of
)
@pytest.mark.parametrize("name", ["gather", "einsum"])
def test_what_the_compiler_splits_runs_anywhere(name, spec):
    assert why_not(name, spec, num_groups=1, tokens_per_group=3) is None


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        (
            "all_to_all",
            MeshSpec(),
            "dispatcher='all_to_all' needs experts on devices that have different tokens, and "
            "this mesh has none; use expert > 1, or dispatcher='gather'",
        ),
        (
            "ragged_all_to_all",
            MeshSpec(model=4, rules=PIPELINE_MOE),
            "dispatcher='ragged_all_to_all' needs experts on devices that have different "
            "tokens, and this mesh has none (rules put them on 'model'); use expert > 1, or "
            "dispatcher='gather'",
        ),
        (
            "hierarchical",
            MeshSpec(expert=4),
            "dispatcher='hierarchical' needs an expert axis in two, node > 1 and expert > 1, "
            "but this mesh has node=1 x expert=4; use dispatcher='all_to_all', or split it",
        ),
        (
            "dropless",
            MeshSpec(node=2, expert=2),
            "dispatcher='dropless' needs all experts on every device, but this mesh splits "
            "them (rules put them on 'node*expert'); use dispatcher='ragged_all_to_all', or a "
            "mesh without",
        ),
        (
            "sliced",
            MeshSpec(expert=4),
            "dispatcher='sliced' needs experts on devices that share their tokens, as "
            "configs/meshes/pipeline_moe.gin puts them on 'model'; this mesh has none (rules "
            "put them on 'expert'); use that file with model > 1, or dispatcher='gather'",
        ),
        (
            "sliced",
            MeshSpec(
                fsdp=2,
                model=2,
                rules=Rules(expert_params=(("E", ("model",)), ("F", ("fsdp",)))),
            ),
            "dispatcher='sliced' needs whole experts, but Rules.expert_params splits F over "
            "'fsdp'; leave F out of it",
        ),
        (
            "all_to_all",
            MeshSpec(
                expert=2,
                model=2,
                rules=Rules(expert_params=(("E", ("expert",)), ("D", ("model",)))),
            ),
            "dispatcher='all_to_all' gathers slices of D over devices with different tokens, "
            "but 'model' does not split the batch; put G on it in Rules.activations, or use "
            "dispatcher='gather'",
        ),
    ],
)
def test_a_mesh_without_the_axes_is_refused_with_the_ways_out(name, spec, reason):
    assert why_not(name, spec) == reason


def test_groups_and_tokens_that_do_not_divide_are_refused_with_the_ways_out():
    assert why_not("all_to_all", MeshSpec(expert=4), num_groups=3, tokens_per_group=64) == (
        "dispatcher='all_to_all' keeps routing groups whole, and 3 of them do not divide over "
        "the 8 devices that split the batch; use a SwitchConfig.group_size of at most 24 "
        "(groups never follow the devices by themselves), one that makes 2 of them, a larger "
        "batch, or dispatcher='gather'"
    )
    # Those that devices can share are no reason.
    assert why_not("all_to_all", MeshSpec(expert=4), num_groups=2, tokens_per_group=64) is None
    spec = MeshSpec(model=4, rules=PIPELINE_MOE)
    assert why_not("sliced_scatter", spec, num_groups=2, tokens_per_group=6) == (
        "dispatcher='sliced_scatter' splits a group's tokens over 4 devices, and 6 do not "
        "divide; use another SwitchConfig.group_size, or dispatcher='sliced'"
    )


def test_a_layer_on_the_wrong_mesh_says_why():
    spec, plan = MeshSpec(), make_problem().plan
    switch = SwitchConfig(8, dispatcher="all_to_all")
    with use_mesh(spec.build(), spec.rules), refused(why_not("all_to_all", spec)):
        choose_dispatcher(switch, plan, is_training=True)
    chosen = choose_dispatcher(switch, plan, is_training=True)
    assert function_of(chosen) is FUNCTIONS["all_to_all"] and chosen.keywords == {
        "exchange_parts": 1
    }


# Names that JAX gives to devices, and what the planner has of such.
KINDS = {
    "cpu": ("cpu",),
    "gpu": ("NVIDIA H200", "Tesla V100-SXM2-32GB", "AMD Instinct MI300X"),
    "tpu": ("TPU v5 lite", "TPU7x"),
}
PLANNED = {"cpu": (), "gpu": ("h200", "b200", "v100"), "tpu": ("v5p", "tpu7x")}


def mesh_of(platform, kind, spec):
    cores = 1 if platform == "tpu" else None
    return spec.abstract(AbstractDevice(device_kind=kind, num_cores=cores, platform=platform))


def function_of(dispatch):
    """What partials hold: one of a partial is flat or not, as Python finds attributes on it."""
    while isinstance(dispatch, functools.partial):
        dispatch = dispatch.func
    return dispatch


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("platform", KINDS)
def test_choice_and_planner_take_a_ragged_all_to_all_on_the_same_platforms(platform, name):
    is_taken = platform != "gpu"
    for hardware in map(load_hardware, PLANNED[platform]):
        found = layouts(make_workload(), hardware, 8, collections.Counter())
        planned = {layout.dispatcher for layout in found}
        assert ("ragged_all_to_all" in planned) == is_taken
    homes = dict(reversed(HOMES)) | {"dropless": MeshSpec(expert=4)}
    spec, switch = homes.get(name, MeshSpec(expert=4)), SwitchConfig(8, dispatcher=name)
    for kind in KINDS[platform]:
        with use_mesh(mesh_of(platform, kind, spec), spec.rules):
            chosen = choose_dispatcher(switch, make_problem().plan, is_training=False)
        if name == "dropless":
            taken = FUNCTIONS["ragged_all_to_all"] if is_taken else gathered_dispatch
            assert chosen is taken, kind
        else:
            assert function_of(chosen) is function_of(FUNCTIONS[name]), kind


LOADS = {
    "even": make_problem(capacity=T),
    "with drops": make_problem(capacity=C),
    "all to two": make_problem(np.tile([3, 5], (8, T, 1)), capacity=T),
}


@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(data=1, fsdp=2, expert=2, model=2),
        slow(MeshSpec(node=2, expert=2)),
        slow(MeshSpec(expert=8)),
    ],
    ids=name_of,
)
def test_what_gpus_run_gives_the_numbers_of_one_device(monkeypatch, spec):
    monkeypatch.setattr(dispatchers, "platform_of", lambda mesh: "gpu")
    with use_mesh(spec.build(), spec.rules):
        switch, plan = SwitchConfig(8, dispatcher="dropless"), LOADS["even"].plan
        chosen = choose_dispatcher(switch, plan, is_training=False)
    assert chosen is gathered_dispatch
    run = answerer(chosen)
    for problem in LOADS.values():
        assert_same(
            answer_on(spec, "ragged_all_to_all", problem, run), answer(einsum_dispatch, problem)
        )


def lowered_for_h200s(name):
    """StableHLO of the dispatcher that is chosen where nothing is trained."""
    spec, problem = MeshSpec(data=1, expert=4, model=2), make_problem(capacity=T)
    mesh = mesh_of("gpu", "NVIDIA H200", spec)
    with use_mesh(mesh, spec.rules):
        switch = SwitchConfig(8, dispatcher=name)
        chosen = choose_dispatcher(switch, problem.plan, is_training=False)
        whole = NamedSharding(mesh, PartitionSpec())
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            problem.arguments[:3],
        )
        return jax.jit(chosen).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_on_gpus_a_ragged_all_to_all_is_lowered_only_where_it_is_named_and_warns_once():
    collectives._warn_of_gpus.cache_clear()
    with warnings.catch_warnings(record=True, action="always") as said:
        text = lowered_for_h200s("dropless")
        assert "ragged_all_to_all" not in text
        assert "all_gather" in text and "reduce_scatter" in text
        assert collectives.RAGGED_ON_GPUS not in [str(each.message) for each in said]
        for _ in range(2):
            assert "ragged_all_to_all" in lowered_for_h200s("ragged_all_to_all")
    assert [str(each.message) for each in said].count(collectives.RAGGED_ON_GPUS) == 1
