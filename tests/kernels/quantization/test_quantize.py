# SPDX-License-Identifier: Apache-2.0
"""Quantization against loops over channels, and against errors published for normal weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantization.quantize import (
    CLIP_RATIOS,
    METHODS,
    dequantize,
    quantization_error,
    quantize,
)


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


@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [4, 8])
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [4, 8])
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
