# SPDX-License-Identifier: Apache-2.0
"""One product an expert against einsum and its autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.experts import FEW_ROWS, expert_matmul

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


def test_the_product_is_in_the_dtype_of_the_rows():
    x_ERD, w_EDF, _ = inputs(4)
    assert expert_matmul(x_ERD.astype(jnp.bfloat16), w_EDF).dtype == jnp.bfloat16
