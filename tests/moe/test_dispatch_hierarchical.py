# SPDX-License-Identifier: Apache-2.0
"""Two exchanges in place of one: the same bits."""

import jax
import numpy as np
import pytest

from switchx.partitioning.mesh import MeshSpec
from tests.moe.sharded import answer_on, make_problem


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2)])
def test_bit_for_bit_what_the_flat_exchange_gives(sizes):
    node, expert = sizes
    spec, problem = MeshSpec(node=node, expert=expert), make_problem()
    flat, two = (answer_on(spec, name, problem) for name in ("all_to_all", "hierarchical"))
    jax.tree.map(np.testing.assert_array_equal, two, flat)
