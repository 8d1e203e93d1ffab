# SPDX-License-Identifier: Apache-2.0
"""`quantized_grouped_matmul` and its reference: against loops, forms of weights, refusals."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import (
    dequantize,
    grouped_matmul,
    quantization_error,
    quantize,
    quantize_rows,
    quantized_grouped_matmul,
)
from pallas_kernels.grouped_matmul.reference import Tiling
from pallas_kernels.quantization.qtensor import QTensor, pack_int4
from pallas_kernels.quantized_grouped_matmul import reference
from pallas_kernels.tiling.tpu import Tiling as TPUTiling
from pallas_kernels.tpu_chip import described_tpu
from tests.cases import slow, slow_unless
from tests.kernels import loops
from tests.kernels.loops import GROUPS, E, R

D, F = 24, 20
SIZES = GROUPS["pruned_tail"]
# Compiled once for all sizes of groups: they are operands.
forward = jax.jit(reference.forward, static_argnames="tiling")
product_of_dequantized = jax.jit(reference.product_of_dequantized)


def call(**changes):
    x_RD, w_EDF, _ = loops.operands(SIZES, D, F, tail=0)
    operands = {"x_RD": jnp.array(x_RD), "w": quantize(w_EDF, 4)}
    return quantized_grouped_matmul(**operands | {"group_sizes_E": jnp.array(SIZES)} | changes)


@pytest.mark.parametrize("argument", ["x_RD", "gate_R", "bias_EF"])
def test_differentiating_it_says_what_to_do(argument):
    values = {"x_RD": jnp.ones((R, D)), "gate_R": jnp.ones(R), "bias_EF": jnp.ones((E, F))}
    with pytest.raises(TypeError, match="no gradient: put jax.lax.stop_gradient around"):
        jax.grad(lambda value: call(**{argument: value}).sum())(values[argument])


def test_what_it_says_to_do_works():
    def stopped(x_RD):
        return jnp.sum(x_RD) + call(x_RD=jax.lax.stop_gradient(x_RD)).sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(stopped)(jnp.ones((R, D)))), 1)
    q = quantize(loops.operands(SIZES, D, F, tail=0)[1], 4)
    dx_RD = jax.grad(lambda x_RD: grouped_matmul(x_RD, dequantize(q), jnp.array(SIZES)).sum())(
        jnp.ones((R, D))
    )
    assert np.any(np.asarray(dx_RD) != 0)


@pytest.mark.parametrize("group_size", [1, 3, None])
def test_packed_weights_that_a_program_closes_over_are_read_right(group_size):
    """XLA's own 4-bit integers go wrong in constants: packed ones are none."""
    rng = np.random.default_rng(0)
    w = quantize(rng.normal(size=(1, 12, 16)).astype(np.float32), 4, group_size=group_size)
    x_RD, sizes_E = rng.normal(size=(5, 12)).astype(np.float32), jnp.array([5])
    want = x_RD @ np.asarray(dequantize(w))[0]
    got = jax.jit(lambda x_RD: quantized_grouped_matmul(x_RD, w, sizes_E))(x_RD)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_another_layout_is_refused_before_anything_runs():
    q = dataclasses.replace(quantize(np.ones((E, D, F), np.float32), 8), layout_version=7)
    with pytest.raises(ValueError, match="layout version 7; this code reads version 1"):
        call(w=q)
    with pytest.raises(ValueError, match="layout version 7"):
        jax.jit(quantized_grouped_matmul).lower(jnp.ones((R, D)), q, jnp.array(SIZES))


