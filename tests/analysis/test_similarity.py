# SPDX-License-Identifier: Apache-2.0
"""Likeness of layers: what is known in closed form."""

import math

import numpy as np

from switchx.analysis.routing import layer_similarity

E = 4


def test_renamed_experts_are_the_same_layer_and_independent_ones_share_nothing():
    # All 16 pairs of experts once: the second layer is independent of the first.
    first_T = np.repeat(np.arange(E), E)
    second_T = np.tile(np.arange(E), E)
    renamed_T = np.array([2, 3, 1, 0])[first_T]
    got = layer_similarity(np.stack([first_T, renamed_T, second_T])[..., None], E)
    np.testing.assert_allclose(got, [[1, 1, 0], [1, 1, 0], [0, 0, 1]], atol=1e-12)


def test_information_of_two_layers_by_hand():
    # Layer a halves what layer b tells apart in four: I = H(a) = ln 2, H(b) = ln 4.
    b_T = np.arange(8) % 4
    got = layer_similarity(np.stack([b_T // 2, b_T])[..., None], E)
    assert math.isclose(got[0, 1], math.log(2) / math.sqrt(math.log(2) * math.log(4)))


def test_tokens_without_an_expert_and_further_choices_do_not_count():
    first_TS = np.array([[0, 3], [1, 3], [E, 3], [0, 2]])
    second_TS = np.array([[1, 0], [0, 0], [0, 0], [1, 0]])
    got = layer_similarity(np.stack([first_TS, second_TS]), E)
    np.testing.assert_allclose(got, np.ones((2, 2)))


def test_a_layer_with_one_expert_tells_nothing():
    got = layer_similarity(np.stack([np.zeros(6, int), np.arange(6) % E])[..., None], E)
    np.testing.assert_allclose(got, [[0, 0], [0, 1]])
