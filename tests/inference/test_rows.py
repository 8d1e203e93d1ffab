# SPDX-License-Identifier: Apache-2.0
"""Rows travel through compiled programs and are taken apart with their batch."""

import jax
import jax.numpy as jnp

from switchx.inference.sampling import Rows


def test_rows_are_a_pytree_with_a_leading_batch():
    rows = Rows(jnp.arange(3), jnp.array([True, False, True]), jnp.array([4, 5, 6]))
    taken = jax.jit(lambda rows: jax.tree.map(lambda leaf: leaf[jnp.array([2, 0])], rows))(rows)
    assert taken.sentence_B.tolist() == [2, 0]
    assert taken.is_live_B.tolist() == [True, True] and taken.room_B.tolist() == [6, 4]
