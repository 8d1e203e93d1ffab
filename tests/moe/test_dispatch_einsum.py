# SPDX-License-Identifier: Apache-2.0
"""The readable oracle of the dispatchers, itself against loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.dispatch import dispatch_tensor, einsum_dispatch
from tests.moe.plans import (
    C,
    E,
    G,
    T,
    dispatch_loop,
    fixed_plan,
    is_kept,
    numbers,
    tanh_experts,
)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_dispatch_tensor_equals_a_loop(num_choices):
    plan = fixed_plan(num_choices)
    expected_GTSEC = np.zeros((G, T, num_choices, E, C))
    for g, t, s in np.ndindex(G, T, num_choices):
        if is_kept(plan, g, t, s):
            expected_GTSEC[
                g, t, s, int(plan.expert_GTS[g, t, s]), int(plan.slot_GTS[g, t, s])
            ] = 1
    got_GTSEC = np.asarray(dispatch_tensor(plan, jnp.float32))
    np.testing.assert_array_equal(got_GTSEC, expected_GTSEC)
    # Each kept choice is in one slot, and no slot holds two.
    np.testing.assert_array_equal(got_GTSEC.sum((3, 4)), plan.is_kept_GTS)
    assert got_GTSEC.sum((1, 2)).max() == 1


@pytest.mark.parametrize("capacity", [2, 4, 20])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_output_equals_a_loop(num_choices, capacity):
    plan, (x_GTD, w_EDD, _) = fixed_plan(num_choices, capacity), numbers()
    y_GTD = einsum_dispatch(jnp.asarray(x_GTD), plan, tanh_experts(w_EDD))
    np.testing.assert_allclose(y_GTD, dispatch_loop(x_GTD, plan, w_EDD), rtol=1e-5, atol=1e-6)


def test_a_token_without_a_slot_gets_zero():
    plan, (x_GTD, w_EDD, _) = fixed_plan(1, capacity=2), numbers()
    y_GTD = np.asarray(einsum_dispatch(jnp.asarray(x_GTD), plan, tanh_experts(w_EDD)))
    is_kept_GT = np.asarray(plan.is_kept_GTS[..., 0])
    assert 0 < is_kept_GT.sum() < is_kept_GT.size
    assert not np.any(y_GTD[~is_kept_GT])
    assert np.all(np.any(y_GTD[is_kept_GT], axis=-1))
