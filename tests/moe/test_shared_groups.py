# SPDX-License-Identifier: Apache-2.0
"""Slots of groups that devices share; `test_dispatch_shared.py` has whole layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.capacity import assign_slots
from switchx.moe.dispatchers import refusal
from switchx.moe.shared_groups import assign_shared_slots, shared_axes
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from tests.moe.sharded import E, make_problem


@pytest.mark.parametrize("shared", [("expert",), ("fsdp", "expert")])
def test_slots_are_counted_over_devices_first_choices_first(shared):
    problem = make_problem()
    expert_GTS = jnp.asarray(problem.plan.expert_GTS).reshape(-1, 48 * len(shared), 2)
    want = assign_slots(expert_GTS, E)
    spec = MeshSpec(data=1, fsdp=2, expert=4)
    with use_mesh(spec.build(), spec.rules):
        got = jax.jit(lambda x: assign_shared_slots(x, E, shared))(expert_GTS)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


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
