# SPDX-License-Identifier: Apache-2.0
"""The reference against loops in float64, both its paths, with NaN wherever nothing is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.reference import Tiling
from tests.kernels import loops
from tests.kernels.loops import GROUPS

D, F = 12, 20
# Compiled once for all sizes of groups: they are operands.
forward = jax.jit(reference.forward, static_argnames=("transpose_w", "tiling"))
weight_gradient = jax.jit(reference.weight_gradient, static_argnames=("out_dtype", "tiling"))
forward_by_ragged_dot = jax.jit(reference.forward_by_ragged_dot, static_argnums=3)
weight_gradient_by_ragged_dot = jax.jit(
    reference.weight_gradient_by_ragged_dot, static_argnums=3
)
TILINGS = [Tiling(1, 4), Tiling(4, 2), Tiling(5, 4), Tiling(16, 1), Tiling(99, 4)]


def sizes_of(groups):
    return jnp.array(GROUPS[groups], jnp.int32)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_pass_on_cpu_against_loops(groups, tiling):
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS[groups], D, F)
    y_RF = forward(x_RD, w_EDF, sizes_of(groups), tiling=tiling)
    np.testing.assert_allclose(
        np.asarray(y_RF), loops.product(x_RD, w_EDF, GROUPS[groups]), rtol=1e-5, atol=1e-5
    )
    dx_RD = forward(dy_RF, w_EDF, sizes_of(groups), transpose_w=True, tiling=tiling)
    w_EFD = np.swapaxes(w_EDF, 1, 2)
    np.testing.assert_allclose(
        np.asarray(dx_RD), loops.product(dy_RF, w_EFD, GROUPS[groups]), rtol=1e-5, atol=1e-5
    )
    dw_EDF = weight_gradient(
        x_RD, dy_RF, sizes_of(groups), out_dtype=jnp.float32, tiling=tiling
    )
    np.testing.assert_allclose(
        np.asarray(dw_EDF),
        loops.weight_gradient(x_RD, dy_RF, GROUPS[groups]),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("groups", GROUPS)
def test_every_pass_by_ragged_dot_against_loops(groups):
    """What accelerators run. On CPU it reads all matrices: those of empty groups are finite."""
    sizes_E = sizes_of(groups)
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS[groups], D, F)
    w_EDF = np.nan_to_num(w_EDF)
    y_RF = forward_by_ragged_dot(x_RD, w_EDF, sizes_E, False)
    np.testing.assert_allclose(
        np.asarray(y_RF), loops.product(x_RD, w_EDF, GROUPS[groups]), rtol=1e-5, atol=1e-5
    )
    dx_RD = forward_by_ragged_dot(dy_RF, w_EDF, sizes_E, True)
    w_EFD = np.swapaxes(w_EDF, 1, 2)
    np.testing.assert_allclose(
        np.asarray(dx_RD), loops.product(dy_RF, w_EFD, GROUPS[groups]), rtol=1e-5, atol=1e-5
    )
    dw_EDF = weight_gradient_by_ragged_dot(x_RD, dy_RF, sizes_E, jnp.float32)
    np.testing.assert_allclose(
        np.asarray(dw_EDF),
        loops.weight_gradient(x_RD, dy_RF, GROUPS[groups]),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("groups", ["uneven", "pruned_tail"])
def test_half_precision_is_rounded_once(groups, dtype):
    """Sums are float32: one rounding away from the sum in float64 of the same inputs."""
    x_RD, w_EDF, dy_RF = (
        jnp.array(array, dtype) for array in loops.operands(GROUPS[groups], 96, F)
    )
    bound = {"rtol": 1.01 * float(jnp.finfo(dtype).eps) / 2, "atol": 1e-4}
    for product, expected in (
        (
            reference.forward(x_RD, w_EDF, sizes_of(groups), tiling=Tiling(4, 8)),
            loops.product(np.asarray(x_RD), np.asarray(w_EDF), GROUPS[groups]),
        ),
        (
            reference.weight_gradient(x_RD, dy_RF, sizes_of(groups), out_dtype=dtype),
            loops.weight_gradient(np.asarray(x_RD), np.asarray(dy_RF), GROUPS[groups]),
        ),
    ):
        assert product.dtype == dtype
        np.testing.assert_allclose(np.asarray(product, np.float64), expected, **bound)


def test_experts_may_be_many_and_rows_few():
    sizes_E = np.zeros(64, np.int32)
    sizes_E[[3, 40, 41]] = 1, 2, 1
    rng = np.random.default_rng(1)
    x_RD, w_EDF = rng.normal(size=(4, 8)), rng.normal(size=(64, 8, 6))
    x_RD, w_EDF = x_RD.astype(np.float32), w_EDF.astype(np.float32)
    y_RF = reference.forward(x_RD, w_EDF, jnp.array(sizes_E))
    np.testing.assert_allclose(
        np.asarray(y_RF), loops.product(x_RD, w_EDF, sizes_E), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("num_rows", "E"), [(0, 3), (4, 0)])
def test_nothing_at_all(num_rows, E):
    x_RD, w_EDF = jnp.ones((num_rows, 8)), jnp.ones((E, 8, 6))
    sizes_E = jnp.zeros(E, jnp.int32)
    assert reference.forward(x_RD, w_EDF, sizes_E).shape == (num_rows, 6)
    dw_EDF = reference.weight_gradient(
        x_RD, jnp.ones((num_rows, 6)), sizes_E, out_dtype=jnp.float32
    )
    assert dw_EDF.shape == (E, 8, 6)


def test_work_and_memory_follow_the_rows():
    """No E times the work, no copy of the weights: temporaries of blocks, not of experts."""
    E = 16
    specs = (
        jax.ShapeDtypeStruct((64, 256), jnp.float32),
        jax.ShapeDtypeStruct((E, 256, 512), jnp.float32),
        jax.ShapeDtypeStruct((E,), jnp.int32),
    )
    compiled = jax.jit(lambda *operands: reference.forward(*operands)).lower(*specs).compile()
    one_expert = 4 * 256 * 512
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * one_expert
    text = compiled.as_text()
    assert "f32[16,64," not in text  # what ragged_dot would make of it


@pytest.mark.parametrize(
    ("R", "E", "rows"),
    [
        (1, 8, 1), (8, 8, 1), (9, 8, 2), (32, 8, 4), (33, 8, 8), (384, 8, 48),
        (8 * 512, 8, 256), (8 * 300, 8, 152), (3, 1, 3),
    ],
)  # fmt: skip
def test_default_tiles_have_an_experts_average_of_rows(R, E, rows):
    assert reference.default_tiling(R, 64, 32, E).rows == rows


def test_default_blocks_fit_the_cache_and_divide():
    for leading, columns in ((1024, 4096), (4096, 1024), (768, 3072), (4096, 14336), (7, 9)):
        for transpose_w in (False, True):
            tiling = reference.default_tiling(64, leading, columns, 8, transpose_w=transpose_w)
            tiling.check(leading)
            assert 4 * columns * tiling.weight_rows <= 2**22
    # Blocks of a prime number of rows would be single rows.
    assert reference.default_tiling(64, 4099, 4096, 8).weight_rows == 4099


@pytest.mark.parametrize("transpose_w", [False, True])
def test_candidates_begin_with_the_default_and_fit(transpose_w):
    tilings = reference.candidates(48, 1024, 4096, 8, transpose_w=transpose_w)
    assert tilings[0] == reference.default_tiling(48, 1024, 4096, 8, transpose_w=transpose_w)
    assert len(set(tilings)) == len(tilings) > 4
    for tiling in tilings:
        tiling.check(1024)


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (Tiling(0, 4), "rows=0; use 1 or more"),
        (Tiling(4, 5), "weight_rows=5; use a divisor of 12"),
        (Tiling(4, 0), "weight_rows=0; use a divisor of 12"),
    ],
)
def test_a_tiling_that_does_not_fit_is_refused(tiling, message):
    x_RD, w_EDF, dy_RF = loops.operands(GROUPS["uneven"], D, F)
    with pytest.raises(ValueError, match=message):
        reference.forward(x_RD, w_EDF, sizes_of("uneven"), tiling=tiling)
    with pytest.raises(ValueError, match=message):
        reference.weight_gradient(
            x_RD, dy_RF, sizes_of("uneven"), out_dtype=jnp.float32, tiling=tiling
        )
