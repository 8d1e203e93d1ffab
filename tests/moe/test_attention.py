# SPDX-License-Identifier: Apache-2.0
"""Switch attention against float64 loops: linear and FFN experts, forward and gradients."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from switchx.models.block import Block, BlockInputs
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params, forward
from switchx.moe.attention import SwitchAttention
from tests.cases import slow, slow_unless
from tests.compare import assert_slope
from tests.layers.weights import numbers_for, with_params
from tests.moe.oracle import activated, softmax
from tests.training.jobs import make_batch, make_params

B, L, D, H, K, F, E = 2, 7, 6, 2, 5, 8, 3  # H * K is not D
SWITCH = SwitchConfig(
    E, every=1, sublayers="attention", capacity_factor=0.5, min_capacity=1,
    router=RouterConfig(exploration="none"),
)  # fmt: skip
LINEAR = ModelConfig("decoder_only", 9, D, F, H, K, 1, activation="relu", switch=SWITCH)
FFN = dataclasses.replace(LINEAR, switch=dataclasses.replace(SWITCH, attention_experts="ffn"))
CASES = {
    "linear": LINEAR,
    "linear_scaled_biased_einsum": dataclasses.replace(
        LINEAR, scale_attention=True, use_bias=True,
        switch=dataclasses.replace(SWITCH, dispatcher="einsum"),
    ),
    "ffn": FFN,
    "ffn_gated": dataclasses.replace(FFN, activation="swiglu"),
}  # fmt: skip


def make(config):
    layer = nnx.eval_shape(lambda: SwitchAttention(config, key=jax.random.key(0)))
    return layer, numbers_for(layer, scale=0.5)


def inputs():
    rng = np.random.default_rng(1)
    is_token_BL = np.ones((B, L), bool)
    is_token_BL[1, 5:] = False
    mask_BLM = np.tril(np.ones((L, L), bool))[None] & is_token_BL[:, None]
    x_BLD, bias_HLM = rng.normal(size=(B, L, D)), rng.normal(size=(H, L, L))
    return x_BLD.astype(np.float32), is_token_BL, mask_BLM, bias_HLM.astype(np.float32)


def project(config, p, name, e, x_D):
    """What expert e makes of a token, `[H, K]`."""
    if f"w_{name}_EDHK" in p:
        return np.einsum("D,DHK->HK", x_D, p[f"w_{name}_EDHK"][e])
    gate_F = x_D @ p[f"w_{name}_gate_EDF"][e] if config.is_gated else None
    h_F = activated(config.activation, x_D @ p[f"w_{name}_in_EDF"][e], gate_F)
    return np.einsum("F,FHK->HK", h_F, p[f"w_{name}_out_EFHK"][e])


def loop(config, p, x_BLD, is_token_BL, mask_BLM, bias_HLM):
    """Top-1 routing of all tokens as one group, then attention, one query at a time."""
    x_BLD = x_BLD.astype(np.float64)
    capacity, queue = math.ceil(B * L * 0.5 / E), [0] * E
    query_BLHK, memory_BLHK = np.zeros((2, B, L, H, K))
    for b, t in np.argwhere(is_token_BL):
        prob_E = softmax(x_BLD[b, t] @ p["w_router_DE"])
        e = int(np.argmax(prob_E))
        if queue[e] < capacity:
            experts = p["projections"]
            query_BLHK[b, t] = prob_E[e] * project(config, experts, "query", e, x_BLD[b, t])
            memory_BLHK[b, t] = prob_E[e] * project(config, experts, "memory", e, x_BLD[b, t])
        queue[e] += 1
    if config.scale_attention:
        query_BLHK = query_BLHK / math.sqrt(K)
    y_BLD = np.zeros((B, L, D))
    for b, t in np.argwhere(is_token_BL):
        seen = np.flatnonzero(mask_BLM[b, t])
        for h in range(H):
            keys_MK = memory_BLHK[b, seen, h]
            weights_M = softmax(keys_MK @ query_BLHK[b, t, h] + bias_HLM[h, t, seen])
            y_BLD[b, t] += weights_M @ keys_MK @ p["w_out_HKD"][h]
    dropped = sum(max(0, length - capacity) for length in queue)
    return y_BLD + p.get("b_out_D", 0.0), dropped


@pytest.mark.parametrize(
    "name", [slow_unless(name not in ("linear", "ffn"), name) for name in CASES]
)
def test_equals_a_loop_forward_and_by_finite_differences(name):
    config = CASES[name]
    layer, params = make(config)
    x_BLD, is_token_BL, mask_BLM, bias_HLM = inputs()
    target_BLD = np.random.default_rng(2).normal(size=x_BLD.shape) * is_token_BL[..., None]

    def loss(params, x_BLD, bias_HLM):
        y_BLD, stats = with_params(layer, params)(
            x_BLD, jnp.asarray(is_token_BL), is_training=True,
            mask_BLM=mask_BLM, bias_HLM=bias_HLM,
        )  # fmt: skip
        return jnp.sum(y_BLD * target_BLD), (y_BLD, stats)

    point = params, x_BLD, bias_HLM
    grads, (y_BLD, stats) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*point)
    want_BLD, dropped = loop(config, params, x_BLD, is_token_BL, mask_BLM, bias_HLM)
    np.testing.assert_allclose(y_BLD[is_token_BL], want_BLD[is_token_BL], rtol=1e-4, atol=1e-5)
    assert stats.dropped == dropped > 0 and stats.tokens == is_token_BL.sum()
    assert np.linalg.norm(grads[0]["w_router_DE"]) > 1e-3

    def by_loop(point):
        params, x_BLD, bias_HLM = point
        y_BLD, _ = loop(config, params, x_BLD, is_token_BL, mask_BLM, bias_HLM)
        return np.sum(y_BLD * target_BLD)

    assert_slope(by_loop, point, grads, rtol=2e-3)


def test_queries_start_smaller_where_scores_are_not_scaled():
    big = dataclasses.replace(LINEAR, d_model=64, d_head=16)
    for scaled, ratio in ((False, 0.25), (True, 1.0)):
        config = dataclasses.replace(big, scale_attention=scaled)
        experts = SwitchAttention(config, key=jax.random.key(0)).projections
        query, memory = (np.std(w[...]) for w in (experts.w_query_EDHK, experts.w_memory_EDHK))
        np.testing.assert_allclose(query / memory, ratio, rtol=0.1)


def test_dropout_needs_a_key_and_reaches_weights_and_hidden_units(key):
    config = dataclasses.replace(FFN, dropout_rate=0.5)
    layer, params = make(config)
    x_BLD, is_token_BL, mask_BLM, bias_HLM = inputs()

    @jax.jit
    def run(params, key):
        return with_params(layer, params)(
            x_BLD, jnp.asarray(is_token_BL), is_training=True, mask_BLM=mask_BLM, key=key
        )[0]

    assert np.abs(run(params, key) - run(params, jax.random.key(1))).max() > 1e-3


@pytest.mark.parametrize("scan_layers", [True, slow(False)])
def test_statistics_of_a_block_with_both_come_in_the_order_of_its_layers(scan_layers):
    switch = dataclasses.replace(SWITCH, every=2, sublayers="both", num_experts=4)
    config = ModelConfig(
        "decoder_only", 384, 16, 24, 2, 8, 4, activation="relu",
        switch=switch, scan_layers=scan_layers,
    )  # fmt: skip
    params, batch = make_params(config), make_batch(config, 4)
    blocks = params["decoder"]["blocks"]["layer_1"]
    # The attention's routers send all to expert 0 by ties, those of the FFNs do not.
    blocks["self_attention"]["w_router_DE"] *= 0
    if not scan_layers:
        params["decoder"]["blocks"]["layer_3"]["self_attention"]["w_router_DE"] *= 0
    _, stats = jax.jit(lambda params: forward(config, params, batch, is_training=True))(params)
    tokens = float(stats.tokens[0])
    assert stats.load_E.shape == (4, 4)
    assert [float(load_E[0]) == tokens for load_E in stats.load_E] == [True, False] * 2


def test_a_sparse_attention_leaves_the_ffn_dense():
    names = abstract_params(dataclasses.replace(LINEAR, num_decoder_layers=2))
    block = names["decoder"]["blocks"]["layer_1"]
    assert "w_in_DF" in block["ffn"] and "projections" in block["self_attention"]


def test_a_block_with_a_memory_keeps_its_cross_attention():
    block = nnx.eval_shape(
        lambda: Block(LINEAR, is_sparse=True, has_memory=True, key=jax.random.key(0))
    )
    params = numbers_for(block, scale=0.3)
    assert "w_key_DHK" in params["cross_attention"]
    x_BLD, is_token_BL, mask_BLM, bias_HLM = inputs()
    reads = BlockInputs(is_token_BL, mask_BLM, bias_HLM, x_BLD, mask_BLM)
    y_BLD, stats, _ = jax.jit(
        lambda params: with_params(block, params)(x_BLD, reads, is_training=True)
    )(params)
    assert y_BLD.shape == x_BLD.shape and len(stats) == 1


def test_positions_may_have_correlations_of_their_own():
    """TUPE: a bias for each row, and words' scores divided by sqrt(2 K)."""
    config = dataclasses.replace(LINEAR, positions="tupe", max_length=L, scale_attention=True)
    layer, params = make(config)
    x_BLD, is_token_BL, mask_BLM, bias_HLM = inputs()
    plain = dataclasses.replace(LINEAR, scale_attention=True)

    def run(layer, params, **bias):
        module = with_params(layer, params)
        reads = x_BLD, jnp.asarray(is_token_BL)
        return module(*reads, is_training=False, mask_BLM=mask_BLM, **bias)[0]

    run = jax.jit(run, static_argnums=0)
    row_bias_BHLM = jnp.stack([jnp.asarray(bias_HLM)] * B)
    got_BLD = run(layer, params, row_bias_BHLM=row_bias_BHLM)
    halved = jax.tree.map(lambda leaf: leaf, params)
    halved["projections"]["w_query_EDHK"] = params["projections"]["w_query_EDHK"] / np.sqrt(2)
    want_BLD = run(make(plain)[0], halved, bias_HLM=bias_HLM)
    np.testing.assert_allclose(got_BLD, want_BLD, rtol=1e-4, atol=1e-5)
