# SPDX-License-Identifier: Apache-2.0
"""The quantized reference against a loop over rows in float64, and what it keeps in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.reference import Tiling
from pallas_kernels.quantization.qtensor import QTensor
from pallas_kernels.quantization.quantize import quantize
from pallas_kernels.quantized_grouped_matmul import reference
from tests.kernels import loops
from tests.kernels.loops import GROUPS, E, R

D, F = 24, 20
# Compiled once for all sizes of groups: they are operands.
forward = jax.jit(reference.forward, static_argnames="tiling")
product_of_dequantized = jax.jit(reference.product_of_dequantized)


def weights_of(q: QTensor) -> np.ndarray:
    """float64 `[E, D, F]` by the words of QTensor's docstring."""
    values_EFD = np.asarray(q.native().values.astype(jnp.int8)).astype(np.float64)
    scales_EFG = np.asarray(q.scales_EFG, np.float64)
    w_EDF = np.zeros(q.shape)
    for d in range(q.shape[1]):
        w_EDF[:, d] = scales_EFG[:, :, d // (q.group_size or D)] * values_EFD[:, :, d]
    return w_EDF


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("group_size", [None, 6, 3])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("groups", GROUPS)
def test_both_paths_against_a_loop(groups, bits, group_size, is_native):
    x_RD, w_EDF, _ = loops.operands(GROUPS[groups], D, F)
    q = quantize(np.nan_to_num(w_EDF), bits, group_size=group_size)
    q = q.native() if is_native else q
    sizes_E = jnp.array(GROUPS[groups])
    expected_RF = loops.product(x_RD, weights_of(q), GROUPS[groups])
    for tiling in (None, Tiling(5, 4)):
        y_RF = forward(x_RD, q, sizes_E, tiling=tiling)
        np.testing.assert_allclose(np.asarray(y_RF), expected_RF, rtol=1e-5, atol=1e-5)
    y_RF = product_of_dequantized(jnp.array(x_RD), q, sizes_E)
    np.testing.assert_allclose(np.asarray(y_RF), expected_RF, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", ["uneven", "pruned_tail", "nothing"])
def test_epilogue_against_a_loop_with_poison_in_unused_gates(groups):
    x_RD, w_EDF, _ = loops.operands(GROUPS[groups], D, F)
    q = quantize(np.nan_to_num(w_EDF), 8)
    rng = np.random.default_rng(2)
    bias_EF, gate_R = rng.normal(size=(E, F)), rng.normal(size=R)
    expected_RF = loops.product(x_RD, weights_of(q), GROUPS[groups])
    for r, e in enumerate(loops.expert_of_rows(GROUPS[groups], R)):
        expected_RF[r] = gate_R[r] * np.maximum(expected_RF[r] + bias_EF[e], 0)
    gate_R[sum(GROUPS[groups]) :] = np.nan
    y_RF = reference.forward(
        x_RD, q, jnp.array(GROUPS[groups]), bias_EF=jnp.array(bias_EF, jnp.float32),
        activation="relu", gate_R=jnp.array(gate_R, jnp.float32),
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(y_RF), expected_RF, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_once(dtype):
    x_RD, w_EDF, _ = loops.operands(GROUPS["uneven"], D, F)
    x_RD, q = jnp.array(x_RD, dtype), quantize(w_EDF, 4)
    y_RF = reference.forward(x_RD, q, jnp.array(GROUPS["uneven"]))
    assert y_RF.dtype == dtype
    expected_RF = loops.product(np.asarray(x_RD), weights_of(q), GROUPS["uneven"])
    np.testing.assert_allclose(
        np.asarray(y_RF, np.float64),
        expected_RF,
        rtol=1.01 * float(jnp.finfo(dtype).eps) / 2,
        atol=1e-5,
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_dequantized_weights_are_never_all_there(bits):
    """Temporaries hold a block, even of one expert; arguments are the quantized bytes."""
    E, D, F = 32, 512, 2048
    q = jax.eval_shape(
        lambda w_EDF: quantize(w_EDF, bits), jax.ShapeDtypeStruct((E, D, F), jnp.float32)
    )
    x_RD = jax.ShapeDtypeStruct((64, D), jnp.float32)
    sizes_E = jax.ShapeDtypeStruct((E,), jnp.int32)
    memory = jax.jit(reference.forward).lower(x_RD, q, sizes_E).compile().memory_analysis()
    one_expert = 4 * D * F
    assert memory.temp_size_in_bytes < one_expert + 2 * 4 * 64 * F
    others = 4 * 64 * D + 4 * E
    assert memory.argument_size_in_bytes - others == q.nbytes
    assert q.values_nbytes == E * one_expert * bits // 32


@pytest.mark.parametrize(("num_rows", "E"), [(0, 3), (4, 0)])
def test_nothing_at_all(num_rows, E):
    q = QTensor(jnp.zeros((E, 6, 8), jnp.int8), jnp.ones((E, 6, 1)), bits=8)
    y_RF = reference.forward(jnp.ones((num_rows, 8)), q, jnp.zeros(E, jnp.int32))
    assert y_RF.shape == (num_rows, 6)


def test_tilings_are_of_output_features():
    assert reference.default_tiling(64, 1024, 4096, 8) == Tiling(8, 256)
    tilings = reference.candidates(64, 1024, 4096, 8)
    assert tilings[0] == reference.default_tiling(64, 1024, 4096, 8)
    with pytest.raises(ValueError, match="weight_rows=3; use a divisor of 20"):
        reference.forward(
            jnp.ones((R, D)), quantize(np.ones((E, D, F), np.float32), 8),
            jnp.array(GROUPS["uneven"]), tiling=Tiling(4, 3),
        )  # fmt: skip
