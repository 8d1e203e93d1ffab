# SPDX-License-Identifier: Apache-2.0
"""Rotations against complex numbers, grouped heads against repeated ones, in NumPy."""

import cmath
import math

import jax.numpy as jnp
import numpy as np
import pytest

from switchx.layers.attention import KeysValues, attend
from switchx.layers.positions import Rotation
from switchx.layers.rotary import RotaryConfig
from tests.data.refusals import refused

RNG = np.random.default_rng(0)
POSITIONS = np.array([[0, 1, 7], [3, 40, 2]])


@pytest.mark.parametrize(("fraction", "K"), [(1.0, 4), (0.5, 12)])
def test_pairs_of_features_are_complex_numbers_that_turn(fraction, K):
    """Feature i and i + r / 2 are real and imaginary part; the others stay as they are."""
    x_BLHK = RNG.normal(size=(2, 3, 2, K)).astype(np.float32)
    rotary, half = RotaryConfig(theta=100.0, fraction=fraction), int(K * fraction) // 2
    got_BLHK = Rotation.of(rotary, K, jnp.asarray(POSITIONS))(jnp.asarray(x_BLHK))
    want_BLHK = x_BLHK.copy()
    for b, n, h, i in np.ndindex(2, 3, 2, half):
        number = complex(x_BLHK[b, n, h, i], x_BLHK[b, n, h, i + half])
        turned = number * cmath.exp(1j * POSITIONS[b, n] * 100.0 ** (-i / half))
        want_BLHK[b, n, h, [i, i + half]] = turned.real, turned.imag
    np.testing.assert_allclose(got_BLHK, want_BLHK, atol=3e-6)


def test_scaled_queries_and_keys_have_the_magnitude_of_yarn():
    yarn = RotaryConfig(scaling="yarn", factor=4.0, original_length=8)
    rotation = Rotation.of(yarn, 8, jnp.asarray(POSITIONS))
    norm_BLK = np.hypot(rotation.cos_BLK, rotation.sin_BLK)
    np.testing.assert_allclose(norm_BLK, 0.1 * np.log(4) + 1, rtol=1e-6)
    # Pairs that turn 32 times and more within the length stay, slow ones are divided by 4.
    plain_K, scaled_K = (each.frequencies(128) for each in (RotaryConfig(), yarn))
    assert scaled_K[-1] == pytest.approx(plain_K[-1] / 4)
    long = RotaryConfig(scaling="yarn", factor=4.0, original_length=4096).frequencies(128)
    assert long[0] == plain_K[0]


@pytest.mark.parametrize("Z", [1, 2])
def test_grouped_heads_are_repeated_ones(Z):
    B, L, M, H, K = 2, 3, 5, 4, 6
    query_BLHK, key_BZKM, value_BZMK, bias_HLM = (
        RNG.normal(size=shape).astype(np.float32)
        for shape in ((B, L, H, K), (B, Z, K, M), (B, Z, M, K), (H, L, M))
    )
    mask_BLM = RNG.random((B, L, M)) < 0.7
    mask_BLM[:, :, 0] = True
    got_BHLK = attend(
        jnp.asarray(query_BLHK),
        KeysValues(jnp.asarray(key_BZKM), jnp.asarray(value_BZMK)),
        bias_HLM=jnp.asarray(bias_HLM),
        mask_BLM=jnp.asarray(mask_BLM),
    )
    for b, h, i in np.ndindex(B, H, L):
        z = h // (H // Z)
        score_M = query_BLHK[b, i, h] @ key_BZKM[b, z] + bias_HLM[h, i]
        weight_M = np.exp(score_M) * mask_BLM[b, i]
        want_K = (weight_M / weight_M.sum()) @ value_BZMK[b, z]
        np.testing.assert_allclose(got_BHLK[b, h, i], want_K, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(theta=1.0), "RotaryConfig.theta=1.0"),
        (dict(fraction=0.0), "fraction=0.0; use theta above 1 and 0 < fraction <= 1"),
        (dict(factor=2.0), "RotaryConfig.factor=2.0 with scaling='none'; name a scaling"),
        (dict(scaling="llama3", factor=8.0), "scaling='llama3' needs original_length"),
        (dict(scaling="ntk"), "RotaryConfig.scaling='ntk' is unknown"),
        (dict(low_frequency=4.0), "use low_frequency < high_frequency"),
        (dict(beta_fast=math.inf), "RotaryConfig.beta_fast=inf; use a number above 0"),
    ],
)
def test_frequencies_that_cannot_be_are_refused(changes, message):
    with refused(message):
        RotaryConfig(**changes)
