# SPDX-License-Identifier: Apache-2.0
"""What a Switch layer owns and plans under each policy, against loops over the whole layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.moe.layer import SwitchFFN
from switchx.moe.router import hash_expert
from tests.layers.weights import numbers_for, with_params
from tests.moe.oracle import softmax

B, L, D, F, E = 2, 10, 6, 8, 4


def make(router, **changes):
    """A layer with two groups of ten tokens, and its numbers."""
    fields = dict(capacity_factor=1.0, min_capacity=1, group_size=10, stacks="encoder")
    fields |= changes
    switch = SwitchConfig(E, router=router, **fields)
    config = ModelConfig(
        "encoder_decoder", 8, D, F, 2, 3, 2, 2, activation="relu", switch=switch
    )
    layer = abstract_layer(config)
    return layer, numbers_for(layer)


@functools.cache
def abstract_layer(config):
    return nnx.eval_shape(lambda: SwitchFFN(config, key=jax.random.key(0)))


def inputs():
    rng = np.random.default_rng(1)
    x_BLD = rng.normal(size=(B, L, D)).astype(np.float32)
    is_token_BL = np.ones((B, L), bool)
    is_token_BL[1, 7:] = False
    return x_BLD, is_token_BL, rng.integers(0, 1000, (B, L)).astype(np.int32)


def run(layer, params, *, is_training=True, key=None):
    return jax.device_get(compiled(layer.config, is_training)(params, key))


@functools.cache
def compiled(config, is_training: bool):
    layer = abstract_layer(config)
    return jax.jit(
        lambda params, key: with_params(layer, params)(
            *map(jnp.asarray, inputs()), is_training=is_training, key=key
        )
    )


def expert(params, e, x_D):
    hidden_F = np.maximum(x_D @ params["experts"]["w_in_EDF"][e].astype(np.float64), 0)
    return hidden_F @ params["experts"]["w_out_EFD"][e]


def probabilities(params, x_BLD):
    return softmax(x_BLD.astype(np.float64) @ params["w_router_DE"])


def test_hash_sends_every_id_to_its_expert_ungated():
    layer, params = make(RouterConfig(kind="hash", exploration="none", overflow="dropless"))
    assert set(params) == {"experts"}
    y_BLD, stats = run(layer, params)
    x_BLD, is_token_BL, token_BL = inputs()
    want_BLD, expert_BL = np.zeros_like(x_BLD), np.asarray(hash_expert(token_BL, E))
    for b, t in np.argwhere(is_token_BL):
        want_BLD[b, t] = expert(params, expert_BL[b, t], x_BLD[b, t])
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-5)
    assert (stats.dropped, stats.entropy, stats.router_z_loss) == (0, 0, 0)
    assert stats.gate == stats.tokens


def test_merged_experts_count_as_those_that_they_stand_for():
    """p_e = exp(z_e) / sum_j m_j exp(z_j), and the largest logit is chosen."""
    layer, params = make(RouterConfig(counts_merged=True, overflow="dropless", jitter=0.0))
    count_E = np.array([1.0, 3.0, 2.0, 1.0])
    params["router_log_count_E"] = jnp.asarray(np.log(count_E), jnp.float32)
    y_BLD, stats = run(layer, params)
    x_BLD, is_token_BL, _ = inputs()
    want_BLD, gates, router_z = np.zeros_like(x_BLD), [], 0.0
    for b, t in np.argwhere(is_token_BL):
        z_E = x_BLD[b, t].astype(np.float64) @ params["w_router_DE"]
        gate_E = np.exp(z_E) / np.sum(count_E * np.exp(z_E))
        router_z += np.log(np.sum(count_E * np.exp(z_E))) ** 2
        e = np.argmax(z_E)
        want_BLD[b, t] = gate_E[e] * expert(params, e, x_BLD[b, t])
        gates.append(gate_E[e])
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stats.gate, np.sum(gates), rtol=1e-5)
    np.testing.assert_allclose(stats.router_z, router_z, rtol=1e-5)  # of the same softmax
    # What is measured is of shares of one, whatever the counts have in common.
    params["router_log_count_E"] += 1.0
    _, shifted = run(layer, params)
    for name in ("balance", "entropy"):
        np.testing.assert_allclose(getattr(shifted, name), getattr(stats, name), rtol=1e-5)
    params["w_router_DE"] = np.zeros((D, E), np.float32)
    _, even = run(layer, params)
    np.testing.assert_allclose(even.entropy, stats.tokens * np.log(E), rtol=1e-5)


def test_dropless_drops_nothing_when_all_tokens_want_one_expert():
    for router, dropped in ((RouterConfig(), True), (RouterConfig(overflow="dropless"), False)):
        layer, params = make(router)
        params["w_router_DE"] = np.zeros((D, E), np.float32)  # ties: all to expert 0
        y_BLD, stats = run(layer, params)
        assert (stats.dropped > 0) == dropped
        np.testing.assert_array_equal(stats.load_E, [17, 0, 0, 0])
        x_BLD, is_token_BL, _ = inputs()
        if not dropped:
            want_TD = [expert(params, 0, x_D) / E for x_D in x_BLD[is_token_BL]]
            np.testing.assert_allclose(y_BLD[is_token_BL], want_TD, rtol=1e-4, atol=1e-5)


def test_rerouting_reaches_the_output():
    drop, params = make(RouterConfig())
    spill, _ = make(RouterConfig(overflow="reroute", max_rounds=E))
    (y_drop, stats_drop), (y_spill, stats_spill) = run(drop, params), run(spill, params)
    assert stats_drop.dropped > 0 and stats_spill.dropped == 0
    is_dropped_BL = inputs()[1] & ~np.any(y_drop, axis=-1)
    assert is_dropped_BL.sum() == stats_drop.dropped
    assert np.all(np.any(np.asarray(y_spill)[is_dropped_BL], axis=-1))
    np.testing.assert_allclose(y_spill[~is_dropped_BL], y_drop[~is_dropped_BL], rtol=1e-5)


def test_padding_may_be_counted_for_parity():
    """As Hugging Face does: the router, the slots and the losses see it as tokens."""
    layer, params = make(RouterConfig(padding="counted"))
    y_BLD, stats = run(layer, params)
    assert stats.tokens == stats.load_E.sum() == B * L
    x_BLD, is_token_BL, _ = inputs()
    prob_BLE = probabilities(params, x_BLD)
    losses, capacity = [], 3
    for b in range(B):
        queue = [0] * E
        for t in range(L):
            e = int(np.argmax(prob_BLE[b, t]))
            is_kept = queue[e] < capacity
            want_D = prob_BLE[b, t, e] * expert(params, e, x_BLD[b, t]) * is_kept
            np.testing.assert_allclose(y_BLD[b, t], want_D, rtol=1e-4, atol=1e-5)
            queue[e] += 1
        losses.append(E * np.sum(np.array(queue) / L * prob_BLE[b].mean(0)))
    np.testing.assert_allclose(stats.balance_loss, np.mean(losses), rtol=1e-5)
    ignored = make(RouterConfig())[0]
    assert run(ignored, params)[1].tokens == is_token_BL.sum()


def test_padding_that_fills_the_last_group_is_never_counted():
    layer, params = make(RouterConfig(padding="counted"), group_size=7)  # 20 in 3 of 7
    assert run(layer, params)[1].tokens == B * L


@pytest.mark.parametrize("exploration", ["sample", "dropout"])  # jitter: test_layer.py
def test_exploration_is_for_training_with_a_key(exploration, key):
    router = RouterConfig(exploration=exploration, input_dropout_rate=0.5)
    layer, params = make(router, eval_capacity_factor=1.0)
    calm, _ = run(layer, params)
    np.testing.assert_array_equal(run(layer, params, is_training=False, key=key)[0], calm)
    noisy, _ = run(layer, params, key=key)
    assert np.abs(noisy - calm).max() > 1e-2


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
def test_the_bias_is_float32_whatever_the_parameters_are(params):
    """An update of 0.001 to a bias of 1 would be lost in bfloat16."""
    layer, _ = make(RouterConfig(bias_update_rate=0.001))
    config = dataclasses.replace(layer.config, precision=Precision(params=params))
    layer = nnx.eval_shape(lambda: SwitchFFN(config, key=jax.random.key(0)))
    assert layer.router_bias_E.get_value().dtype == jnp.float32
    assert layer.w_router_DE.get_value().dtype == params


def test_the_bias_moves_choices():
    layer, params = make(RouterConfig(bias_update_rate=0.001))
    params["router_bias_E"] = np.array([0, 0, 2, 0], np.float32)  # more than a probability
    assert run(layer, params)[1].load_E.tolist() == [0, 0, 17, 0]
