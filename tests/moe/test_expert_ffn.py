# SPDX-License-Identifier: Apache-2.0
"""Experts as a pytree: equal blocks and sorted rows against a loop; one device's part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.banks import ffn_bank, ffn_numbers, run_expert

E, D, F, R = 3, 5, 7, 8
NUMBERS = ffn_numbers(E, D, F)


def rows(*shape):
    return np.random.default_rng(1).normal(size=(*shape, D)).astype(np.float32)


def test_equal_blocks_equal_a_loop():
    x_ERD = rows(E, R)
    want = [[run_expert(NUMBERS, e, x_ERD[e, r]) for r in range(R)] for e in range(E)]
    np.testing.assert_allclose(
        ffn_bank(NUMBERS)(jnp.asarray(x_ERD)), want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("load", [(4, 0, 8), (0, 0, 12), (7, 3, 1)])
def test_sorted_rows_equal_a_loop(load):
    x_RD = rows(16)
    y_RD = ffn_bank(NUMBERS).run_rows(jnp.asarray(x_RD), jnp.asarray(load, jnp.int32))
    want = [run_expert(NUMBERS, e, x_RD[r]) for r, e in enumerate(np.repeat(range(E), load))]
    np.testing.assert_allclose(y_RD[: sum(load)], want, rtol=1e-5, atol=1e-5)


def test_parts_of_the_hidden_dimension_add_up():
    """F split over two devices: each has half of the sum, and one adds the output bias."""
    x_ERD, bank = jnp.asarray(rows(E, R)), ffn_bank(NUMBERS)

    def part(i):
        half = slice(0, 4) if i == 0 else slice(4, F)
        cut = dataclasses.replace(
            bank,
            w_in_EDF=bank.w_in_EDF[..., half],
            w_gate_EDF=bank.w_gate_EDF[..., half],
            b_in_EF=bank.b_in_EF[..., half],
            w_out_EFD=bank.w_out_EFD[:, half],
        )
        return cut.on_device(jnp.int32(i), jnp.bool_(i == 0))(x_ERD)

    np.testing.assert_allclose(part(0) + part(1), bank(x_ERD), rtol=1e-5, atol=1e-5)


def test_each_device_drops_other_entries(key):
    bank = dataclasses.replace(ffn_bank(NUMBERS), key=key, dropout_rate=0.5)
    x_ERD = jnp.asarray(rows(E, R))
    here, there = (bank.on_device(jnp.int32(i), jnp.bool_(True))(x_ERD) for i in (0, 1))
    again = bank.on_device(jnp.int32(0), jnp.bool_(True))(x_ERD)
    np.testing.assert_array_equal(here, again)
    assert np.mean(np.asarray(here) != np.asarray(there)) > 0.5


def test_is_a_pytree_whose_leaves_have_dimensions_in_their_names():
    names = {path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(ffn_bank(NUMBERS))}
    assert names == set(NUMBERS)
