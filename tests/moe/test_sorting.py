# SPDX-License-Identifier: Apache-2.0
"""The sort by expert: stable, and with right gradients where JAX's own has wrong ones."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import switchx.moe
from switchx.moe.sorting import stable_order

EXPERT = np.arange(16) * 7 % 8


def test_is_a_stable_sort():
    key_R = np.random.default_rng(0).integers(0, 4, 50).astype(np.int32)
    np.testing.assert_array_equal(
        stable_order(jnp.asarray(key_R)), np.argsort(key_R, kind="stable")
    )


def gradient_of_sharded(order_of, check_vma: bool):
    """dx of rows that are sorted on each of 8 devices, against the same without devices."""
    rng = np.random.default_rng(0)
    x_RD, w_EDD, target_RD = (
        rng.normal(size=shape).astype(np.float32) for shape in ((16, 4), (8, 4, 4), (16, 4))
    )

    def body(x_RD, w_EDD):
        is_other = (jax.lax.axis_index("model") != EXPERT).astype(jnp.int32)
        order_R = order_of(is_other)
        y_RD = jnp.where((is_other[order_R] == 0)[:, None], x_RD[order_R] @ w_EDD[0], 0)
        return jax.lax.psum(jnp.zeros_like(y_RD).at[order_R].set(y_RD), "model")

    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("model")),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    got = jax.jit(jax.grad(lambda x_RD: jnp.sum(sharded(x_RD, w_EDD) * target_RD)))(x_RD)
    want = np.stack([w_EDD[e] @ target_RD[r] for r, e in enumerate(EXPERT)])
    return np.asarray(got), want


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_what_it_orders_are_right_on_a_mesh(check_vma):
    got, want = gradient_of_sharded(stable_order, check_vma)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_fault_is_there_to_be_avoided():
    """If this fails, JAX is mended, and the test above no longer shows a difference."""
    got, want = gradient_of_sharded(lambda key_R: jnp.argsort(key_R, stable=True), True)
    if jax.__version_info__ < (0, 12):
        assert np.max(np.abs(got - want)) > 0.1


def test_nothing_else_sorts_by_expert():
    """`argsort` on a mesh loses gradients without a word (JAX 0.7 to 0.11)."""
    for path in pathlib.Path(switchx.moe.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        code = "\n".join(line for line in text.splitlines() if "`" not in line)
        assert "argsort(" not in code and "sort_key_val(" not in code, path.name
