# SPDX-License-Identifier: Apache-2.0
"""Matrices in arrays of their own: the loop's numbers, no rows lost, none of others read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SeparateMatrices, grouped_matmul, separate_matmul
from pallas_kernels.grouped_matmul.separate import tile_rows
from tests.kernels import loops

D, F = 12, 20


jitted_matmul = jax.jit(separate_matmul)


@pytest.mark.parametrize("sizes_E", loops.GROUPS.values(), ids=loops.GROUPS)
def test_equals_a_loop(sizes_E):
    x_RD, w_EDF, _ = loops.operands(sizes_E, D, F)
    y_RF = jitted_matmul(
        jnp.array(x_RD), SeparateMatrices.of(w_EDF), jnp.array(sizes_E, jnp.int32)
    )
    np.testing.assert_allclose(y_RF, loops.product(x_RD, w_EDF, sizes_E), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("R", "E"), [(0, 3), (1, 16), (70, 2)])
def test_any_number_of_rows(R, E):
    rng = np.random.default_rng(R)
    x_RD = rng.normal(size=(R, D)).astype(np.float32)
    w_EDF = rng.normal(size=(E, D, F)).astype(np.float32)
    sizes_E = np.bincount(rng.integers(0, E, R), minlength=E).astype(np.int32)
    y_RF = jitted_matmul(jnp.array(x_RD), SeparateMatrices.of(w_EDF), jnp.array(sizes_E))
    np.testing.assert_allclose(y_RF, loops.product(x_RD, w_EDF, sizes_E), rtol=1e-5, atol=1e-5)


def test_parts_share_the_memory_of_the_whole():
    w_EDF = jnp.arange(3 * 16 * 16, dtype=jnp.float32).reshape(3, 16, 16)
    parts = SeparateMatrices.of(w_EDF)
    assert parts.shape == w_EDF.shape and parts.dtype == w_EDF.dtype
    whole = w_EDF.unsafe_buffer_pointer()
    step = 16 * 16 * 4
    assert [part.unsafe_buffer_pointer() - whole for part in parts.matrices] == [
        0, step, 2 * step,
    ]  # fmt: skip


def test_tiles_are_about_as_long_as_an_expert_has_rows():
    assert [tile_rows(R, 8) for R in (1, 4, 16, 64, 4096)] == [1, 2, 4, 16, 32]


@pytest.mark.parametrize(
    ("x_shape", "sizes_E", "message"),
    [
        ((4, D + 1), [2, 2], f"expected {D} columns"),
        ((4, D), [2, 2, 0], "expected 2, one for each expert"),
        ((4, D), [2, 3], "sum to 5, and x_RD has 4 rows"),
    ],
)
def test_refuses_what_does_not_fit(x_shape, sizes_E, message):
    with pytest.raises(ValueError, match=message):
        separate_matmul(
            jnp.zeros(x_shape),
            SeparateMatrices.of(np.zeros((2, D, F), np.float32)),
            jnp.array(sizes_E, jnp.int32),
        )


def test_refuses_what_are_no_matrices_of_experts():
    x_RD, sizes_E = jnp.zeros((4, D)), jnp.array([2, 2])
    w = SeparateMatrices.of(np.zeros((2, D, F), np.float32))
    for shape in ((D, F), (0, D, F)):
        with pytest.raises(ValueError, match=r"expected \[experts, inputs, outputs\] of one"):
            SeparateMatrices.of(np.zeros(shape))
    with pytest.raises(ValueError, match="w is a list; expected SeparateMatrices: use"):
        separate_matmul(x_RD, list(w.matrices), sizes_E)
    wide = SeparateMatrices.of(np.zeros((2, D, F + 1), np.float32))
    with pytest.raises(ValueError, match=rf"w_gate has shape \(2, {D}, {F + 1}\); expected"):
        separate_matmul(x_RD, w, sizes_E, w_gate=wide)


def test_weights_are_multiplied_in_the_dtype_of_the_rows():
    rng = np.random.default_rng(0)
    x_RD = jnp.array(rng.normal(size=(6, 64)), jnp.bfloat16)
    w_EDF = jnp.array(rng.normal(size=(2, 64, F)), jnp.float32)
    sizes_E = jnp.array([2, 4], jnp.int32)
    y_RF = separate_matmul(x_RD, SeparateMatrices.of(w_EDF), sizes_E)
    np.testing.assert_array_equal(
        np.float32(y_RF), np.float32(grouped_matmul(x_RD, w_EDF.astype(x_RD.dtype), sizes_E))
    )


def test_sums_are_rounded_once_after_the_epilogue():
    # 64 products of 40 * 40 are more than float16 holds; times the gate they are not.
    x_RD, w_EDF = jnp.full((3, 64), 40, jnp.float16), jnp.full((2, 64, F), 40, jnp.float16)
    options = {"gate_R": jnp.full(3, 1e-3, jnp.float32), "activation": "silu"}
    y_RF = separate_matmul(x_RD, SeparateMatrices.of(w_EDF), jnp.array([2, 1]), **options)
    np.testing.assert_allclose(np.float32(y_RF), 64 * 40 * 40 * 1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_sizes_of_any_integers(dtype):
    sizes_E = np.array([120, 100], dtype)  # 120 and a tile are more than int8 holds
    x_RD, w_EDF = np.ones((260, D), np.float32), np.ones((2, D, F), np.float32)
    with jax.enable_x64(dtype == "int64"):
        y_RF = separate_matmul(jnp.array(x_RD), SeparateMatrices.of(w_EDF), jnp.array(sizes_E))
    np.testing.assert_array_equal(y_RF, loops.product(x_RD, w_EDF, [120, 100]))
