# SPDX-License-Identifier: Apache-2.0
"""Tokens into groups and back: the order, the padding, and nothing lost."""

import jax.numpy as jnp
import numpy as np

from switchx.moe.capacity import into_groups, out_of_groups


def test_groups_hold_tokens_in_order_and_padding_at_the_end():
    token_BL = jnp.arange(1, 11).reshape(2, 5)
    token_GT = into_groups(token_BL, 3, 4)
    assert token_GT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    np.testing.assert_array_equal(out_of_groups(token_GT, 2, 5), token_BL)


def test_features_stay_with_their_token():
    x_BLD = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5)))
    x_GTD = into_groups(x_BLD, 2, 6)
    assert x_GTD.shape == (2, 6, 5)
    np.testing.assert_array_equal(x_GTD[1, 0], x_BLD[1, 2])
    np.testing.assert_array_equal(out_of_groups(x_GTD, 3, 4), x_BLD)
