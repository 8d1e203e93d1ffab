# SPDX-License-Identifier: Apache-2.0
"""Which dispatcher runs: a few tokens do not cost a slot of every expert."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.models.config import ModelConfig, SwitchConfig
from switchx.moe.layer import SwitchFFN

E, D, F, TOKENS = 128, 64, 256, 4


def layer(dispatcher="sort"):
    switch = SwitchConfig(E, every=1, dispatcher=dispatcher, router_init_scale=1.0)
    config = ModelConfig("decoder_only", 8, D, F, 2, 4, 1, activation="relu", switch=switch)
    return SwitchFFN(config, key=jax.random.key(0))


def decode(module, tokens=TOKENS):
    x_BLD = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, 1, D)), jnp.float32)
    is_token_BL = jnp.ones((tokens, 1), bool)
    run = jax.jit(lambda x_BLD: module(x_BLD, is_token_BL, is_training=False)[0])
    return run.lower(x_BLD).compile(), x_BLD


def best_time(compiled, x_BLD):
    times = []
    for _ in range(20):
        start = time.perf_counter()
        compiled(x_BLD).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def test_four_tokens_of_decoding_cost_four_experts_not_all():
    """Issue 3: within 4 times of four tokens through one expert each, plus the router."""
    (few, x_BLD), (slots, _) = decode(layer()), decode(layer("einsum"))
    ideal = TOKENS * (2 * 2 * D * F + 2 * D * E)
    flops = few.cost_analysis()["flops"]
    assert ideal <= flops < 1.5 * ideal
    assert slots.cost_analysis()["flops"] > 50 * ideal
    np.testing.assert_allclose(few(x_BLD), slots(x_BLD), rtol=1e-4, atol=1e-5)
    assert best_time(few, x_BLD) < best_time(slots, x_BLD) / 4


@pytest.mark.parametrize("tokens", [9, E])
def test_up_to_as_many_tokens_as_experts(tokens):
    (few, x_BLD), (slots, _) = decode(layer(), tokens), decode(layer("einsum"), tokens)
    np.testing.assert_allclose(few(x_BLD), slots(x_BLD), rtol=1e-4, atol=1e-5)
    assert few.cost_analysis()["flops"] < slots.cost_analysis()["flops"] / 3


def test_training_computes_slots_whatever_their_number():
    """Gradients of all experts are formed anyway, and taps want equal blocks."""
    module, x_BLD = layer(), jnp.ones((TOKENS, 1, D))
    program = jax.make_jaxpr(
        lambda x_BLD: module(x_BLD, jnp.ones((TOKENS, 1), bool), is_training=True)[0]
    )(x_BLD)
    assert f"float32[{E},{TOKENS},{F}] = dot_general" in str(program).replace("f32", "float32")
