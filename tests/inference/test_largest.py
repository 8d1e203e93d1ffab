# SPDX-License-Identifier: Apache-2.0
"""The largest of many numbers: what NumPy and `jax.lax.top_k` find, ties among them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.largest import BLOCK, argmax, top_k


def rows(kind: str, V: int) -> np.ndarray:
    rng = np.random.default_rng(V)
    if kind == "ties":
        return rng.integers(0, 4, (6, V)).astype(np.float32)
    if kind == "equal":
        return np.zeros((6, V), np.float32)
    if kind == "in one block":
        x_BV = rng.normal(size=(6, V)).astype(np.float32)
        x_BV[:, -BLOCK:] += 100
        return x_BV
    return rng.normal(size=(6, V)).astype(np.float32)


@pytest.mark.parametrize("V", [8 * BLOCK, 24 * BLOCK, 300])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "in one block"])
def test_finds_what_numpy_and_jax_find(kind, V):
    x_BV = rows(kind, V)
    np.testing.assert_array_equal(argmax(jnp.array(x_BV)), np.argmax(x_BV, axis=1))
    for k in (1, 3, 8):
        for ours, theirs in zip(
            top_k(jnp.array(x_BV), k), jax.lax.top_k(jnp.array(x_BV), k), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


def test_minus_infinity_is_the_smallest():
    x_BV = np.full((1, 4 * BLOCK), -np.inf, np.float32)
    x_BV[0, 200] = -5.0
    assert argmax(jnp.array(x_BV)).tolist() == [200]


def test_a_row_of_nans_names_a_place_that_is_there():
    assert 0 <= int(argmax(jnp.full((1, 4 * BLOCK), jnp.nan))[0]) < 4 * BLOCK
