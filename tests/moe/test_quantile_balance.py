# SPDX-License-Identifier: Apache-2.0
"""Quantile balancing against sorted margins, a transport problem of scipy and split batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from switchx.moe import quantile_balance
from switchx.moe.load_evenness import max_violation
from switchx.moe.quantile_balance import BINS, bias_of_quantiles

margin_counts = jax.jit(quantile_balance.margin_counts, static_argnums=3)
margin_quantiles = jax.jit(quantile_balance.margin_quantiles, static_argnums=3)
bias_of_counts = jax.jit(quantile_balance.bias_of_counts, static_argnums=2)
G, T, E, S = 4, 50, 8, 2


def scores(seed=0, shape=(G, T, E)):
    rng = np.random.default_rng(seed)
    skewed = rng.normal(size=shape) + np.linspace(0, 2, shape[-1])
    return (1 / (1 + np.exp(-skewed))).astype(np.float32)


def margins(score_TE, bias_E):
    """(S+1)-th largest biased score less each score, by a loop over tokens."""
    rows = [sorted(score_E + bias_E)[-1 - S] - score_E for score_E in score_TE]
    return np.array(rows)


def test_the_histograms_quantile_is_the_sorted_one_within_a_bin():
    """Not of equal lengths, padded: padding is not counted."""
    score_GTE, rng = scores(), np.random.default_rng(1)
    is_token_GT = np.arange(T) < np.array([[50], [31], [7], [0]])
    bias_E = (rng.normal(size=E) * 0.2).astype(np.float32)
    counts_EW = margin_counts(score_GTE, jnp.asarray(bias_E), is_token_GT, S)
    assert counts_EW.sum(-1).tolist() == [88.0] * E
    margin_TE = np.sort(margins(score_GTE[is_token_GT], bias_E), axis=0)
    exact_E = margin_TE[int(np.ceil(88 * S / E)) - 1]
    got_E = bias_of_counts(counts_EW, jnp.asarray(bias_E), S)
    np.testing.assert_allclose(np.mean(got_E), 0, atol=1e-6)
    width = (np.ptp(bias_E) + 2) / BINS
    np.testing.assert_allclose(got_E - got_E[0], exact_E - exact_E[0], atol=2 * width)


def test_counts_of_parts_add_up_to_those_of_the_batch_and_none_changes_nothing():
    score_GTE, bias_E, is_token_GT = scores(), jnp.zeros(E), np.ones((G, T), bool)
    whole_EW = margin_counts(score_GTE, bias_E, is_token_GT, S)
    parts = [margin_counts(x, bias_E, is_token_GT[:1], S) for x in np.split(score_GTE, G)]
    np.testing.assert_array_equal(sum(parts), whole_EW)
    whole_E = margin_quantiles(score_GTE, bias_E, is_token_GT, S)
    parts = [margin_quantiles(x, bias_E, is_token_GT[:1], S) for x in np.split(score_GTE, G)]
    np.testing.assert_allclose(sum(parts), whole_E, rtol=1e-6)
    old_NE = jnp.arange(2.0 * E).reshape(2, E)
    nothing = jnp.zeros((2, E, BINS)), jnp.zeros((2, E))
    np.testing.assert_array_equal(bias_of_counts(nothing[0], old_NE, S), old_NE)
    np.testing.assert_array_equal(bias_of_quantiles(nothing[1], jnp.zeros(2), old_NE), old_NE)


def test_logits_take_each_groups_exact_quantile():
    rng = np.random.default_rng(2)
    logits_GTE, bias_E = rng.normal(size=(G, T, E)), rng.normal(size=E)
    lengths = [50, 31, 7, 0]
    is_token_GT = np.arange(T) < np.array(lengths)[:, None]
    got_E = margin_quantiles(
        jnp.asarray(logits_GTE, jnp.float32), jnp.asarray(bias_E), is_token_GT, S
    )
    want_E = np.zeros(E)
    for g, n in enumerate(lengths[:3]):
        # As published: beta is the (q+1)-th largest of what the score has over alpha.
        over_TE = -margins(logits_GTE[g, :n], bias_E)
        want_E -= n * np.sort(over_TE, axis=0)[::-1][n * S // E]
    np.testing.assert_allclose(got_E, want_E, rtol=1e-5)
    bias = bias_of_quantiles(got_E, jnp.asarray(88.0), jnp.zeros(E))
    np.testing.assert_allclose(bias, want_E / 88 - want_E.mean() / 88, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", ["quantile", "quantile_logits"])
def test_repeated_on_one_batch_it_solves_the_transport_problem(rule):
    """The largest sum of scores with S experts a token and even loads."""
    tokens, cost = 64, scores(3, (1, 64, E))
    rows = np.kron(np.eye(tokens), np.ones(E)), np.kron(np.ones(tokens), np.eye(E))
    best = scipy.optimize.linprog(
        -cost.ravel(),
        A_eq=np.concatenate(rows),
        b_eq=[S] * tokens + [tokens * S / E] * E,
        bounds=(0, 1),
    )
    bias_E, is_token_GT, found = jnp.zeros(E), np.ones((1, tokens), bool), []
    for _ in range(20):
        biased_TE = cost[0] + np.asarray(bias_E)
        chosen_TS = np.argsort(-biased_TE, axis=-1)[:, :S]
        violation = max_violation(np.bincount(chosen_TS.ravel(), minlength=E))
        # The dual problem's value, of which the bias is the variable.
        bound = np.take_along_axis(biased_TE, chosen_TS, -1).sum()
        found.append((float(violation), float(bound - np.sum(bias_E) * tokens * S / E)))
        if rule == "quantile":
            counts_EW = margin_counts(cost, bias_E, is_token_GT, S)
            bias_E = bias_of_counts(counts_EW, bias_E, S)
        else:
            sums_E = margin_quantiles(cost, bias_E, is_token_GT, S)
            bias_E = bias_of_quantiles(sums_E, jnp.asarray(float(tokens)), bias_E)
    assert found[0][0] > 1
    violation, bound = min(found)
    assert violation <= 1 / (tokens * S / E)  # one token
    assert 0 <= bound / -best.fun - 1 < 5e-4
