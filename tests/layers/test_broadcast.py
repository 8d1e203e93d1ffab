# SPDX-License-Identifier: Apache-2.0
"""A parameter lined up with an activation's last dimensions, against a loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.dense import along_last


def test_a_vector_along_the_last_dimension():
    x_BLD = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    bias_D = np.array([10, 20, 30], np.float32)
    got_BLD = x_BLD + along_last(bias_D, jnp.asarray(x_BLD))
    for b in range(2):
        for i in range(4):
            np.testing.assert_array_equal(got_BLD[b, i], x_BLD[b, i] + bias_D)


def test_two_dimensions_along_the_last_two():
    x_BLHK = np.zeros((2, 5, 3, 4), np.float32)
    bias_HK = np.arange(12, dtype=np.float32).reshape(3, 4)
    lined_up = along_last(jnp.asarray(bias_HK), x_BLHK)
    assert lined_up.shape == (1, 1, 3, 4)
    np.testing.assert_array_equal(lined_up[0, 0], bias_HK)


def test_the_activation_decides_the_dtype():
    x = jnp.zeros((2, 3), jnp.bfloat16)
    assert along_last(jnp.ones(3, jnp.float32), x).dtype == jnp.bfloat16


def test_without_it_ranks_do_not_mix_in_the_tests():
    """What `along_last` is for: the tests refuse silent rank promotion."""
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.ones(3)
