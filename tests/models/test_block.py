# SPDX-License-Identifier: Apache-2.0
"""One block against float64 NumPy, forward and by finite differences; where it drops out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from switchx.models.block import Block, BlockInputs
from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from tests.compare import assert_slope
from tests.layers.weights import numbers_for, with_params
from tests.models import oracle

B, L, M, D, H = 2, 6, 5, 8, 2
# Capacity 4 of 10 tokens over 3 experts: some are dropped.
SWITCH = SwitchConfig(
    3, every=1, capacity_factor=1.0, min_capacity=1, router=RouterConfig(jitter=0.0)
)
T5 = ModelConfig("encoder_decoder", 9, D, 12, H, 4, 1, 1, activation="relu")
GPT = ModelConfig(
    "decoder_only",
    9,
    D,
    12,
    H,
    4,
    1,
    activation="gelu",
    norm="layer",
    positions="learned",
    max_length=L,
    use_bias=True,
    scale_attention=True,
)
CASES = {
    "dense_with_memory": (T5, True),
    "switch_with_memory": (dataclasses.replace(T5, switch=SWITCH), True),
    "gpt": (GPT, False),
}


def make(config, has_memory):
    """An abstract block, to be used with the numbers that come with it."""
    block = nnx.eval_shape(
        lambda: Block(
            config, is_sparse=config.is_sparse(0), has_memory=has_memory, key=jax.random.key(0)
        )
    )
    return block, numbers_for(block, scale=0.4)


def inputs(config, has_memory):
    """An activation with padding at the end of row 1, and what a block reads beside it."""
    rng = np.random.default_rng(1)
    is_token_BL = np.ones((B, L), bool)
    is_token_BL[1, 4:] = False
    relative = config.positions == "relative"
    return rng.normal(size=(B, L, D)).astype(np.float32), BlockInputs(
        is_token_BL=is_token_BL,
        mask_BLM=np.tril(np.ones((L, L), bool))[None] & is_token_BL[:, None],
        bias_HLM=rng.normal(size=(H, L, L)).astype(np.float32) if relative else None,
        memory_BMD=rng.normal(size=(B, M, D)).astype(np.float32) if has_memory else None,
        memory_mask_BLM=rng.random((B, L, M)) < 0.7 if has_memory else None,
    )


def expected(config, params, x_BLD, inputs):
    bias_HLM = np.zeros((H, L, L)) if inputs.bias_HLM is None else inputs.bias_HLM
    memory = None
    if inputs.memory_BMD is not None:
        memory = inputs.memory_BMD, inputs.memory_mask_BLM
    return oracle.block(
        config,
        params,
        x_BLD.astype(np.float64),
        inputs.is_token_BL,
        inputs.mask_BLM,
        bias_HLM,
        memory,
        factor=1.0,
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_float64_forward_and_by_finite_differences(name):
    config, has_memory = CASES[name]
    block, params = make(config, has_memory)
    x_BLD, reads = inputs(config, has_memory)
    target_BLD = np.random.default_rng(2).normal(size=x_BLD.shape)
    traced = {"bias_HLM": reads.bias_HLM, "memory_BMD": reads.memory_BMD}

    def loss(params, x_BLD, traced):
        changed = dataclasses.replace(reads, **traced)
        y_BLD, stats, _ = with_params(block, params)(x_BLD, changed, is_training=True)
        balance = sum(each.balance_loss for each in stats)
        return jnp.sum(y_BLD * target_BLD) + 3.0 * balance, (y_BLD, stats)

    point = params, x_BLD, traced
    grads, (y_BLD, stats) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*point)

    want_BLD, want_balance = expected(config, *point[:2], reads)
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-4)
    if config.switch:
        (stats,) = stats
        np.testing.assert_allclose(stats.balance_loss, want_balance, rtol=1e-5)
        assert stats.tokens == reads.is_token_BL.sum() and stats.dropped > 0
    else:
        assert stats == [] and want_balance is None

    def by_oracle(point):
        params, x_BLD, traced = point
        changed = dataclasses.replace(reads, **traced)
        y_BLD, balance = expected(config, params, x_BLD, changed)
        return np.sum(y_BLD * target_BLD) + 3.0 * (balance or 0.0)

    assert_slope(by_oracle, point, grads, rtol=1e-3)


def test_a_scan_keeps_little_of_a_block_for_its_backward_pass(key):
    """Of bfloat16 with dropout: no float32 scores, no masks in the shape of what they mask."""
    precision = Precision(compute="bfloat16")
    config = dataclasses.replace(T5, activation="geglu", dropout_rate=0.1, precision=precision)
    block, params = make(config, True)
    x_BLD, reads = inputs(config, True)
    reads = dataclasses.replace(reads, memory_BMD=reads.memory_BMD.astype(jnp.bfloat16))
    num_layers = 3
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_layers), params)

    def loss(params, x_BLD):
        def layer(x_BLD, params):
            return with_params(block, params)(x_BLD, reads, is_training=True, key=key)[0], None

        return jnp.sum(jax.lax.scan(layer, x_BLD, params)[0].astype(jnp.float32))

    traced = jax.make_jaxpr(jax.grad(loss))(params, x_BLD.astype(jnp.bfloat16))
    [forward, _] = (each for each in traced.eqns if each.primitive.name == "scan")
    arrays = [each.aval for each in forward.outvars[forward.params["num_carry"] :]]
    kept = [(each.shape[1:], str(each.dtype)) for each in arrays]
    assert kept.count(((B, H, L, L), "bfloat16")) == 1  # of self-attention
    assert kept.count(((B, H, L, M), "bfloat16")) == 1  # of the other one
    # Before the activation, its gate, and what the last product reads.
    assert kept.count(((B, L, config.d_ff), "bfloat16")) == 3
    # All else of these sizes are keys, values and rows; no float32, no mask, no weight.
    assert {dtype for shape, dtype in kept if np.prod(shape) >= B * L * D} == {"bfloat16"}


def test_each_sublayer_drops_out_on_its_own_and_over_the_whole_length(key):
    """Weights of zero and biases of 1 and 10 make each sub-layer's dropout visible."""
    block, params = make(dataclasses.replace(GPT, dropout_rate=0.5), False)
    params = jax.tree.map(np.zeros_like, params)
    params["self_attention"]["b_out_D"] += 1.0
    params["ffn"]["b_out_D"] += 10.0
    _, reads = inputs(GPT, False)

    @jax.jit
    @jax.vmap
    def run(key):
        x_BLD = jnp.zeros((B, L, D))
        return with_params(block, params)(x_BLD, reads, is_training=True, key=key)[0]

    y_SBLD = np.asarray(run(jax.random.split(key, 200)))
    assert np.ptp(y_SBLD, axis=2).max() == 0
    # Kept values are doubled. Neither, attention alone, FFN alone, both: a quarter each of
    # 200 * 2 * 8 draws, within five deviations of sqrt(3 / 16 / 3200) = 0.0077.
    values, counts = np.unique(y_SBLD[:, :, 0], return_counts=True)
    assert values.tolist() == [0.0, 2.0, 20.0, 22.0]
    np.testing.assert_allclose(counts / 3200, 0.25, atol=0.038)


def test_dropout_needs_a_key():
    block, params = make(dataclasses.replace(T5, dropout_rate=0.5), True)
    x_BLD, reads = inputs(T5, True)
    block = with_params(block, params)
    y_BLD = jax.jit(lambda x_BLD: block(x_BLD, reads, is_training=True)[0])(x_BLD)
    want_BLD, _ = expected(T5, params, x_BLD, reads)
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-4)