def weights_of(q: QTensor) -> np.ndarray:
    """float64 `[E, D, F]` by the words of QTensor's docstring."""
    values_EFD = np.asarray(q.native().values.astype(jnp.int8)).astype(np.float64)
    scales_EFG = np.asarray(q.scales_EFG, np.float64)
    w_EDF = np.zeros(q.shape)
    for d in range(q.shape[1]):
        w_EDF[:, d] = scales_EFG[:, :, d // (q.group_size or q.shape[1])] * values_EFD[:, :, d]
    return w_EDF


# Each is a program of its own: whole channels and groups of even and odd size, both forms.
FORMS = [(8, None, False), (4, 6, False), (4, 3, False), (4, None, True)]


@pytest.mark.parametrize(
    ("bits", "group_size", "is_native"),
    [
        slow_unless(form in FORMS, *form)
        for form in itertools.product((8, 4), (None, 6, 3), (False, True))
    ],
)
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
def test_epilogue_against_a_loop_with_nan_in_unused_gates(groups):
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
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("gpu", jnp.float16),
        ("triton", jnp.float16),
        ("triton", jnp.bfloat16),
        slow("gpu", jnp.bfloat16),
        slow("tpu", jnp.bfloat16),
    ],
)
def test_kernels_convert_every_weight_exactly(implementation, dtype, bits):
    """Rows of the unit matrix take the integers out, to the bit."""
    D, F, most = 64, 64, 2 ** (bits - 1)
    values_EFD = (np.arange(F * D) % (2 * most) - most).astype(np.int8).reshape(1, F, D)
    q = QTensor(jnp.array(values_EFD if bits == 8 else pack_int4(values_EFD)),
                jnp.ones((1, F, 1)), bits)  # fmt: skip
    operands = jnp.eye(D, dtype=dtype), q, jnp.array([D])
    interpret = loops.interprets(implementation)
    got_RF = quantized_grouped_matmul(
        *operands, implementation=implementation, interpret=interpret
    )
    np.testing.assert_array_equal(np.asarray(got_RF), values_EFD[0].T.astype(dtype))


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


def rows_by_loop(x_RD):
    """Rows to int8 and their scales, value by value."""
    values, scales = np.zeros(x_RD.shape, np.int64), np.ones(len(x_RD))
    for r, x_D in enumerate(x_RD):
        if np.abs(x_D).max() > 0:
            scales[r] = np.float32(np.abs(x_D).max() / np.float32(127))
            values[r] = np.rint(np.float32(x_D) / np.float32(scales[r]))
    return values, scales


def test_rows_are_quantized_as_a_loop_does():
    x_RD = np.random.default_rng(3).normal(size=(9, 40)).astype(np.float32)
    x_RD[2] = 0
    x_RD[3] *= np.float32(1e-36)
    x_RD[4] *= np.float32(1e36)
    values_RD, scale_R = jax.jit(quantize_rows)(x_RD)
    assert (values_RD.dtype, scale_R.dtype) == (jnp.int8, jnp.float32)
    wanted, scales = rows_by_loop(x_RD)
    np.testing.assert_allclose(scale_R, scales, rtol=2e-7)
    assert np.abs(values_RD - wanted).max() <= 1  # a tie may fall either way
    assert np.abs(np.asarray(values_RD)).max(axis=1).tolist() == [127, 127, 0] + [127] * 6


# (implementation, bits, group): a TPU's kernel is interpreted, with int8 products.
QUANTIZED_ROWS = [
    ("reference", "", 8, None),
    ("tpu", "TPU v5 lite", 8, None),
    ("tpu", "TPU v5 lite", 4, 128),
    ("tpu", "TPU v4", 8, None),  # which multiplies them in bfloat16
]


