# SPDX-License-Identifier: Apache-2.0
"""Replicas that run by themselves: their axes, their sums, their random numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.compiled.collectives import executed_collectives
from switchx.partitioning.constrain import current_rules, num_devices, use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.replicas import (
    own_key,
    random_rows,
    replica_axes,
    replica_number,
    run_on_replicas,
)
from switchx.partitioning.rules import Rules

ROWS, D = 8, 4
VOCABULARY_ROWS = Rules(params=(("V", ("data",)),), may_stay_whole=())
X_BD = np.arange(ROWS * D, dtype=np.float32).reshape(ROWS, D)


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (MeshSpec(), ("data",)),
        (MeshSpec(data=2, fsdp=2, expert=2), ("data",)),
        (MeshSpec(data=1, fsdp=8), ()),
        # The table's gradient is no sum over `data`.
        (MeshSpec(rules=VOCABULARY_ROWS), ()),
        # Without slices of D, devices along `fsdp` are replicas too.
        (MeshSpec(data=2, fsdp=4, rules=Rules(params=(), expert_params=())), ("data", "fsdp")),
    ],
)
def test_axes_are_those_that_split_the_batch_and_no_parameter(spec, axes):
    assert replica_axes(spec.build(), spec.rules) == axes


def on_replicas(function, *others, spec=MeshSpec(data=4, model=2)):
    with use_mesh(spec.build(), spec.rules):
        run = functools.partial(run_on_replicas, function, ("data",))
        return jax.jit(run)(X_BD, others)


def test_each_replica_has_its_rows_and_what_they_return_is_added_up():
    def function(rows, others):
        assert rows.shape == (ROWS // 4, D)
        assert num_devices() == 2 and "data" not in str(current_rules())
        return {"sum": jnp.sum(rows) * others[0], "number": replica_number()}

    found = on_replicas(function, jnp.float32(3))
    assert float(found["sum"]) == 3 * X_BD.sum()
    assert int(found["number"]) == 0 + 1 + 2 + 3


def test_a_loop_inside_sums_gradients_once():
    """An all-reduce inside of it, as of a scan over microbatches, would count six times."""

    def function(rows, others):
        def turn(total, _):
            gradient = jax.grad(lambda w_D: jnp.sum(jnp.sin(rows @ w_D)))(others[0] + total)
            return total + gradient, None

        return jax.lax.scan(turn, jnp.zeros(D), length=6)[0]

    spec = MeshSpec()
    with use_mesh(spec.build(), spec.rules):
        run = functools.partial(run_on_replicas, function, ("data",))
        compiled = jax.jit(run).lower(X_BD, (jnp.ones(D),)).compile()
    executed = executed_collectives(compiled.as_text())
    assert [(one.kind, one.num_bytes, n) for one, n in executed.items()] == [
        ("all-reduce", D * 4, 1)
    ]


@pytest.mark.parametrize("draw", [jax.random.uniform, jax.random.normal])
def test_a_row_has_the_same_random_numbers_wherever_it_is(draw):
    key = jax.random.key(3)
    whole = random_rows(draw, key, (ROWS, 1, D))

    def function(rows, others):
        drawn = random_rows(draw, key, (len(rows), 1, D))
        place = jnp.zeros((4, *drawn.shape))
        return place.at[replica_number()].set(drawn)

    np.testing.assert_array_equal(on_replicas(function).reshape(whole.shape), whole)
    assert len(np.unique(whole)) == whole.size


def test_keys_of_replicas_differ():
    def function(rows, others):
        drawn = jax.random.uniform(own_key(others[0]))
        return jnp.zeros(4).at[replica_number()].set(drawn)

    assert len(np.unique(on_replicas(function, jax.random.key(0)))) == 4


def test_outside_of_replicas_nothing_changes():
    key = jax.random.key(5)
    assert replica_number() == 0 and own_key(key) is key and own_key(None) is None
    assert float(run_on_replicas(lambda rows, other: rows.sum() + other, (), X_BD, 1)) == (
        X_BD.sum() + 1
    )
