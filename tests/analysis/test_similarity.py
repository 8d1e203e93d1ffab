# SPDX-License-Identifier: Apache-2.0
"""Likeness of layers and experts: what is known in closed form, and loops."""

import math

import numpy as np

from switchx.analysis.routing import expert_similarity, layer_similarity

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


def test_expert_similarity_equals_cosines_in_a_loop():
    rng = np.random.default_rng(0)
    token_T, expert_TS = rng.integers(0, 6, 50), rng.integers(0, E, (50, 2))
    expert_TS[expert_TS == 3] = E  # expert 3 gets nothing
    counts = np.zeros((E, 6))
    for t, experts in enumerate(expert_TS):
        for e in experts:
            if e < E:
                counts[e, token_T[t]] += 1
    got = expert_similarity(expert_TS, token_T, E)
    for a in range(3):
        for b in range(3):
            norm = math.sqrt(sum(counts[a] ** 2) * sum(counts[b] ** 2))
            assert math.isclose(got[a, b], sum(counts[a] * counts[b]) / norm)
    assert not got[3].any() and not got[:, 3].any()


def test_experts_of_other_tokens_are_unlike():
    token_T, expert_TS = np.array([5, 5, 6, 7]), np.array([0, 0, 1, 2])[:, None]
    np.testing.assert_allclose(expert_similarity(expert_TS, token_T, 3), np.eye(3))
