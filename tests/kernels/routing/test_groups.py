# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.routing.groups import rows_of_groups
from tests.kernels.loops import GROUPS, E, R, expert_of_rows


@pytest.mark.parametrize("groups", GROUPS)
def test_rows_of_groups(groups):
    expert_R, is_used_R = map(np.asarray, rows_of_groups(jnp.array(GROUPS[groups]), R))
    used = min(sum(GROUPS[groups]), R)
    assert is_used_R.tolist() == [True] * used + [False] * (R - used)
    np.testing.assert_array_equal(expert_R[:used], expert_of_rows(GROUPS[groups], R))
    assert np.all((expert_R >= 0) & (expert_R < E))
