# SPDX-License-Identifier: Apache-2.0
"""Dropless dispatch against a loop over choices and the einsum form's gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.dispatch_dropless import dropless_dispatch
from switchx.moe.dispatch_einsum import einsum_dispatch
from tests.moe.banks import dispatch_loop, ffn_bank, ffn_numbers
from tests.moe.plans import D, E, T, fixed_plan, numbers

NUMBERS = ffn_numbers(E, D, 7)


@pytest.mark.parametrize("capacity", [2, 4, T])
@pytest.mark.parametrize("num_choices", [1, 2, 3])
def test_output_equals_a_loop_drops_included(num_choices, capacity):
    plan, x_GTD = fixed_plan(num_choices, capacity), numbers()[0]
    y_GTD = dropless_dispatch(jnp.asarray(x_GTD), plan, ffn_bank(NUMBERS))
    np.testing.assert_allclose(y_GTD, dispatch_loop(x_GTD, plan, NUMBERS), rtol=1e-5, atol=1e-5)


def gradients(dispatch, plan, x_GTD, target_GTD):
    def loss(x_GTD, gate_GTS, bank):
        y_GTD = dispatch(x_GTD, dataclasses.replace(plan, gate_GTS=gate_GTS), bank)
        return jnp.sum(y_GTD * target_GTD)

    return jax.jit(jax.grad(loss, (0, 1, 2)))(x_GTD, plan.gate_GTS, ffn_bank(NUMBERS))


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("tokens", [2, T])
def test_gradients_equal_those_of_the_einsum_form(num_choices, tokens):
    """With two tokens, their experts' matrices are gathered; with all, looped over."""
    plan, (x_GTD, _, target_GTD) = fixed_plan(num_choices), numbers()
    names = ("expert_GTS", "gate_GTS", "slot_GTS")
    plan = dataclasses.replace(plan, **{n: getattr(plan, n)[:, :tokens] for n in names})
    args = plan, jnp.asarray(x_GTD[:, :tokens]), target_GTD[:, :tokens]
    got, want = gradients(dropless_dispatch, *args), gradients(einsum_dispatch, *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)
    assert np.any(got[1])


def test_tokens_without_an_expert_get_zero():
    plan, x_GTD = fixed_plan(1), numbers()[0]
    y_GTD = dropless_dispatch(jnp.asarray(x_GTD), plan, ffn_bank(NUMBERS))
    np.testing.assert_array_equal(np.any(y_GTD, axis=-1), plan.is_kept_GTS[..., 0])
