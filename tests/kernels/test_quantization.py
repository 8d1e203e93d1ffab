# SPDX-License-Identifier: Apache-2.0
"""Quantization against loops and published errors, QTensor's layout, the magic numbers."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantization.magic_numbers import (
    int4_to_float16,
    int8_to_float16,
    nibbles_to_float,
)
from pallas_kernels.quantization.qtensor import QTensor, pack_int4
from pallas_kernels.quantization.quantize import (
    CLIP_RATIOS,
    METHODS,
    dequantize,
    quantization_error,
    quantize,
)
from pallas_kernels.quantized_grouped_matmul.api import quantized_grouped_matmul
from tests.cases import slow_unless


def weights(E=2, D=24, F=5, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(E, D, F)).astype(np.float32)


def quantized_channel(w_C, bits, method) -> np.ndarray:
    """One channel in float64, by the words of the docstring."""
    q, m = 2 ** (bits - 1) - 1, np.abs(w_C).max()
    if method == "ft":
        return m / (q + 1) * np.clip(np.round(w_C / (m / (q + 1))), -q - 1, q)
    ratios, low = (CLIP_RATIOS, -q - 1) if method == "mse" else ([1.0], -q)
    attempts = [r * m / q * np.clip(np.round(w_C / (r * m / q)), low, q) for r in ratios]
    return min(attempts, key=lambda attempt: np.sum((attempt - w_C) ** 2))


# Each is a program of its own; the other ones differ in a constant.
DEFAULT = [(4, "mse"), (8, "absmax"), (8, "ft")]
each_rule = pytest.mark.parametrize(
    ("bits", "method"),
    [slow_unless(rule in DEFAULT, *rule) for rule in itertools.product((4, 8), METHODS)],
)


@pytest.mark.parametrize("group_size", [None, 8])
@each_rule
def test_against_a_loop_over_channels(bits, method, group_size):
    w_EDF = weights()
    q = quantize(w_EDF, bits, method, group_size)
    C = group_size or w_EDF.shape[1]
    expected_EDF = np.zeros_like(w_EDF, np.float64)
    for e in range(2):
        for f in range(5):
            for start in range(0, 24, C):
                channel = (e, slice(start, start + C), f)
                expected_EDF[channel] = quantized_channel(
                    w_EDF[channel].astype(np.float64), bits, method
                )
    np.testing.assert_allclose(np.asarray(dequantize(q)), expected_EDF, rtol=1e-6, atol=1e-7)
    assert q.shape == w_EDF.shape
    assert q.scales_EFG.shape == (2, 5, 24 // C)
    assert (q.bits, q.group_size) == (bits, group_size)
    error_E = [
        np.linalg.norm(expected_EDF[e] - w_EDF[e]) / np.linalg.norm(w_EDF[e]) for e in range(2)
    ]
    np.testing.assert_allclose(np.asarray(quantization_error(w_EDF, q)), error_E, rtol=1e-4)
    native = dataclasses.replace(q.native())
    np.testing.assert_array_equal(np.asarray(dequantize(native)), np.asarray(dequantize(q)))


@pytest.mark.parametrize(
    ("D", "bits", "method", "error"),
    [
        # notes on inference kernels, section 2.4: relative error of normal weights
        (768, 4, "absmax", 0.139), (768, 4, "ft", 0.122), (768, 4, "mse", 0.107),
        (4096, 4, "absmax", 0.157), (4096, 4, "ft", 0.138), (4096, 4, "mse", 0.109),
        (768, 8, "absmax", 0.0077), (4096, 8, "absmax", 0.0086),
    ],
)  # fmt: skip
def test_error_of_normal_weights(D, bits, method, error):
    w_EDF = weights(E=1, D=D, F=256)
    (measured,) = np.asarray(quantization_error(w_EDF, quantize(w_EDF, bits, method)))
    assert measured == pytest.approx(error, rel=0.012)


def test_defaults_are_mse_with_4_bits_and_absmax_with_8():
    w_EDF = weights()
    for bits, method in ((4, "mse"), (8, "absmax")):
        default, named = quantize(w_EDF, bits), quantize(w_EDF, bits, method)
        np.testing.assert_array_equal(np.asarray(default.values), np.asarray(named.values))
        np.testing.assert_array_equal(
            np.asarray(default.scales_EFG), np.asarray(named.scales_EFG)
        )


@each_rule
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-37, 1e30, 3e38])
def test_channels_of_any_magnitude_are_finite(scale, bits, method):
    w_EDF = np.clip(weights() / 4, -1, 1)
    w_EDF[0, :, 1] *= np.float32(scale)
    q = quantize(w_EDF, bits, method)
    assert np.all(np.asarray(q.scales_EFG) > 0)
    back_EDF = np.asarray(dequantize(q))
    assert np.all(np.isfinite(back_EDF))
    error = np.abs(back_EDF[0, :, 1] - w_EDF[0, :, 1]).max()
    # Weights below what a scale can express are zero; others are as exact as any.
    assert error <= max(0.15 * np.abs(w_EDF[0, :, 1]).max(), 1e-35 if scale < 1e-36 else 0)
    assert np.all(np.isfinite(np.asarray(quantization_error(w_EDF, q))))


def test_an_expert_of_zeros_has_error_zero():
    q = quantize(np.zeros((1, 4, 2), np.float32), 4)
    assert np.asarray(quantization_error(np.zeros((1, 4, 2), np.float32), q)).tolist() == [0]


def test_weights_of_bfloat16_are_quantized_as_their_values():
    w_EDF = jnp.array(weights(), jnp.bfloat16)
    q, of_float32 = quantize(w_EDF, 4), quantize(w_EDF.astype(jnp.float32), 4)
    np.testing.assert_array_equal(np.asarray(q.values), np.asarray(of_float32.values))


def test_memory_is_that_of_one_expert():
    """Not of all experts, nor of all candidates at once."""
    spec = jax.ShapeDtypeStruct((16, 128, 256), jnp.float32)
    compiled = jax.jit(lambda w_EDF: quantize(w_EDF, 4)).lower(spec).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 4 * 128 * 256


@pytest.mark.parametrize(
    ("w_EDF", "options", "message"),
    [
        (np.zeros((1, 3, 2), np.float32), {"bits": 4}, "D=3; 4-bit values .* pad D to 4"),
        (np.zeros((1, 4, 2), np.float32), {"bits": 5}, "bits=5; use 8 or 4"),
        (np.zeros((1, 0, 2), np.float32), {"bits": 8}, "w_EDF has D=0; expected matrices with"),
        (np.zeros((1, 4, 2), np.float32), {"bits": 8, "group_size": 3}, "does not divide D=4"),
        (np.zeros((1, 4, 2), np.float32), {"bits": 8, "group_size": 0}, "does not divide D=4"),
        (np.zeros((1, 4, 2), np.float32), {"bits": 8, "method": "max"}, "use one of absmax"),
        (np.zeros((1, 4, 2), np.int8), {"bits": 8}, "expected floating point"),
        (np.zeros((4, 2), np.float32), {"bits": 8}, "expected floating point"),
        (np.full((1, 4, 2), np.nan, np.float32), {"bits": 8}, "expert 0 are NaN"),
        (np.array([[[1.0]], [[np.inf]]], np.float32), {"bits": 8}, "expert 1 are NaN"),
    ],
)
def test_what_cannot_be_quantized_is_refused(w_EDF, options, message):
    with pytest.raises(ValueError, match=message):
        quantize(w_EDF, **options)


def test_another_layout_is_refused():
    q = dataclasses.replace(quantize(weights(), 8), layout_version=0)
    with pytest.raises(ValueError, match="layout version 0"):
        dequantize(q)
    with pytest.raises(ValueError, match="layout version 0"):
        quantization_error(weights(), q)
    with pytest.raises(ValueError, match="expected one"):
        quantization_error(weights(D=4), quantize(weights(), 8))


def int4_tensor(E=2, D=6, F=3, group_size=None) -> QTensor:
    values_EFD = np.random.default_rng(0).integers(-8, 8, (E, F, D)).astype(np.int8)
    G = 1 if group_size is None else D // group_size
    return QTensor(
        pack_int4(jnp.array(values_EFD)), jnp.ones((E, F, G)), bits=4, group_size=group_size
    )


def test_even_elements_lie_in_low_nibbles():
    packed = pack_int4(jnp.array([[[1, 2, -1, -8]]], jnp.int8))
    assert np.asarray(packed).tolist() == [[[0x21, 0x8F]]]


def test_native_and_packed_are_each_others_inverse():
    every_pair = np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)), -1).reshape(1, 1, -1)
    q = QTensor(pack_int4(jnp.array(every_pair)), jnp.ones((1, 1, 1)), bits=4)
    native = q.native()
    assert native.values.dtype == jnp.int4
    assert native.shape == q.shape == (1, 512, 1)
    np.testing.assert_array_equal(np.asarray(native.values.astype(jnp.int8)), every_pair)
    np.testing.assert_array_equal(np.asarray(native.packed().values), np.asarray(q.values))
    assert q.native() is native  # converted once
    assert jax.tree.structure(q) == jax.tree.structure(dataclasses.replace(q))
    traced = jax.jit(lambda q: q.native().values.astype(jnp.int8))(dataclasses.replace(q))
    np.testing.assert_array_equal(np.asarray(traced), every_pair)


def test_bytes_are_those_of_a_device():
    q = int4_tensor(E=2, D=8, F=16)
    assert q.values_nbytes == q.native().values_nbytes == 2 * 8 * 16 // 2
    assert q.nbytes == q.native().nbytes == 2 * 8 * 16 // 2 + 2 * 16 * 4
    # XLA holds a native int4 in half a byte, whatever `.nbytes` of the array says.
    compiled = jax.jit(lambda q: q.values.astype(jnp.int8)).lower(q.native()).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == q.values_nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout_version": 2}, "layout version 2; this code reads version 1: quantize"),
        ({"bits": 3}, "bits=3; expected 8 or 4"),
        ({"bits": 8}, "bits=8 has values of uint8; expected int8 or float8_e4m3fn"),
        ({"scales_EFG": jnp.ones((2, 3))}, r"expected \[E, F, D\]"),
        ({"scales_EFG": jnp.ones((2, 3, 2))}, r"expected scales \(2, 3, 1\)"),
        ({"group_size": 2}, r"expected scales \(2, 3, 3\)"),
        ({"group_size": 4}, "group_size=4"),
        ({"scales_EFG": jnp.ones((2, 3, 1), jnp.bfloat16)}, "scales of bfloat16"),
    ],
)
@pytest.mark.parametrize("consumer", ["native", "packed"])
def test_a_qtensor_that_does_not_fit_is_refused(changes, message, consumer):
    q = dataclasses.replace(int4_tensor(), **changes)
    with pytest.raises(ValueError, match=message):
        getattr(q, consumer)()


def bits_of(array) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


def test_magic_numbers_convert_every_integer():
    every = np.arange(-128, 128, dtype=np.int8)
    want = every.astype(np.float16)
    np.testing.assert_array_equal(bits_of(int8_to_float16(jnp.array(every))), bits_of(want))
    every, want = every[120:136], want[120:136]
    native = jnp.array(every).astype(jnp.int4)
    np.testing.assert_array_equal(bits_of(int4_to_float16(native)), bits_of(want))
    nibbles = jnp.array(every.view(np.uint8) & 15, jnp.uint16)
    for dtype in (jnp.float16, jnp.bfloat16):
        np.testing.assert_array_equal(
            bits_of(nibbles_to_float(nibbles, dtype)), bits_of(every.astype(dtype))
        )


def codes_of(values) -> np.ndarray:
    return np.asarray(values).view(np.uint8)


# Of float8_e4m3fn: NaN, and a negative zero.
NOT_STORED = (0x7F, 0xFF, 0x80)


@pytest.mark.parametrize("group_size", [None, 8])
def test_float8_against_a_loop_over_channels(group_size):
    w_EDF = weights()
    w_EDF[0, :6, 0] = (0, -1e-9, 3e-6, -3e-6, 1e-4, -2e-4)  # zeros and subnormal values
    q = quantize(w_EDF, 8, group_size=group_size, dtype="float8_e4m3fn")
    q.check()
    values_EFD = np.asarray(q.values).astype(np.float32)
    C = group_size or 24
    for e, f, g in np.ndindex(2, 5, 24 // C):
        w_C = w_EDF[e, g * C : (g + 1) * C, f]
        scale = np.abs(w_C).max() / np.float32(448)
        expected_C = (w_C / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(values_EFD[e, f, g * C : (g + 1) * C], expected_C)
        assert np.asarray(q.scales_EFG)[e, f, g] == pytest.approx(scale, rel=1e-6)
    assert not np.isin(codes_of(q.values), NOT_STORED).any()
    if group_size is None:
        assert 0 < np.abs(values_EFD[0, 0, 3]) < 2**-6
    scales_EGF = np.swapaxes(np.repeat(q.scales_EFG, C, axis=2), 1, 2)
    expected_EDF = np.swapaxes(values_EFD, 1, 2) * scales_EGF
    np.testing.assert_allclose(np.asarray(dequantize(q)), expected_EDF, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-37, 1e-30, 1, 1e30, 3e38])
def test_float8_neither_overflows_nor_has_nan(scale):
    w_EDF = np.clip(weights() / 4, -1, 1)
    w_EDF[0, :, 1] *= np.float32(scale)
    q = quantize(w_EDF, 8, dtype=jnp.float8_e4m3fn)
    assert not np.isin(codes_of(q.values), NOT_STORED).any()
    largest_EF = np.abs(np.asarray(q.values).astype(np.float32)).max(axis=2)
    assert largest_EF[0, 1] == (448 if scale > 1e-35 else 0)
    assert (np.delete(largest_EF.ravel(), 1) == 448).all()
    assert np.all(np.isfinite(np.asarray(q.scales_EFG))) and np.all(np.asarray(q.scales_EFG))
    error = np.abs(np.asarray(dequantize(q)) - w_EDF)
    largest_EDF = np.abs(w_EDF).max(axis=1, keepdims=True)
    assert np.all(error <= np.maximum(np.abs(w_EDF) / 16, largest_EDF / 458752) * 1.001 + 6e-36)


@pytest.mark.parametrize(("D", "error"), [(768, 0.0265), (4096, 0.0265)])
def test_error_of_normal_weights_in_float8(D, error):
    w_EDF = weights(E=1, D=D, F=256)
    q = quantize(w_EDF, 8, dtype="float8_e4m3fn")
    assert float(quantization_error(w_EDF, q)[0]) == pytest.approx(error, rel=0.012)


def test_traced_nan_is_in_the_scale():
    w_EDF = weights()
    w_EDF[1, 3, 2] = np.nan
    q = jax.jit(lambda w_EDF: quantize(w_EDF, 8, dtype="float8_e4m3fn"))(w_EDF)
    assert not np.isin(codes_of(q.values), NOT_STORED).any()
    is_nan_EF = np.isnan(np.asarray(dequantize(q))).all(axis=1)
    assert np.argwhere(is_nan_EF).tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="expert 1 are NaN"):
        quantize(w_EDF, 8, dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 4, "dtype": "float8_e4m3fn"}, "'float8_e4m3fn' with bits=4; use int4"),
        ({"bits": 8, "dtype": "int4"}, "'int4' with bits=8; use int8 or float8_e4m3fn"),
        ({"bits": 8, "dtype": 8}, "'8' with bits=8; use int8 or float8_e4m3fn"),
        ({"bits": 8, "dtype": "float7"}, "'float7' with bits=8; use int8 or float8_e4m3fn"),
        ({"bits": 8, "dtype": "float8_e4m3fn", "method": "mse"}, "float8_e4m3fn; use 'absmax'"),
    ],
)
def test_dtypes_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(np.ones((1, 4, 2), np.float32), **options)


def test_float8_has_8_bits_and_no_zero_points():
    q = quantize(weights(), 8, dtype="float8_e4m3fn")
    assert q.packed() is q and q.native() is q and q.values_nbytes == q.values.nbytes
    with pytest.raises(ValueError, match="float8_e4m3fn; expected uint8 or int4"):
        dataclasses.replace(q, bits=4).check()
    with pytest.raises(ValueError, match="float8_e4m3fn values and zero points"):
        dataclasses.replace(q, zeros_EFG=jnp.zeros((2, 5, 1))).check()


@pytest.mark.parametrize("bits", [8, 4])
def test_fragments_have_channels_where_a_thread_reads_them(bits):
    q = quantize(jax.random.normal(jax.random.key(0), (2, 96, 8)), bits)
    fragments, n = q.fragments(), 16 // bits
    assert fragments.is_fragments and fragments.fragments() is fragments
    plain, ordered = (
        np.asarray(each.values.astype(jnp.int8)) for each in (q.native(), fragments)
    )
    for d in range(96):
        block, rest = divmod(d, 8 * n)
        i, t, h = rest // 8, rest % 8 // 2, rest % 2
        at = 8 * n * block + 2 * n * t + n * h + i
        np.testing.assert_array_equal(ordered[..., at], plain[..., d])
    np.testing.assert_array_equal(fragments.packed().values, q.values)
    np.testing.assert_array_equal(dequantize(fragments), dequantize(q))
    with pytest.raises(ValueError, match="no zero points: use native"):
        dataclasses.replace(fragments, zeros_EFG=q.scales_EFG).check()


@pytest.mark.parametrize("forms", [("fragments", "native"), ("packed", "fragments")])
def test_both_matrices_of_a_gated_unit_are_read_in_one_order(forms):
    keys = jax.random.split(jax.random.key(0), 3)
    w, w_gate = (quantize(jax.random.normal(key, (2, 64, 64)), 8) for key in keys[:2])
    x_RD, sizes_E = jax.random.normal(keys[2], (8, 64), jnp.bfloat16), jnp.array([5, 2])

    def product(implementation, w, w_gate, **options):
        return quantized_grouped_matmul(
            x_RD, w, sizes_E, w_gate=w_gate, implementation=implementation, **options
        ).astype(jnp.float32)

    given = [getattr(each, form)() for each, form in zip((w, w_gate), forms, strict=True)]
    got = jax.jit(functools.partial(product, "gpu", interpret=True))(*given)
    want = product("reference", w, w_gate)
    assert np.abs(got - want).max() < 1e-2 * np.abs(want).max()
