# SPDX-License-Identifier: Apache-2.0
"""The Switch layer against a NumPy loop, and what must hold for any input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.moe.layer import SwitchFFN
from tests.cases import slow, slow_unless
from tests.compare import assert_slope
from tests.layers.weights import numbers_for, with_params
from tests.moe.oracle import softmax, switch_layer

B, L, D, F, E = 3, 20, 12, 16, 4


def make(dispatcher="gather", group_size=1000, factor=1.0, **changes):
    switch = SwitchConfig(
        E,
        capacity_factor=factor,
        min_capacity=1,
        group_size=group_size,
        dispatcher=dispatcher,
        **changes,
    )
    config = ModelConfig("decoder_only", 8, D, F, 2, 6, 2, activation="relu", switch=switch)
    return SwitchFFN(config, key=jax.random.key(0))


def weights():
    rng = np.random.default_rng(0)
    scales = {"w_router_DE": 0.7, "w_in_EDF": 0.3, "w_out_EFD": 0.3}
    shapes = {"w_router_DE": (D, E), "w_in_EDF": (E, D, F), "w_out_EFD": (E, F, D)}
    return {n: (rng.normal(size=shapes[n]) * scales[n]).astype(np.float32) for n in shapes}


def with_weights(layer, w):
    experts = {name: w[name] for name in ("w_in_EDF", "w_out_EFD")}
    return with_params(layer, {"w_router_DE": w["w_router_DE"], "experts": experts})


def inputs():
    rng = np.random.default_rng(1)
    x_BLD = rng.normal(size=(B, L, D)).astype(np.float32)
    is_token_BL = np.ones((B, L), bool)
    is_token_BL[1, 13:] = False
    return x_BLD, is_token_BL


@pytest.mark.parametrize(
    ("group_size", "factor"),
    [
        slow_unless((size, factor) in [(1000, 4.0), (17, 0.5)], size, factor)
        for size in (1000, 30, 17)
        for factor in (0.5, 1.0, 4.0)
    ],
)
def test_layer_equals_a_loop_over_tokens(group_size, factor):
    x_BLD, is_token_BL = inputs()
    layers = [
        with_weights(make(dispatcher, group_size, factor), weights())
        for dispatcher in ("gather", "einsum")
    ]
    both = jax.jit(
        lambda x_BLD: [layer(x_BLD, is_token_BL, is_training=True) for layer in layers]
    )(x_BLD)

    x_TD, is_token_T = x_BLD.reshape(-1, D), is_token_BL.reshape(-1)
    num_groups = -(-len(x_TD) // group_size)
    size = -(-len(x_TD) // num_groups)
    padding = num_groups * size - len(x_TD)
    x_TD = np.pad(x_TD, ((0, padding), (0, 0)))
    is_token_T = np.pad(is_token_T, (0, padding))
    y, kept, balance, load = [], 0, [], np.zeros(E)
    for g in range(num_groups):
        part = slice(g * size, (g + 1) * size)
        y_g, experts, _, kept_g, balance_g = switch_layer(
            x_TD[part], is_token_T[part], **weights(), factor=factor, minimum=1
        )
        y.append(y_g), balance.append(balance_g)
        kept += kept_g.sum()
        load += np.bincount(experts, minlength=E + 1)[:E]
    for y_BLD, stats in both:
        np.testing.assert_allclose(
            y_BLD.reshape(-1, D), np.concatenate(y)[: B * L], rtol=2e-5, atol=2e-6
        )
        np.testing.assert_allclose(stats.balance_loss, np.mean(balance), rtol=1e-5)
        np.testing.assert_array_equal(stats.load_E, load)
        assert float(stats.tokens) == is_token_BL.sum() == load.sum()
        assert float(stats.dropped) == is_token_BL.sum() - kept
        (choices,) = stats.choices
        logits_BLE = x_BLD @ weights()["w_router_DE"]
        want_BL = np.where(is_token_BL, logits_BLE.argmax(axis=-1), E)
        np.testing.assert_array_equal(choices.expert_BLS[..., 0], want_BL)
        prob_BL = softmax(logits_BLE).max(axis=-1)
        got_BL = np.asarray(choices.gate_BLS[..., 0])
        np.testing.assert_allclose(got_BL[is_token_BL], prob_BL[is_token_BL], rtol=1e-5)
        if factor == 0.5:
            assert float(stats.dropped) > 0


def test_gradients_equal_finite_differences():
    x_BLD, is_token_BL = inputs()
    target = np.random.default_rng(2).normal(size=x_BLD.shape)
    with jax.enable_x64(True):
        precision = Precision("float64", "float64", "float64", "float64")

        @jax.jit
        @jax.value_and_grad
        def loss(w_and_x):
            w, x_BLD = w_and_x
            layer = make("gather", 30)
            layer.config = dataclasses.replace(layer.config, precision=precision)
            y_BLD, _ = with_weights(layer, w)(x_BLD, jnp.asarray(is_token_BL), is_training=True)
            return jnp.sum(y_BLD * target)

        point = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (weights(), x_BLD))
        _, grads = loss(point)
        assert_slope(lambda point: loss(point)[0], point, grads, rtol=1e-6)


def test_jitter_reaches_the_router_in_training_only():
    x_BLD, is_token_BL = map(jnp.asarray, inputs())
    layer = with_weights(make(factor=4.0, router=RouterConfig(jitter=0.5)), weights())
    run = jax.jit(
        lambda key, is_training: layer(x_BLD, is_token_BL, is_training=is_training, key=key)[0],
        static_argnums=1,
    )
    calm = run(jax.random.key(0), False)
    np.testing.assert_array_equal(calm, run(jax.random.key(1), False))
    noisy = run(jax.random.key(0), True)
    # The experts see the unjittered input: a token that keeps its expert differs from the
    # calm output by its gate alone, one factor for all of its features.
    ratio_BLD = np.asarray(noisy)[0] / np.asarray(calm)[0]
    is_same_expert = np.ptp(ratio_BLD, axis=-1) < 1e-3
    assert is_same_expert.sum() >= 5
    assert not np.allclose(noisy, calm)


def test_the_router_is_float32_inside_bfloat16_layers():
    layer = with_weights(make(), weights())
    layer.config = dataclasses.replace(layer.config, precision=Precision(compute="bfloat16"))
    x_BLD, is_token_BL = map(jnp.asarray, inputs())
    program = jax.make_jaxpr(lambda x: layer(x, is_token_BL, is_training=False)[0])(
        x_BLD.astype(jnp.bfloat16)
    )
    text = str(program)
    assert f"f32[1,{B * L},{E}] = dot_general" in text  # the router's logits
    assert "bf16[4,30,16] = dot_general" in text  # the experts (C = 60 * 2.0 / 4)


def test_a_shared_expert_is_added_for_every_token():
    x_BLD, is_token_BL = map(jnp.asarray, inputs())
    alone = with_weights(make(factor=0.5), weights())
    layer = with_weights(make(factor=0.5, shared_d_ff=7), weights())
    shared = numbers_for(layer.shared_expert)
    assert shared["w_in_DF"].shape == (D, 7)
    layer = with_params(layer, {"shared_expert": shared})
    y_alone, stats = jax.jit(lambda x: alone(x, is_token_BL, is_training=True))(x_BLD)
    y_both, _ = jax.jit(lambda x: layer(x, is_token_BL, is_training=True))(x_BLD)
    want = np.maximum(np.asarray(x_BLD, np.float64) @ shared["w_in_DF"], 0) @ shared["w_out_FD"]
    np.testing.assert_allclose(y_both - y_alone, want, rtol=1e-3, atol=1e-4)
    assert stats.dropped > 0


def test_a_shared_expert_changes_no_other_weight():
    alone, layer = make(), make(shared_d_ff=7)
    np.testing.assert_array_equal(alone.w_router_DE[...], layer.w_router_DE[...])
    np.testing.assert_array_equal(alone.experts.w_in_EDF[...], layer.experts.w_in_EDF[...])


@pytest.mark.parametrize("dispatcher", ["dropless", slow("gather")])
def test_a_token_without_a_slot_may_keep_its_input(dispatcher):
    """As transformers 4.30 has it: hidden states are cloned, those with a slot replaced by
    their expert's output, and all multiplied by the router's probability."""
    router = RouterConfig(overflow="identity", padding="counted")
    w, capacity = weights(), 3
    layer = with_weights(make(dispatcher, expert_capacity=capacity, router=router), w)
    x_BLD, is_token_BL = inputs()
    run = jax.jit(lambda x_BLD: layer(x_BLD, is_token_BL, is_training=False))
    y_BLD, stats = run(x_BLD)
    prob_BLE = softmax(x_BLD @ w["w_router_DE"])
    want_BLD, num_dropped = x_BLD.copy(), 0
    for b in range(B):
        used = [0] * E
        for t in range(L):
            e = prob_BLE[b, t].argmax()
            used[e] += 1
            if used[e] <= capacity:
                hidden = np.maximum(x_BLD[b, t] @ w["w_in_EDF"][e], 0)
                want_BLD[b, t] = hidden @ w["w_out_EFD"][e]
            else:
                num_dropped += 1
    want_BLD *= prob_BLE.max(axis=-1, keepdims=True)
    assert num_dropped > 10 and stats.dropped == num_dropped
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-5)
