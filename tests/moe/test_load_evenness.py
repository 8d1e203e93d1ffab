# SPDX-License-Identifier: Apache-2.0
"""Evenness of loads by hand, and the drops of random routers against their law."""

import math

import jax
import numpy as np
import pytest
import scipy.stats

from switchx.models.config import RouterConfig
from switchx.moe.load_evenness import (
    dead_experts,
    even_shares,
    expected_drops,
    load_entropy,
    max_violation,
)
from switchx.moe.routing_plan import make_plan
from switchx.moe.stats import measure_routing


def test_even_shares_by_hand():
    got = even_shares(np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]]))
    np.testing.assert_allclose(got, [[1, 1, 1, 1], [2, 2, 0, 0]])


@pytest.mark.parametrize(("share", "is_dead"), [(0.0, True), (0.0024, True), (0.0026, False)])
def test_an_expert_is_dead_below_a_hundredth_of_its_even_share(share, is_dead):
    rest = (1 - share) / 3
    # An even share of four experts is 0.25, a hundredth of it 0.0025.
    got = dead_experts(np.array([share, rest, rest, rest]))
    assert got.tolist() == [is_dead, False, False, False]


def test_experts_of_a_layer_without_tokens_are_all_dead():
    assert dead_experts(np.zeros((1, 3))).all()


def test_max_violation_by_hand():
    load = np.array([[2, 2, 2, 2], [6, 2, 0, 0], [8, 0, 0, 0], [0, 0, 0, 0]])
    assert max_violation(load).tolist() == [0, 2, 3, 0]
    assert max_violation(load / 8).tolist() == [0, 2, 3, 0]  # shares say the same


def test_entropy_of_a_load_counts_the_experts_that_share_it():
    load = np.array([[5, 5, 5, 5], [7, 7, 0, 0], [9, 0, 0, 0], [0, 0, 0, 0]])
    assert np.exp(load_entropy(load)) == pytest.approx([4, 2, 1, 1])


def test_tasks_are_looked_at_alone_by_a_loop():
    """Three tasks of two experts: rows of a task say nothing of its router."""
    loads = np.array([[5, 5, 1, 1, 9, 9], [6, 2, 0, 0, 8, 0], [0, 0, 3, 3, 0, 0], [0] * 6])
    for load in loads:
        violation, dead, entropy = 0.0, [], 0.0
        for pair in load.reshape(3, 2):
            share = pair / max(pair.sum(), 1)
            violation = max(violation, 2 * share.max() - 1)
            dead += [bool(pair.any() and p < 0.005) for p in share]
            own = -sum(p * np.log(p) for p in share if p)
            entropy += own * pair.sum() / max(load.sum(), 1)
        assert max_violation(load, 3) == pytest.approx(violation)
        assert dead_experts(load, 3).tolist() == dead
        assert load_entropy(load, 3) == pytest.approx(entropy)


def simulated_drops(groups: int, tokens: int, selected: int, experts: int, capacity: int):
    """Drops of each group where every token draws its experts by itself, all sets alike."""
    rng = np.random.default_rng(0)
    score_GTE = rng.random((groups, tokens, experts))
    chosen_GTS = np.argsort(score_GTE, axis=-1)[..., :selected]
    count_GE = np.array([np.bincount(each.ravel(), minlength=experts) for each in chosen_GTS])
    return np.maximum(count_GE - capacity, 0).sum(axis=-1)


# Few experts and two choices: far from Poisson's law.
@pytest.mark.parametrize(
    ("tokens", "selected", "experts", "capacity"),
    [(128, 1, 8, 16), (96, 2, 4, 48), (60, 2, 16, 10), (40, 1, 32, 1), (7, 3, 3, 5)],
)
def test_drops_of_a_random_router_are_those_expected(tokens, selected, experts, capacity):
    drops_G = simulated_drops(1_000, tokens, selected, experts, capacity)
    want = expected_drops(tokens, selected, experts, capacity)
    sigma = drops_G.std() / math.sqrt(len(drops_G))
    assert want > 0 and abs(drops_G.mean() - want) <= 4 * sigma + 1e-9 * want


def test_many_experts_drop_by_poissons_law():
    experts, per_expert = 4_096, 64
    counts = np.arange(per_expert, 400)
    excess = (counts - per_expert) @ scipy.stats.poisson.pmf(counts, per_expert)
    got = expected_drops(experts * per_expert, 1, experts, per_expert) / experts
    assert got == pytest.approx(excess, rel=2e-4)
    assert got / per_expert == pytest.approx(1 / math.sqrt(2 * math.pi * per_expert), rel=2e-3)


def test_drops_by_the_number_of_tokens_begin_where_slots_end():
    drops_T = expected_drops(np.arange(6), 1, 2, 3)
    # 4 tokens: 4 of one expert in 2 of 16 cases; 5: one too many in 10 of 32, two in 2.
    assert drops_T == pytest.approx([0, 0, 0, 0, 2 / 16, 14 / 32])


def test_a_random_routers_own_statistics_say_what_it_drops():
    """Through the router: groups with padding, two choices, capacity 1."""
    G, T, E, C = 64, 64, 8, 16
    rng = np.random.default_rng(1)
    logits_GTE = rng.normal(size=(G, T, E)).astype(np.float32)
    is_token_GT = np.arange(T) < rng.integers(T // 2, T + 1, size=(G, 1))
    router = RouterConfig(num_selected=2, exploration="none")

    @jax.jit
    def measure(logits_GTE):
        prob_GTE = jax.nn.softmax(logits_GTE, axis=-1)
        plan = make_plan(router, logits_GTE, prob_GTE, is_token_GT, C)
        return measure_routing(logits_GTE, prob_GTE, plan, is_token_GT, router)

    stats = measure(logits_GTE)
    want_G = expected_drops(is_token_GT.sum(axis=1), 2, E, C)
    assert float(stats.expected_dropped) == pytest.approx(want_G.sum(), rel=1e-5)
    # The variance of a group's drops, by simulation of full groups, which have the most.
    sigma = simulated_drops(500, T, 2, E, C).std() * math.sqrt(G)
    assert abs(float(stats.dropped) - want_G.sum()) <= 4 * sigma
    assert want_G.sum() > 8 * sigma  # a router that dropped nothing would be seen
