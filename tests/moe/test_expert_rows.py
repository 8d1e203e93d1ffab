# SPDX-License-Identifier: Apache-2.0
"""Choices in rows: each where its expert's rows are, once, in order, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.moe.dropless import sort_into_rows

E = 5


def loads():
    rng = np.random.default_rng(0)
    yield "random", rng.integers(0, E + 1, 23)
    yield "one expert", np.full(23, 3)
    yield "none", np.full(23, E)
    yield "empty experts", rng.choice([1, 4], 23)
    yield "a choice an expert", np.arange(E)


@pytest.mark.parametrize("room", [1.0, 0.5])
@pytest.mark.parametrize(("name", "expert_X"), list(loads()), ids=lambda value: str(value)[:12])
def test_equals_a_loop(name, expert_X, room):
    del name
    X = len(expert_X)
    R = int(X * room)
    sort = jax.jit(sort_into_rows, static_argnums=1, static_argnames="rows")
    rows = jax.device_get(sort(jnp.asarray(expert_X, jnp.int32), E, rows=R))
    choice_R, row_X, count_E = np.full(R, X), np.full(X, R), np.zeros(E, int)
    start = 0
    for e in range(E):
        for x in np.flatnonzero(expert_X == e)[: R - start]:
            choice_R[start], row_X[x] = x, start
            count_E[e] += 1
            start += 1
    np.testing.assert_array_equal(rows.choice_R, choice_R)
    np.testing.assert_array_equal(rows.row_X, row_X)
    np.testing.assert_array_equal(rows.count_E, count_E)
