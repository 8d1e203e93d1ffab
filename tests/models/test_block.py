# SPDX-License-Identifier: Apache-2.0
"""What a block keeps for its backward pass, and where it drops out.

Its numbers are compared with float64 NumPy as those of whole models: `test_transformer.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from switchx.models.block import Block, BlockInputs
from switchx.models.config import ModelConfig, Precision
from tests.layers.weights import numbers_for, with_params
from tests.models.batches import GPT_STYLE

B, L, M, D, H = 2, 6, 5, 8, 2
T5 = ModelConfig(
    "encoder_decoder", 9, D, 12, H, 4, 1, 1, activation="geglu", dropout_rate=0.1,
    precision=Precision(compute="bfloat16"),
)  # fmt: skip
GPT = ModelConfig(
    "decoder_only", 9, D, 12, H, 4, 1, max_length=L, dropout_rate=0.5, **GPT_STYLE
)


def make(config):
    """An abstract block, numbers to use it with, and what it reads beside its input."""
    block = nnx.eval_shape(
        lambda: Block(config, is_sparse=False, has_memory=config is T5, key=jax.random.key(0))
    )
    rng = np.random.default_rng(1)
    reads = BlockInputs(np.ones((B, L), bool), np.tril(np.ones((B, L, L), bool)))
    if config is T5:
        reads = dataclasses.replace(
            reads,
            bias_HLM=rng.normal(size=(H, L, L)).astype(np.float32),
            memory_BMD=rng.normal(size=(B, M, D)).astype(jnp.bfloat16),
            memory_mask_BLM=rng.random((B, L, M)) < 0.7,
        )
    return block, numbers_for(block, scale=0.4), reads


def test_a_scan_keeps_little_of_a_block_for_its_backward_pass(key):
    """Of bfloat16 with dropout: no float32 scores, no masks in the shape of what they mask."""
    block, params, reads = make(T5)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)

    def loss(params, x_BLD):
        def layer(x_BLD, params):
            return with_params(block, params)(x_BLD, reads, is_training=True, key=key)[0], None

        return jnp.sum(jax.lax.scan(layer, x_BLD, params)[0].astype(jnp.float32))

    traced = jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((B, L, D), jnp.bfloat16))
    [forward, _] = (each for each in traced.eqns if each.primitive.name == "scan")
    arrays = [each.aval for each in forward.outvars[forward.params["num_carry"] :]]
    kept = [(each.shape[1:], str(each.dtype)) for each in arrays]
    assert kept.count(((B, H, L, L), "bfloat16")) == 1  # of self-attention
    assert kept.count(((B, H, L, M), "bfloat16")) == 1  # of the other one
    # Before the activation, its gate, and what the last product reads.
    assert kept.count(((B, L, T5.d_ff), "bfloat16")) == 3
    # All else of these sizes are keys, values and rows; no float32, no mask, no weight.
    assert {dtype for shape, dtype in kept if np.prod(shape) >= B * L * D} == {"bfloat16"}


def test_each_sublayer_drops_out_on_its_own_and_over_the_whole_length(key):
    """Weights of zero and biases of 1 and 10 make each sub-layer's dropout visible."""
    block, params, reads = make(GPT)
    params = jax.tree.map(np.zeros_like, params)
    params["self_attention"]["b_out_D"] += 1.0
    params["ffn"]["b_out_D"] += 10.0

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
