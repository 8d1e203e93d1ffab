# SPDX-License-Identifier: Apache-2.0
"""Groups that devices share: plan, output and raw gradients are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import params_of, with_params
from switchx.moe.dispatchers import refusal
from switchx.moe.layer import SwitchFFN
from switchx.moe.shared_groups import shared_axes
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.placement import Placement
from switchx.partitioning.rules import Rules
from tests.cases import slow, slow_unless
from tests.moe.sharded import largest_error

# Experts over all axes that split the batch.
SPREAD = Rules(expert_params=(("E", ("fsdp", "node", "expert")), ("F", ("model",))))
B, L, D, E = 8, 6, 16, 16
# (mesh, tokens of a group, devices that share one)
LAYOUTS = {
    "one group on all": (MeshSpec(data=1, fsdp=2, expert=4, rules=SPREAD), 48, 8),
    "two groups, experts between them": (
        MeshSpec(data=1, fsdp=2, expert=4, rules=SPREAD), 24, 4,
    ),
    "two groups over two axes": (
        MeshSpec(data=1, fsdp=2, node=2, expert=2, rules=SPREAD), 24, 4,
    ),
    "four groups, two devices each": (
        MeshSpec(data=1, fsdp=2, node=2, expert=2, rules=SPREAD), 12, 2,
    ),
    "two replicas of the experts": (MeshSpec(data=2, expert=4), 24, 4),
    "replicas and groups between them": (
        MeshSpec(data=2, fsdp=2, expert=2, rules=SPREAD), 12, 2,
    ),
    "parts of experts": (
        MeshSpec(data=1, fsdp=2, expert=2, model=2, rules=SPREAD), 24, 2,
    ),
    "slices of D gathered": (MeshSpec(data=1, fsdp=2, node=2, expert=2), 12, 2),
    "whole groups": (MeshSpec(data=1, fsdp=2, expert=4, rules=SPREAD), 6, 1),
}  # fmt: skip
ROUTERS = {"top-1": RouterConfig(), "top-2": RouterConfig(num_selected=2, gate="normalized")}


def make_config(dispatcher: str, group_size: int, router, factor: float, parts: int = 1):
    groups = dict(group_size=group_size, capacity_factor=factor, min_capacity=1)
    exchange = dict(dispatcher=dispatcher, exchange_parts=parts)
    switch = SwitchConfig(E, every=1, router=router, expert_bias=True, **groups, **exchange)
    return ModelConfig("decoder_only", 32, D, 8, 1, 4, 1, init_scale=1.0, switch=switch)


def run_layer(config, spec: MeshSpec | None):
    """Output, statistics and raw gradients of all that the layer has, by activations too."""
    layer = SwitchFFN(config, key=jax.random.key(3))
    params = params_of(layer)
    rng = np.random.default_rng(0)
    x_BLD, dy_BLD = rng.normal(size=(2, B, L, D)).astype(np.float32)
    is_token_BL = rng.random((B, L)) < 0.9

    @jax.jit
    def run(params, x_BLD):
        def loss(params, x_BLD):
            y_BLD, stats = with_params(layer, params)(x_BLD, is_token_BL, is_training=True)
            value = jnp.sum(y_BLD * dy_BLD) + stats.balance_loss + stats.router_z_loss
            return value, (y_BLD, stats)

        return jax.grad(loss, (0, 1), has_aux=True)(params, x_BLD)

    if spec is None:
        return run(params, x_BLD)
    mesh = spec.build()
    with use_mesh(mesh, spec.rules):
        return run(params, x_BLD)


# A factor so that tokens are dropped, and in the order of the whole group.
FACTOR = 1.0
BY_DEFAULT = ("one group on all", "parts of experts")
CASES = [slow_unless(layout in BY_DEFAULT, layout, "top-2") for layout in LAYOUTS] + [
    slow("four groups, two devices each", "top-1")
]


@functools.cache
def one_device(group_size: int, router: str):
    return run_layer(make_config("einsum", group_size, ROUTERS[router], FACTOR), None)


@pytest.mark.parametrize(("layout", "router"), CASES)
def test_numbers_are_those_of_one_device(layout, router):
    spec, group_size, devices = LAYOUTS[layout]
    want = one_device(group_size, router)
    config = make_config("all_to_all", group_size, ROUTERS[router], FACTOR)
    mesh = spec.build()
    with use_mesh(mesh, spec.rules):
        axes = shared_axes("all_to_all", B * L // group_size)
    assert Placement.on(mesh, spec.rules).size(axes) == devices
    got = run_layer(config, spec)
    assert want[1][1].dropped > 0
    assert largest_error(got, want) < 4e-6


@pytest.mark.slow
def test_parts_between_groups_give_the_same_numbers():
    spec, group_size, _ = LAYOUTS["two groups over two axes"]
    config = make_config("all_to_all", group_size, ROUTERS["top-2"], FACTOR, parts=2)
    assert largest_error(run_layer(config, spec), one_device(group_size, "top-2")) < 4e-6


def test_an_expert_that_everybody_wants():
    """All of a group's tokens for one expert: its device receives a full queue, no more."""
    config = make_config("all_to_all", 24, RouterConfig(), 1.0)
    spec = LAYOUTS["two groups, experts between them"][0]
    layer = SwitchFFN(config, key=jax.random.key(3))
    params = params_of(layer)
    params["w_router_DE"] = np.zeros((D, E), np.float32)  # ties go to expert 0
    x_BLD = np.random.default_rng(0).normal(size=(B, L, D)).astype(np.float32)

    def run(params, x_BLD):
        return with_params(layer, params)(x_BLD, np.ones((B, L), bool), is_training=True)

    want, _ = jax.jit(run)(params, x_BLD)
    with use_mesh(spec.build(), spec.rules):
        got, stats = jax.jit(run)(params, x_BLD)
    assert stats.dropped == B * L - 2 * 2  # 2 groups, ceil(24 / 16) slots
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_who_shares_what():
    spec = MeshSpec(data=2, expert=4)
    assert shared_axes("all_to_all", 2) == ()  # one device
    with use_mesh(spec.build(), spec.rules):
        assert shared_axes("all_to_all", 8) == ()
        assert shared_axes("all_to_all", 16) == ()
        assert shared_axes("all_to_all", 2) == ("expert",)
        assert shared_axes("all_to_all", 1) == ("data", "expert")
        assert shared_axes("all_to_all", 4) == ()  # refused
        assert shared_axes("gather", 2) == ()


def test_meshes_that_cannot_share_are_refused_with_a_way_out():
    mesh = MeshSpec(data=2, expert=4).build()
    # A group on all eight, but replicas of experts along `data`.
    reason = refusal("all_to_all", mesh, Rules(), num_groups=1, tokens_per_group=48)
    assert "'data*expert'" in reason
    assert "Rules.expert_params" in reason
    reason = refusal("all_to_all", mesh, Rules(), num_groups=2, tokens_per_group=42)
    assert "42 tokens that 4 devices share" in reason
    # As many groups as no product of first axes.
    reason = refusal("all_to_all", mesh, Rules(), num_groups=4, tokens_per_group=12)
    assert "groups" in reason
    reason = refusal("hierarchical", mesh, Rules(), num_groups=2, tokens_per_group=24)
    assert reason
