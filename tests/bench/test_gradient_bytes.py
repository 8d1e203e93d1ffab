# SPDX-License-Identifier: Apache-2.0
"""Gradients of replicas in compiled steps, and what counts as theirs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from switchx.bench.gradient_bytes import (
    MICROBATCHES,
    MOST,
    Case,
    bytes_across_experts,
    check,
    check_experts,
    compare,
    crossed_axes,
    mesh_names,
)
from switchx.compiled.collectives import HloCollective, executed_collectives
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec

SIZES = {"pipe": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), {"model"}),
        (((0, 2), (1, 3), (4, 6), (5, 7)), {"data"}),
        # A permute to the next stage.
        (((0, 4), (1, 5)), {"pipe"}),
        ((tuple(range(8)),), {"pipe", "data", "model"}),
    ],
)
def test_axes_are_those_along_which_a_group_differs(groups, axes):
    assert crossed_axes(HloCollective("all-reduce", (), groups, 4), SIZES) == axes


def test_every_mesh_with_replicas_is_measured():
    names = mesh_names(jax.devices()[:8])
    assert {"data", "fsdp", "all_to_all", "pipeline", "pipeline_moe_stages", "pod"} <= set(
        names
    )
    assert {"data_expert", "expert_model_data", "hierarchical", "zero1"} <= set(names)
    # V is split over data there, and model.gin has no replicas.
    assert not {"vocab_rows", "model", "one_device"} & set(names)


def test_more_than_one_reduction_does_not_hold():
    assert check([{"ratio": 1.0}, {"ratio": MOST}]).holds
    assert not check([{"ratio": 1.0}, {"ratio": 4.65}, {"ratio": 1.0}]).holds


@pytest.mark.parametrize(("axis", "is_found"), [("expert", True), ("data", False)])
@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
def test_a_sum_over_experts_is_found(axis, kind, is_found):
    """Of a program that makes the mistake, and of one that sums over replicas."""
    E, D, F = 8, 16, 96
    spec = MeshSpec(data=2, expert=2, model=2)

    def summed(w_EDF):
        if kind == "all-reduce":
            return jax.lax.psum(w_EDF, axis)
        return jax.lax.psum_scatter(w_EDF, axis, scatter_dimension=1, tiled=True)

    whole = PartitionSpec("expert", None, "model")
    out = whole if kind == "all-reduce" else PartitionSpec("expert", axis, "model")
    if axis == "expert":
        out = PartitionSpec(None, None if kind == "all-reduce" else axis, "model")
    with use_mesh(spec.build(), spec.rules):
        program = jax.shard_map(summed, in_specs=whole, out_specs=out, check_vma=False)
        text = jax.jit(program).lower(jnp.ones((E, D, F))).compile().as_text()
    sizes, executed = spec.build().shape, executed_collectives(text)
    assert {one.kind for one in executed} == {kind}
    found = bytes_across_experts(executed, sizes, ("expert",), F)
    assert found == (E // 2 * D * F // 2 * 4 if is_found else 0)
    # A router's gradient is to be summed.
    assert not bytes_across_experts(executed, sizes, ("expert",), 9 * F)
    assert not check_experts([{"across_experts_bytes": 0}, {"across_experts_bytes": 4}]).holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    ["data_expert", "expert_model_data", "all_to_all", "hierarchical", "pod", "pipeline_moe"],
)
def test_gradients_of_experts_stay_where_they_are(mesh):
    row = compare(Case(mesh, 4), jax.devices()[:8])
    assert row["expert_axes"] and row["across_experts_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", MICROBATCHES)
@pytest.mark.parametrize("mesh", ["data", "pipeline", "pod", "fsdp_fused", "zero1"])
def test_gradients_cross_replicas_once_a_step(mesh, num_microbatches):
    row = compare(Case(mesh, num_microbatches), jax.devices()[:8])
    assert 0.98 <= row["ratio"] <= MOST
