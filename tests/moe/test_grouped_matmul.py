# SPDX-License-Identifier: Apache-2.0
"""Grouped products against a loop over rows; no row is multiplied E times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.grouped_matmul import (
    _grouped,
    _ragged,
    _weight_gradient_ragged,
    expert_of_row,
    grouped_matmul,
    grouped_matmul_reference,
)
from tests.data.refusals import refused

E, D, F = 4, 5, 6
# Rows of each expert, and rows that belong to none: empty experts first, inside and last.
LOADS = [(8, 4, 12, 4), (0, 16, 0, 8), (0, 0, 0, 24), (24, 0, 0, 0), (0, 0, 0, 0)]


def arrays(rows=28):
    rng = np.random.default_rng(0)
    shapes = (rows, D), (E, D, F), (rows, F)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def loop(x_RD, w_EDF, load):
    y_RF = np.zeros((len(x_RD), w_EDF.shape[2]))
    for r, e in enumerate(np.repeat(np.arange(E), load)):
        y_RF[r] = x_RD[r].astype(np.float64) @ w_EDF[e]
    return y_RF


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_equals_a_loop_and_so_do_its_gradients(load, block):
    x_RD, w_EDF, target_RF = arrays()
    used = sum(load)
    target_RF[used:] = 0

    def loss(x_RD, w_EDF):
        y_RF = grouped_matmul(x_RD, w_EDF, jnp.asarray(load, jnp.int32), block=block)
        return jnp.sum(y_RF * target_RF), y_RF

    (dx_RD, dw_EDF), y_RF = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x_RD, w_EDF)
    np.testing.assert_allclose(
        y_RF[:used], loop(x_RD, w_EDF, load)[:used], rtol=1e-5, atol=1e-5
    )
    dx = loop(target_RF, w_EDF.swapaxes(1, 2), load)
    np.testing.assert_allclose(dx_RD[:used], dx[:used], rtol=1e-5, atol=1e-5)
    dw = np.zeros((E, D, F))
    for r, e in enumerate(np.repeat(np.arange(E), load)):
        dw[e] += np.outer(x_RD[r].astype(np.float64), target_RF[r])
    np.testing.assert_allclose(dw_EDF, dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("load", LOADS)
def test_the_reference_and_the_form_of_accelerators_are_the_same(load):
    used = sum(load)
    want = loop(*arrays()[:2], load)[:used]
    x_RD, w_EDF, target_RF = map(jnp.asarray, arrays())
    count_E = jnp.asarray(load, jnp.int32)
    reference_RF = grouped_matmul_reference(x_RD, w_EDF, count_E)[:used]
    np.testing.assert_allclose(reference_RF, want, rtol=1e-5, atol=1e-5)
    ragged_RF = _ragged(x_RD, w_EDF, count_E)
    np.testing.assert_allclose(ragged_RF[:used], want, rtol=1e-5, atol=1e-5)
    assert not np.any(ragged_RF[used:])
    target_RF = target_RF.at[used:].set(0)
    _, pull_back = jax.vjp(lambda w_EDF: _grouped(4, x_RD, w_EDF, count_E), w_EDF)
    np.testing.assert_allclose(
        _weight_gradient_ragged(x_RD, target_RF, w_EDF, count_E),
        pull_back(target_RF)[0],
        rtol=1e-5,
        atol=1e-5,
    )


def test_rows_of_no_expert_reach_nothing():
    """NaN in them stays in them."""
    x_RD, w_EDF, target_RF = arrays()
    x_RD[24:] = np.nan

    def loss(w_EDF):
        y_RF = grouped_matmul(x_RD, w_EDF, jnp.asarray(LOADS[0][:3] + (0,)), block=4)
        return jnp.sum(y_RF[:24] * target_RF[:24])

    assert np.all(np.isfinite(jax.grad(loss)(w_EDF)))


def test_the_work_does_not_grow_with_the_experts():
    """Counted in the program: no product has both all rows and all experts in it."""
    x_RD, w_EDF, _ = arrays()
    program = str(
        jax.make_jaxpr(lambda x, w, c: grouped_matmul(x, w, c, block=4))(
            x_RD, w_EDF, jnp.asarray(LOADS[0])
        )
    )
    products = [line for line in program.splitlines() if "= dot_general" in line]
    assert products and all(f"float32[{E}," not in line for line in products)


def test_weight_gradients_are_summed_in_float32():
    """Many blocks of one expert in bfloat16: a running sum in bfloat16 would stall at 256."""
    rows = 4096
    ones = jnp.ones((rows, 1), jnp.bfloat16)
    _, pull_back = jax.vjp(
        lambda w: grouped_matmul(ones, w, jnp.asarray([rows], jnp.int32), block=2),
        jnp.ones((1, 1, 1), jnp.bfloat16),
    )
    assert float(pull_back(ones)[0][0, 0, 0]) == rows


@pytest.mark.parametrize("load", LOADS)
def test_expert_of_row(load):
    expert_R = expert_of_row(jnp.asarray(load), 28)
    np.testing.assert_array_equal(expert_R[: sum(load)], np.repeat(np.arange(E), load))
    assert np.all(np.asarray(expert_R) < E)


def test_rows_that_do_not_divide_into_blocks_are_refused():
    x_RD, w_EDF, _ = arrays()
    with refused("28 rows do not divide into blocks of 3; pad the rows"):
        grouped_matmul(x_RD, w_EDF, jnp.asarray(LOADS[0]), block=3)
