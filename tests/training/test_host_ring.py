# SPDX-License-Identifier: Apache-2.0
"""A scan by the ring: values and gradients against NumPy, microbatches, a wrong order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.training.offload import host_ring
from switchx.training.offload.host_ring import layer_numbers, require_sound_ring, ring_scan
from switchx.training.offload.host_stack import (
    HostStack,
    add_gradients,
    host_stacks,
    with_totals,
    zero_gradients,
)
from tests.partitioning.ring_orders import forwards

D = 6


def layer(x_D, block, k, inputs):
    """`x = sin(x w r + k v + m)` and `y = x w`; k is an integer of the layer, m of all."""
    w_D, r = block
    v_D, m = inputs
    return jnp.sin(x_D * w_D * r + k * v_D + m), {"y_D": x_D * w_D, "k": k}


def by_numpy(x_D, w_ND, r_N, k_N, v_D, m, d_x, d_y_ND):
    """Values and gradients in float64, by hand."""
    inputs, y_ND = [], []
    for w_D, r, k in zip(w_ND, r_N, k_N, strict=True):
        inputs.append(x_D)
        y_ND.append(x_D * w_D)
        x_D = np.sin(x_D * w_D * r + k * v_D + m)
    last_D = x_D
    d_w_ND, d_r_N, d_v_D = np.zeros_like(w_ND), np.zeros_like(r_N), np.zeros_like(v_D)
    for n in reversed(range(len(w_ND))):
        x_D, w_D, r = inputs[n], w_ND[n], r_N[n]
        d_z = d_x * np.cos(x_D * w_D * r + k_N[n] * v_D + m)
        d_w_ND[n] = d_z * x_D * r + d_y_ND[n] * x_D
        d_r_N[n] = np.sum(d_z * x_D * w_D)
        d_v_D += k_N[n] * d_z
        d_x = d_z * w_D * r + d_y_ND[n] * w_D
    return last_D, np.array(y_ND), (d_x, d_w_ND, d_r_N, d_v_D)


def drawn(N: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    x_D, v_D, d_x = rng.normal(size=(3, D))
    w_ND, d_y_ND = rng.normal(size=(2, N, D))
    return x_D, w_ND, rng.normal(size=N), np.arange(N) % 3, v_D, 1, d_x, d_y_ND


def by_ring(slots: int, arguments, order_N=None, total_ND=None):
    """The same by `ring_scan`, and the squares of the gradients of w."""
    x_D, w_ND, r_N, k_N, v_D, m, d_x, d_y_ND = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32 if np.asarray(x).dtype.kind == "f" else jnp.int32),
        arguments,
    )
    w_ND = HostStack.of(w_ND, "ND", slots)

    def run(x_D, w_ND, r_N, v_D):
        if total_ND is not None:
            like = HostStack.of(jnp.asarray(total_ND, jnp.float32), "ND", slots)
            w_ND = with_totals(w_ND, like)
        order = layer_numbers(len(k_N)) if order_N is None else order_N
        x_D, y = ring_scan(layer, x_D, (w_ND, r_N), k_N, (v_D, m), order, slots=slots)
        value = jnp.sum(x_D * d_x) + jnp.sum(y["y_D"] * d_y_ND)
        return value, (x_D, y)

    grads, (x_D, y) = jax.jit(jax.grad(run, argnums=(0, 1, 2, 3), has_aux=True))(
        x_D, w_ND, r_N, v_D
    )
    np.testing.assert_array_equal(y["k"], k_N)
    return x_D, y["y_D"], grads


@pytest.mark.parametrize(("N", "slots"), [(2, 2), (5, 2), (5, 3), (8, 3), (4, 4)])
def test_values_and_gradients_are_those_of_numpy(N, slots):
    arguments = drawn(N)
    x_D, y_ND, (d_x, d_w_ND, d_r_N, d_v_D) = by_ring(slots, arguments)
    want_x, want_y, want = by_numpy(*arguments)
    close = dict(rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(x_D, want_x, **close)
    np.testing.assert_allclose(y_ND, want_y, **close)
    for got, wanted in zip((d_x, d_w_ND.value, d_r_N, d_v_D), want, strict=True):
        np.testing.assert_allclose(got, wanted, **close)
    np.testing.assert_allclose(d_w_ND.squares, np.sum(want[1] ** 2), rtol=1e-5)


def test_gradients_of_microbatches_are_added_where_they_are():
    total_ND = np.random.default_rng(3).normal(size=(5, D))
    _, _, (_, d_w_ND, _, _) = by_ring(2, drawn(5), total_ND=total_ND)
    wanted = by_numpy(*drawn(5))[2][1] + total_ND
    np.testing.assert_allclose(d_w_ND.value, wanted, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(d_w_ND.squares, np.sum(wanted**2), rtol=1e-5)
    assert d_w_ND.total is None


def test_sums_of_gradients_leave_those_that_have_the_others_in_them():
    stack = HostStack.of(jnp.ones((3, 2)), "ND", 2)
    params = {"host": stack, "own": jnp.ones(4)}
    zeros = zero_gradients(params)
    np.testing.assert_array_equal(zeros["host"].value, np.zeros((3, 2)))
    summed = add_gradients(params, params)
    np.testing.assert_array_equal(summed["host"].value, np.ones((3, 2)))
    np.testing.assert_array_equal(summed["own"], np.full(4, 2.0))
    assert [each.slots for each in host_stacks(params)] == [2]
    with_total = with_totals(params, params)
    np.testing.assert_array_equal(with_total["host"].total, np.ones((3, 2)))
    assert add_gradients(params, with_total)["host"].total is None


def test_a_wrong_order_of_the_backward_pass_is_caught(monkeypatch):
    """What XLA on GPUs made of a reversed loop: layers are read from the first one on."""
    require_sound_ring(jax.devices()[0])
    monkeypatch.setattr(host_ring, "_fetched", forwards)
    with pytest.raises(RuntimeError, match="xla#46231.* use a newer JAX, or StorageSpec"):
        require_sound_ring(jax.devices()[0])
    _, _, (_, d_w_ND, _, _) = by_ring(2, drawn(4))
    wanted = by_numpy(*drawn(4))[2][1]
    assert np.max(np.abs(d_w_ND.value - wanted)) > 0.1