@pytest.mark.parametrize(
    ("implementation", "kind", "bits", "group_size"),
    [slow(*case) if i > 1 else case for i, case in enumerate(QUANTIZED_ROWS)],
)
def test_int8_rows_against_float64(implementation, kind, bits, group_size):
    """Within float32 of the integers' product, and within 2% of that of the numbers."""
    sizes, depth, features = (0, 9, 20), 256, 96
    rng = np.random.default_rng(6)
    x_RD = (rng.normal(size=(33, depth)) * rng.uniform(0.1, 9, (33, 1))).astype(np.float32)
    x_RD[sum(sizes) :] = np.nan
    x_RD = jnp.asarray(x_RD, jnp.bfloat16)
    w_EDF = rng.normal(size=(3, depth, features)).astype(np.float32)
    q = quantize(w_EDF, bits, group_size=group_size)
    bias_EF = rng.normal(size=(3, features)).astype(np.float32)
    options = {} if implementation == "reference" else {
        "interpret": True, "tiling": TPUTiling(32, 128, features),
    }  # fmt: skip
    with described_tpu(kind) if kind else contextlib.nullcontext():
        y_RF = quantized_grouped_matmul(
            x_RD, q, jnp.array(sizes), bias_EF=bias_EF, quantize_rows_to="int8",
            preferred_element_type=jnp.float32, implementation=implementation, **options,
        )  # fmt: skip
    used = sum(sizes)
    assert not np.asarray(y_RF[used:]).any()
    bias_RF = bias_EF[loops.expert_of_rows(sizes, len(x_RD))]
    values, scales = (np.asarray(each)[:used] for each in quantize_rows(x_RD))
    integers = loops.product(values * np.float64(scales)[:, None], weights_of(q), sizes)
    exact = loops.product(np.asarray(x_RD)[:used], w_EDF, sizes)
    got = np.asarray(y_RF[:used], np.float64) - bias_RF
    assert np.abs(got - integers).max() < 2e-6 * np.abs(integers).max()
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert 0.005 < error < (0.02 if bits == 8 else 0.12)


def test_what_is_not_quantized_is_refused_with_the_way_out():
    for run in (dequantize, lambda w: quantization_error(np.ones((E, D, F)), w)):
        with pytest.raises(ValueError, match="q is a ndarray; expected a QTensor: use"):
            run(np.ones((E, D, F)))
    for rows in (np.ones((E, D, F), np.float32), np.ones((R, D), np.int32)):
        with pytest.raises(ValueError, match=r"expected floating point \[rows, inputs\]"):
            quantize_rows(rows)
    with pytest.raises(ValueError, match="tiling is 8; expected a pallas_kernels"):
        call(tiling=8)


# (implementation, device, group): a TPU v4 converts float8, later ones read it as it is.
FLOAT8_CASES = [
    ("reference", "", None),
    ("tpu", "TPU v5 lite", 128),
    ("tpu", "TPU7x", None),
    ("tpu", "TPU v4", None),
    ("gpu", "", 128),
    ("triton", "", None),
]


def kernel_options(implementation, features) -> dict:
    if implementation == "reference":
        return {"implementation": implementation}
    tiling = TPUTiling(32, 128, features) if implementation == "tpu" else None
    interpret = loops.interprets(implementation)
    return {"implementation": implementation, "interpret": interpret, "tiling": tiling}


