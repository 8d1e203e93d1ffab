# SPDX-License-Identifier: Apache-2.0
"""Batch-prioritized order against a loop over the sorted tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from switchx.models.config import RouterConfig
from switchx.moe.plan import by_gate, make_plan
from tests.moe.oracle import softmax

G, T, E, C = 2, 20, 4, 4


def test_what_is_placed_comes_back_in_the_old_order():
    gate_GT = jnp.array([[0.2, 0.9, 0.2, 0.5]])
    seen = []

    def place(expert_GTS):
        seen.append(expert_GTS[0, :, 0].tolist())
        return expert_GTS * 10, jnp.arange(4)[None]

    tens_GTS, place_GT = by_gate(gate_GT, place)(jnp.arange(4)[None, :, None])
    assert seen == [[1, 3, 0, 2]]  # ties keep their order
    assert tens_GTS[0, :, 0].tolist() == [0, 10, 20, 30]
    assert place_GT[0].tolist() == [2, 0, 3, 1]


def test_top2_slots_go_to_the_surest_tokens_as_in_a_loop():
    rng = np.random.default_rng(0)
    logits_GTE = (rng.normal(size=(G, T, E)) * 2).astype(np.float32)
    prob_GTE = softmax(logits_GTE.astype(np.float64)).astype(np.float32)
    is_token_GT = rng.random((G, T)) < 0.8
    router = RouterConfig(num_selected=2, priority="gate")
    plan = jax.jit(lambda *arrays: make_plan(router, *arrays, C))(
        logits_GTE, prob_GTE, is_token_GT
    )
    plan = jax.device_get(plan)
    differs = 0
    for g in range(G):
        queue = [0] * E
        tokens = sorted(np.flatnonzero(is_token_GT[g]), key=lambda t, g=g: -max(prob_GTE[g, t]))
        differs += tokens != sorted(tokens)
        for s in range(2):
            for t in tokens:
                e = np.argsort(-prob_GTE[g, t])[s]
                assert plan.expert_GTS[g, t, s] == e
                assert plan.slot_GTS[g, t, s] == queue[e]
                assert plan.gate_GTS[g, t, s] == prob_GTE[g, t, e]
                queue[e] += 1
        assert plan.count_GE[g].tolist() == queue
        assert not np.any(plan.is_routed_GTS[g][~is_token_GT[g]])
    assert differs == G and not np.all(plan.is_kept_GTS[is_token_GT])
