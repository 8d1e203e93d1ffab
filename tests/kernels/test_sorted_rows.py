# SPDX-License-Identifier: Apache-2.0
"""The sort against Python's and its gradients in `jax.shard_map`; which group a row is of."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.sorted_rows import group_bounds, rows_of_groups, stable_argsort
from tests.compare import assert_close
from tests.kernels import loops
from tests.processes import ROOT

E, T, D = 8, 32, 5


def test_order_is_pythons_and_ties_stay():
    key_GT = np.random.default_rng(0).integers(0, 4, (3, 50))
    order_GT = stable_argsort(jnp.asarray(key_GT))
    assert order_GT.dtype == jnp.int32
    for key_T, order_T in zip(key_GT, np.asarray(order_GT), strict=True):
        assert order_T.tolist() == sorted(range(50), key=lambda t, key_T=key_T: key_T[t])


def test_gradients_inside_shard_map_are_those_of_one_device():
    """Every device sorts the shared tokens its own way: its expert's tokens first.

    With `jnp.argsort` in the sort's place, the gradient of the shared tokens is that of one
    device alone (JAX 0.10.2).
    """
    rng = np.random.default_rng(1)
    x_TD, target_TD = rng.normal(size=(2, T, D)).astype(np.float32)
    w_EDD = rng.normal(size=(E, D, D)).astype(np.float32)
    expert_T = jnp.asarray(rng.integers(0, E, T))
    mesh = jax.make_mesh((E,), ("expert",), axis_types=(AxisType.Auto,))

    def on_device(x_TD, w_EDD):
        """Tokens of this device's expert, first T / 2 places only, through it and back."""
        is_other_T = (expert_T != jax.lax.axis_index("expert")).astype(jnp.int32)
        place_T = stable_argsort(is_other_T)[: T // 2]
        y_TD = jnp.where(is_other_T[place_T][:, None] == 0, x_TD[place_T] @ w_EDD[0], 0.0)
        y_TD = jnp.zeros_like(x_TD).at[place_T].set(y_TD)
        return jax.lax.psum(y_TD, "expert")

    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("expert")),
        out_specs=PartitionSpec(),
    )

    def loss(x_TD, w_EDD):
        return jnp.sum(sharded(x_TD, w_EDD) * target_TD)

    def whole(x_TD, w_EDD):
        return jnp.sum(jnp.einsum("TD,TDF->TF", x_TD, w_EDD[expert_T]) * target_TD)

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(x_TD, w_EDD)
    want = jax.jit(jax.value_and_grad(whole, (0, 1)))(x_TD, w_EDD)
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_nothing_else_sorts():
    """`argsort` on a mesh loses gradients without a word (JAX 0.7 to 0.11)."""
    paths = [*ROOT.glob("pallas_kernels/**/*.py"), *ROOT.glob("switchx/moe/*.py")]
    for path in paths:
        if path.name != "sorted_rows.py":
            found = re.findall(
                r"(?<!\bnp\.)\b(?:argsort|sort_key_val|lax\.sort)\(", path.read_text()
            )
            assert not found, f"{path} uses {found}; use pallas_kernels/sorted_rows.py"
    assert len(paths) > 30


@pytest.mark.parametrize("groups", loops.GROUPS)
def test_rows_of_groups(groups):
    sizes, R, E = loops.GROUPS[groups], loops.R, loops.E
    expert_R, is_used_R = map(np.asarray, rows_of_groups(jnp.array(sizes), R))
    used = min(sum(sizes), R)
    assert is_used_R.tolist() == [True] * used + [False] * (R - used)
    np.testing.assert_array_equal(expert_R[:used], loops.expert_of_rows(sizes, R))
    assert np.all((expert_R >= 0) & (expert_R < E))


def test_groups_are_cut_at_the_last_row():
    begin_E, end_E = group_bounds(jnp.array([3, 0, 9, 4]), 10)
    assert (begin_E.tolist(), end_E.tolist()) == ([0, 3, 3, 10], [3, 3, 10, 10])
