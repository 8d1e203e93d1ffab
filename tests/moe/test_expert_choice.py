# SPDX-License-Identifier: Apache-2.0
"""Expert choice against a loop over experts; the plan that dispatchers read of it."""

import jax
import jax.numpy as jnp
import numpy as np

from switchx.moe.plan import route_by_experts
from tests.moe.oracle import softmax

G, T, E, D = 2, 15, 4, 5


route = jax.jit(route_by_experts, static_argnums=2)


def inputs():
    rng = np.random.default_rng(0)
    prob_GTE = softmax(rng.normal(size=(G, T, E)) * 2).astype(np.float32)
    is_token_GT = np.ones((G, T), bool)
    is_token_GT[1, 3:] = False  # three tokens, fewer than an expert has slots
    return prob_GTE, is_token_GT


def test_every_expert_takes_its_best_tokens():
    prob_GTE, is_token_GT = inputs()
    C = 4
    plan = jax.device_get(route(*inputs(), C))
    assert (plan.num_experts, plan.capacity) == (E, C)
    taken_GTE = np.zeros((G, T, E), bool)
    for g in range(G):
        tokens = np.flatnonzero(is_token_GT[g])
        for e in range(E):
            best = sorted(tokens, key=lambda t, g=g, e=e: -prob_GTE[g, t, e])[:C]
            taken_GTE[g, best, e] = True
            for slot, t in enumerate(best):
                assert plan.expert_GTS[g, t, e] == e
                assert plan.slot_GTS[g, t, e] == slot
                assert plan.gate_GTS[g, t, e] == prob_GTE[g, t, e]
            assert plan.count_GE[g, e] == len(best) == min(C, len(tokens))
    np.testing.assert_array_equal(plan.is_kept_GTS, taken_GTE)
    assert not np.any(np.asarray(plan.gate_GTS)[~taken_GTE])
    # Tokens of several experts and of none; the latter are asked for in the plan, once.
    assert taken_GTE[is_token_GT].sum(-1).max() > 1
    is_left_GT = is_token_GT & ~taken_GTE.any(-1)
    assert is_left_GT.any()
    is_dropped_GTS = np.asarray(plan.is_routed_GTS & ~plan.is_kept_GTS)
    np.testing.assert_array_equal(is_dropped_GTS.sum(-1), is_left_GT)
    for g, t, s in np.argwhere(is_dropped_GTS):
        assert s == np.argmax(prob_GTE[g, t])


def test_the_gradient_of_a_gate_is_that_of_its_probability():
    prob_GTE, is_token_GT = map(jnp.asarray, inputs())
    weight_GTE = np.random.default_rng(2).normal(size=prob_GTE.shape)

    def loss(prob_GTE):
        return jnp.sum(route(prob_GTE, is_token_GT, 4).gate_GTS * weight_GTE)

    is_kept_GTE = route(prob_GTE, is_token_GT, 4).is_kept_GTS
    want_GTE = np.where(is_kept_GTE, weight_GTE, 0)
    np.testing.assert_allclose(jax.grad(loss)(prob_GTE), want_GTE, rtol=1e-6)
