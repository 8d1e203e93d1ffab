# SPDX-License-Identifier: Apache-2.0
"""Sorting by expert against NumPy's stable sort, and its gradients on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import permute, sort_by_expert, unpermute
from pallas_kernels.routing.sort import permute_gates

T, S, E, D = 9, 2, 4, 3


def choices(seed=0, low=0, high=E + 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, (T, S)).astype(np.int32)


@given(st.lists(st.tuples(*[st.integers(0, E)] * S), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_order_inverse_and_counts(rows):
    expert_TS = np.array(rows, np.int32)
    sorted_rows = sort_by_expert(jnp.array(expert_TS), E)
    flat_R = expert_TS.reshape(-1)
    order_R = np.argsort(flat_R, kind="stable")
    np.testing.assert_array_equal(np.asarray(sorted_rows.source_R), order_R)
    np.testing.assert_array_equal(order_R[np.asarray(sorted_rows.row_TS)], np.arange(
        flat_R.size).reshape(expert_TS.shape))  # fmt: skip
    np.testing.assert_array_equal(
        np.asarray(sorted_rows.group_sizes_E), np.bincount(flat_R, minlength=E + 1)[:E]
    )


def test_finished_tokens_come_past_all_groups():
    expert_TS = choices(high=E)
    is_finished_T = np.arange(T) % 3 == 0
    rows = sort_by_expert(jnp.array(expert_TS), E, is_finished_T=jnp.array(is_finished_T))
    active = S * int((~is_finished_T).sum())
    assert int(rows.group_sizes_E.sum()) == active
    assert np.all(np.asarray(rows.row_TS)[is_finished_T] >= active)
    assert np.all(np.asarray(rows.row_TS)[~is_finished_T] < active)


def test_permute_and_unpermute_against_loops():
    rng = np.random.default_rng(1)
    x_TD, gate_TS = rng.normal(size=(T, D)), rng.normal(size=(T, S))
    x_TD, gate_TS = jnp.array(x_TD, jnp.float32), jnp.array(gate_TS, jnp.float32)
    expert_TS = choices()
    rows = sort_by_expert(jnp.array(expert_TS), E)
    x_RD = np.asarray(permute(x_TD, rows))
    gate_R = np.asarray(permute_gates(gate_TS, rows))
    for t in range(T):
        for s in range(S):
            r = int(rows.row_TS[t, s])
            np.testing.assert_array_equal(x_RD[r], np.asarray(x_TD[t]))
            assert gate_R[r] == gate_TS[t, s]
    gated_TD = np.asarray(unpermute(jnp.array(x_RD), rows, gate_TS))
    expected_TD = np.sum(np.asarray(gate_TS), axis=1, keepdims=True) * np.asarray(x_TD)
    np.testing.assert_allclose(gated_TD, expected_TD, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(unpermute(jnp.array(x_RD), rows)), S * np.asarray(x_TD), rtol=1e-6
    )
    one = sort_by_expert(jnp.array(expert_TS[:, :1]), E)
    np.testing.assert_array_equal(
        np.asarray(unpermute(permute(x_TD, one), one)), np.asarray(x_TD)
    )


def test_gradients_inside_shard_map():
    """`argsort` and `sort_key_val` give wrong ones there (JAX 0.7 to 0.11), and no error."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(2)
    x_TD = jnp.array(rng.normal(size=(2 * T, D)), jnp.float32)
    weight_RD = jnp.array(rng.normal(size=(2 * T * S, D)), jnp.float32)
    gate_TS = jnp.array(rng.normal(size=(2 * T, S)), jnp.float32)
    expert_TS = jnp.array(np.concatenate([choices(3), choices(4)]))

    def local(x_TD, gate_TS, expert_TS, weight_RD):
        rows = sort_by_expert(expert_TS, E)
        return unpermute(weight_RD * permute(x_TD, rows), rows, gate_TS)

    spec = PartitionSpec("data")
    sharded = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)(local)

    def loss(function):
        return lambda x_TD, gate_TS: jnp.sum(
            jnp.sin(function(x_TD, gate_TS, expert_TS, weight_RD))
        )

    def one_by_one(*operands):
        halves = zip(*(jnp.split(operand, 2) for operand in operands), strict=True)
        return jnp.concatenate([local(*half) for half in halves])

    gradients = jax.jit(jax.grad(loss(sharded), argnums=(0, 1)))(x_TD, gate_TS)
    expected = jax.grad(loss(one_by_one), argnums=(0, 1))(x_TD, gate_TS)
    for gradient, right in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(gradient), np.asarray(right), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("expert_TS", [jnp.zeros(4, jnp.int32), jnp.zeros((4, 1))])
def test_what_is_no_choice_is_refused(expert_TS):
    with pytest.raises(ValueError, match=r"expected int32 \[tokens, choices\]"):
        sort_by_expert(expert_TS, E)