@pytest.mark.parametrize(
    ("implementation", "kind", "group_size"),
    [slow_unless(i in (0, 2, 5), *case) for i, case in enumerate(FLOAT8_CASES)],
)
@pytest.mark.parametrize("rows", [None, "float8_e4m3fn"])
def test_float8_weights_and_rows_against_float64(implementation, kind, group_size, rows):
    """Within float32 of the values' product, and off that of the numbers by 2.6% and 3.7%."""
    sizes, depth, features = (0, 9, 20), 256, 64
    rng = np.random.default_rng(6)
    x_RD = (rng.normal(size=(32, depth)) * rng.uniform(0.1, 9, (32, 1))).astype(np.float32)
    used = sum(sizes)
    if implementation != "gpu":
        x_RD[used:] = np.nan
    x_RD[4] = 0
    x_RD = jnp.asarray(x_RD, jnp.bfloat16)
    w_EDF = rng.normal(size=(3, depth, features)).astype(np.float32)
    w_EDF[1, :, 3] *= 1e-30
    q = quantize(w_EDF, 8, group_size=group_size, dtype="float8_e4m3fn")
    with described_tpu(kind) if kind else contextlib.nullcontext():
        y_RF = quantized_grouped_matmul(
            x_RD, q, jnp.array(sizes), quantize_rows_to=rows,
            preferred_element_type=jnp.float32, **kernel_options(implementation, features),
        )  # fmt: skip
    assert not np.asarray(y_RF[used:]).any()
    got, taken = np.asarray(y_RF[:used], np.float64), np.asarray(x_RD[:used], np.float32)
    if rows:
        scale_R1 = np.abs(taken).max(axis=1, keepdims=True) / np.float32(448)
        scale_R1[scale_R1 == 0] = 1
        values_RD = (taken / scale_R1).astype(ml_dtypes.float8_e4m3fn)
        taken = values_RD.astype(np.float32) * scale_R1
        if implementation in ("gpu", "triton"):
            taken = np.asarray(jnp.asarray(taken, jnp.bfloat16), np.float32)
    values_EFD = np.asarray(q.values).astype(np.float64)
    scales_EFD = np.repeat(np.asarray(q.scales_EFG, np.float64), group_size or depth, axis=2)
    expected = loops.product(taken, np.swapaxes(values_EFD * scales_EFD, 1, 2), sizes)
    exact = loops.product(np.asarray(x_RD[:used], np.float32), w_EDF, sizes)
    assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert error == pytest.approx(0.037 if rows else 0.026, rel=0.1)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *(("reference", "bfloat16"), ("tpu", "bfloat16"), ("gpu", "bfloat16")),
        *(("triton", "bfloat16"), ("triton", "float16")),
        *(slow("reference", dtype) for dtype in ("float16", "float32")),
        *(slow("triton", "float32"), slow("tpu", "float32"), slow("gpu", "float16")),
    ],
)
def test_every_float8_value_is_read_exactly(implementation, dtype):
    """One channel a row, so that a result is a weight, the subnormal and largest ones, too."""
    codes = np.setdiff1d(np.arange(256), (0x7F, 0xFF, 0x80)).astype(np.uint8)
    codes_FD = np.stack([np.resize(np.roll(codes, 37 * f), 256) for f in range(64)])
    values_EFD = codes_FD.view(ml_dtypes.float8_e4m3fn)[None]
    q = QTensor(jnp.array(values_EFD), jnp.ones((1, 64, 1)), bits=8)
    y_RF = quantized_grouped_matmul(
        jnp.eye(256, dtype=dtype), q, jnp.array([256]), preferred_element_type=jnp.float32,
        **kernel_options(implementation, 64),
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(y_RF), values_EFD[0].T.astype(np.float32))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_nan_in_a_row_is_nan_in_its_result_alone(dtype):
    q = quantize(loops.operands(SIZES, D, F, tail=0)[1], 8, dtype=dtype)
    x_RD = jnp.ones((R, D)).at[1, 5].set(jnp.nan)
    y_RF = call(x_RD=x_RD, w=q, quantize_rows_to=dtype)
    is_nan_RF = np.isnan(np.asarray(y_RF))
    assert is_nan_RF[1].all() and not np.delete(is_nan_RF, 1, axis=0).any()


def test_kinds_of_values_are_not_mixed():
    w_EDF = loops.operands(SIZES, D, F, tail=0)[1]
    q8, q = quantize(w_EDF, 8), quantize(w_EDF, 8, dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="weights of int8; expected 'int8': use that"):
        call(w=q8, quantize_rows_to="float8_e4m3fn")
    with pytest.raises(ValueError, match="of float8_e4m3fn; expected 'float8_e4m3fn': use"):
        call(w=q, quantize_rows_to="int8")
    with pytest.raises(ValueError, match="float8_e4m3fn, None and no: quantize both"):
        call(w=q, w_gate=q8)
    with pytest.raises(ValueError, match="dtype='int4'; expected int8 or float8_e4m3fn"):
        quantize_rows(jnp.ones((2, 4)), "int4")


def test_other_dtypes_of_rows_are_refused():
    with pytest.raises(ValueError, match="'int4' with weights of uint8; expected 'int8': use"):
        call(quantize_rows_to="int4")
    with pytest.raises(TypeError, match="no gradient"):
        jax.grad(lambda x_RD: call(x_RD=x_RD, quantize_rows_to="int8").sum())(jnp.ones((R, D)))
