# SPDX-License-Identifier: Apache-2.0
"""One product an expert against einsum and its autodiff; tapped weights give the factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.expert_matmul import FEW_ROWS, TappedWeight, expert_matmul

E, D, F = 3, 8, 12


def inputs(rows):
    rng = np.random.default_rng(rows)
    shapes = [(E, rows, D), (E, D, F), (E, rows, F)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def plain_gradients(x_ERD, w_EDF, target_ERF):
    def loss(x_ERD, w_EDF):
        return jnp.sum(jnp.einsum("ERD,EDF->ERF", x_ERD, w_EDF) ** 2 * target_ERF)

    return jax.grad(loss, (0, 1))(x_ERD, w_EDF)


def loss(x_ERD, w, target_ERF):
    return jnp.sum(expert_matmul(x_ERD, w) ** 2 * target_ERF)


# Fewer and more rows than where the backward product turns around.
@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS, FEW_ROWS + 7])
def test_gradients_are_those_of_the_plain_product(rows):
    x_ERD, w_EDF, target_ERF = inputs(rows)
    got = jax.jit(jax.grad(loss, (0, 1)))(x_ERD, w_EDF, target_ERF)
    want = plain_gradients(x_ERD, w_EDF, target_ERF)
    for got_each, want_each in zip(got, want, strict=True):
        np.testing.assert_allclose(got_each, want_each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS + 7])
def test_a_tapped_weight_returns_the_factors_of_its_gradient(rows):
    x_ERD, w_EDF, target_ERF = inputs(rows)
    tapped = TappedWeight(w_EDF, jnp.zeros((E, rows, D)), jnp.zeros((E, rows, F)))
    dx_ERD, factors = jax.grad(loss, (0, 1))(x_ERD, tapped, target_ERF)
    want_dx_ERD, want_dw_EDF = plain_gradients(x_ERD, w_EDF, target_ERF)
    np.testing.assert_allclose(dx_ERD, want_dx_ERD, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(factors.x_ERD, x_ERD)
    dw_EDF = np.einsum("erd,erf->edf", factors.x_ERD, factors.dy_ERF)
    np.testing.assert_allclose(dw_EDF, want_dw_EDF, rtol=1e-4, atol=1e-4)
    assert not np.any(factors.w_EDF)


def test_the_product_is_in_the_dtype_of_the_rows():
    x_ERD, w_EDF, _ = inputs(4)
    assert expert_matmul(x_ERD.astype(jnp.bfloat16), w_EDF).dtype == jnp.bfloat16
