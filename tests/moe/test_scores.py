# SPDX-License-Identifier: Apache-2.0
"""Scores, expert groups, gates and losses of routers of 2024 to 2026, against NumPy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import SwitchConfig
from switchx.moe.balance_loss import count_sequences
from switchx.moe.config import RouterConfig
from switchx.moe.router import normalized_scores, router_scores
from switchx.moe.routing_plan import make_plan, rank_experts
from switchx.moe.stats import measure_routing
from tests.jaxprs import equations
from tests.moe.oracle import softmax

G, T, E = 2, 12, 8

SCORES = {
    "softmax": softmax,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "sqrt_softplus": lambda z: np.sqrt(np.logaddexp(0, z)),
}


def deepseek_token(score_E, bias_E, groups: int, groups_per_token: int, k: int):
    """Experts of one token by a loop over groups and experts, the best first."""
    biased, size, sums = list(score_E + bias_E), len(score_E) // groups, []
    for h in range(groups):
        sums.append(sum(sorted(biased[h * size : (h + 1) * size])[-2:]))
    best = sorted(range(groups), key=lambda h: -sums[h])[:groups_per_token]
    allowed = [e for e in range(len(biased)) if e // size in best]
    return sorted(allowed, key=lambda e: -biased[e])[:k]


@pytest.mark.parametrize("score", SCORES)
def test_scores_and_their_slopes_far_from_zero(score):
    """Where softplus underflows its root would have a slope of infinity times 0."""
    z_E = np.array([-200.0, -80.0, -20.01, -19.99, -3.0, 0.0, 4.0, 60.0])
    weight_E, step = np.arange(1.0, 9.0), 1e-6
    got_E = router_scores(score, jnp.asarray(z_E, jnp.float32))
    np.testing.assert_allclose(got_E, SCORES[score](z_E), rtol=2e-6, atol=1e-35)
    slope_E = jax.grad(lambda z_E: jnp.sum(router_scores(score, z_E) * weight_E))(
        jnp.asarray(z_E, jnp.float32)
    )
    moved_EE = np.stack([SCORES[score](z_E + s * step * np.eye(8)) for s in (1, -1)])
    want_E = (moved_EE[0] - moved_EE[1]) @ weight_E / (2 * step)
    np.testing.assert_allclose(slope_E, want_E, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(normalized_scores(score, got_E).sum(), 1, rtol=1e-6)


ROUTERS = {
    "softmax": RouterConfig(num_selected=3, bias_update_rate=0.1),
    "deepseek": RouterConfig(
        num_selected=3, score="sigmoid", gate="normalized", gate_scale=2.5,
        num_expert_groups=4, expert_groups_per_token=2, bias_update_rate=0.1,
    ),
    "softplus": RouterConfig(
        num_selected=3, score="sqrt_softplus", gate="score", bias_update_rate=0.1
    ),
    "logits": RouterConfig(
        num_selected=3, score="sigmoid", gate="normalized", bias_rule="quantile_logits",
        bias_update_rate=1.0,
    ),
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def plan_of(router, logits_GTE, bias_E):
    score_GTE, is_token_GT = router_scores(router.score, logits_GTE), jnp.ones((G, T), bool)
    ranked = rank_experts(logits_GTE, score_GTE, bias_E, SwitchConfig(E, router=router))
    return make_plan(router, logits_GTE, score_GTE, is_token_GT, T, bias_E=bias_E), *ranked


# A mean far below zero: experts that are masked by a score of 0, not -inf, would win.
@pytest.mark.parametrize("mean", [0.0, -3.0], ids=["", "negative_bias"])
@pytest.mark.parametrize("name", ROUTERS)
def test_choices_are_by_biased_scores_and_gates_are_not(name, mean):
    router, rng = ROUTERS[name], np.random.default_rng(3)
    logits_GTE, bias_E = rng.normal(size=(G, T, E)), rng.normal(size=E) * 0.4 + mean
    plan, rank_GTR, prob_GTR, _ = plan_of(
        router, logits_GTE.astype(np.float32), jnp.asarray(bias_E, jnp.float32)
    )
    groups, per_token = router.num_expert_groups, router.expert_groups_per_token
    is_by_logits, changed = router.bias_rule == "quantile_logits", 0
    for g, t in np.ndindex(G, T):
        score_E = SCORES[router.score](logits_GTE[g, t])
        base_E = logits_GTE[g, t] if is_by_logits else score_E
        chosen = deepseek_token(base_E, bias_E, groups, per_token, 3)
        assert plan.expert_GTS[g, t].tolist() == rank_GTR[g, t].tolist() == chosen
        assert len({e // (E // groups) for e in chosen}) <= per_token or groups == 1
        total = score_E[chosen].sum() if router.gate == "normalized" else 1.0
        want_S = router.gate_scale * score_E[chosen] / total
        np.testing.assert_allclose(plan.gate_GTS[g, t], want_S, rtol=2e-6)
        shown_E = score_E if router.gate == "score" else score_E / score_E.sum()
        np.testing.assert_allclose(prob_GTR[g, t], shown_E[chosen], rtol=2e-6)
        changed += chosen != deepseek_token(base_E, 0 * bias_E, groups, per_token, 3)
    assert changed > 5


def test_a_bias_is_added_in_float32_whatever_the_routers_dtype():
    """In bfloat16 biases around 7 would be equal: 8 of 238 stay apart in a published model."""
    router = RouterConfig(score="sigmoid", gate="score", bias_update_rate=0.1)
    logits_GTE = jnp.zeros((G, T, E), jnp.bfloat16)
    bias_E = 7 + 0.001 * jnp.arange(E, dtype=jnp.float32)
    plan, *_ = plan_of(router, logits_GTE, bias_E)
    assert np.all(plan.expert_GTS == E - 1)


def test_groups_that_are_all_allowed_limit_nothing():
    logits_GTE = np.random.default_rng(0).normal(size=(G, T, E)).astype(np.float32)
    grouped = RouterConfig(num_selected=3, num_expert_groups=4, expert_groups_per_token=4)
    plain = RouterConfig(num_selected=3)
    of_all, of_plain = (plan_of(router, logits_GTE, None) for router in (grouped, plain))
    jax.tree.map(np.testing.assert_array_equal, of_all, of_plain)


SEQUENCES = RouterConfig(
    num_selected=2, score="sigmoid", gate="normalized", bias_update_rate=0.1,
    balance_scope="sequence", balance_counts="unbiased",
)  # fmt: skip


def test_the_loss_by_sequence_equals_a_loop_and_counts_unbiased_choices():
    """Three rows of packed sequences in two routing groups; what is 0 is padding."""
    segment_BL = np.array([[1] * 3 + [2] * 5, [1] * 8, [1, 1, 2, 2, 2, 3, 0, 0]])
    rng = np.random.default_rng(1)
    z_BLE, bias_E = rng.normal(size=(3, 8, E)), rng.normal(size=E) * 2
    is_token_GT = jnp.asarray(segment_BL > 0).reshape(2, 12)

    def loss(logits_BLE):
        logits_GTE = logits_BLE.reshape(2, 12, E)
        score_GTE = router_scores("sigmoid", logits_GTE)
        plan = make_plan(SEQUENCES, logits_GTE, score_GTE, is_token_GT, 12, bias_E=bias_E)
        stats = measure_routing(
            logits_GTE, normalized_scores("sigmoid", score_GTE), plan, is_token_GT, SEQUENCES,
            segment_BL=jnp.asarray(segment_BL),
        )  # fmt: skip
        return stats.balance, stats.groups

    def loop(z_BLE):
        total, number = 0.0, 0
        for b, row in enumerate(segment_BL):
            for s in sorted(set(row) - {0}):
                prob_TE = SCORES["sigmoid"](z_BLE[b, row == s])
                count_E = np.zeros(E)
                for prob_E in prob_TE:
                    count_E[np.argsort(-prob_E)[:2]] += 1
                mean_E = (prob_TE / prob_TE.sum(-1, keepdims=True)).mean(0)
                total += E * count_E / count_E.sum() @ mean_E
                number += 1
        return total, number

    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (got, groups), slope = compute(jnp.asarray(z_BLE))
    want, number = loop(z_BLE)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert groups == number == 6
    direction, step = rng.normal(size=z_BLE.shape), 1e-6
    moved = (loop(z_BLE + step * direction)[0] - loop(z_BLE - step * direction)[0]) / (2 * step)
    np.testing.assert_allclose(np.sum(slope * direction), moved, rtol=1e-4)
    program = jax.make_jaxpr(count_sequences)(jnp.ones((1, 64), jnp.int32))
    largest = max(v.aval.size for each in equations(program.jaxpr) for v in each.outvars)
    assert largest < 64 * 4  # no mask [L, L]


@pytest.mark.hf
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("mean", [3.0, -3.0])
def test_transformers_gates_choose_and_weigh_alike(family, mean):
    import importlib

    torch = pytest.importorskip("torch")
    prefix = {"deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe"}[family]
    name = f"transformers.models.{family}"
    module = importlib.import_module(f"{name}.modeling_{family}")
    if not hasattr(module, f"{prefix}TopkRouter"):
        pytest.skip("this transformers has no such class")
    config = getattr(
        importlib.import_module(f"{name}.configuration_{family}"), f"{prefix}Config"
    )
    gate = getattr(module, f"{prefix}TopkRouter")(
        config(
            hidden_size=16, n_routed_experts=E, num_local_experts=E, num_experts_per_tok=3,
            n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    rng = np.random.default_rng(5)
    x_TD, w_ED = rng.normal(size=(G * T, 16)), rng.normal(size=(E, 16))
    bias_E = (rng.normal(size=E) * 0.4 + mean).astype(np.float32)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor(w_ED))
        gate.e_score_correction_bias.copy_(torch.tensor(bias_E))
        logits_TE, gate_TS, expert_TS = gate(torch.tensor(x_TD, dtype=torch.float32))
    logits_GTE = logits_TE.numpy().reshape(G, T, E)
    plan, *_ = plan_of(ROUTERS["deepseek"], logits_GTE, jnp.asarray(bias_E))
    order_TS = np.argsort(expert_TS.numpy(), axis=-1)
    ours_TS = np.argsort(plan.expert_GTS.reshape(-1, 3), axis=-1)
    for got, want in ((plan.expert_GTS, expert_TS), (plan.gate_GTS, gate_TS)):
        np.testing.assert_allclose(
            np.take_along_axis(np.asarray(got).reshape(-1, 3), ours_TS, -1),
            np.take_along_axis(want.numpy(), order_TS, -1),
            rtol=1e-6,
        )
