# SPDX-License-Identifier: Apache-2.0
"""Stacks against float64 NumPy; what scan, remat, dropout and a shared bias really do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from switchx.models.block import BlockInputs
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from switchx.models.stack import Stack
from switchx.models.unroll import unrolled_blocks
from tests.jaxprs import equations
from tests.layers.weights import numbers_for, with_params
from tests.models import oracle
from tests.models.batches import GPT_STYLE

B, L, D = 2, 10, 8
SWITCH = SwitchConfig(
    3, every=2, capacity_factor=1.0, min_capacity=1, router=RouterConfig(jitter=0.0)
)
DENSE = ModelConfig("decoder_only", 9, D, 12, 2, 4, 2, activation="relu", relative_buckets=8)
SPARSE = dataclasses.replace(DENSE, num_decoder_layers=4, switch=SWITCH)
GPT = dataclasses.replace(DENSE, max_length=L, **GPT_STYLE)


def build(config, key, is_decoder=True):
    if not is_decoder:
        layers = config.num_decoder_layers
        config = dataclasses.replace(
            config, architecture="encoder_decoder", num_encoder_layers=layers
        )
    return Stack(config, "decoder" if is_decoder else "encoder", key=key)


def make(config, *, is_decoder=True):
    """An abstract stack, to be used with the numbers that come with it."""
    stack = nnx.eval_shape(lambda: build(config, jax.random.key(0), is_decoder))
    return stack, numbers_for(stack, scale=0.3)


def inputs():
    x_BLD = np.random.default_rng(1).normal(size=(B, L, D)).astype(np.float32)
    is_token_BL = np.ones((B, L), bool)
    is_token_BL[1, 7:] = False
    mask_BLM = np.tril(np.ones((L, L), bool))[None] & is_token_BL[:, None]
    return x_BLD, is_token_BL, mask_BLM


@pytest.mark.parametrize("is_decoder", [False, True])
def test_bias_is_one_table_for_all_blocks_and_equals_float64(is_decoder):
    stack, params = make(DENSE, is_decoder=is_decoder)
    assert [name for name in params if "bias" in name] == ["relative_bias"]
    assert params["relative_bias"]["bias_UH"].shape == (8, 2)
    bias_HLM = with_params(stack, params).position_bias(L, L)
    want_HLM = oracle.position_bias(DENSE, params, L, is_bidirectional=not is_decoder)
    np.testing.assert_allclose(bias_HLM, want_HLM, rtol=1e-6)


def run(stack, params, **options):
    x_BLD, is_token_BL, mask_BLM = inputs()

    @jax.jit
    def apply(params):
        changed = with_params(stack, params)
        reads = BlockInputs(is_token_BL, mask_BLM, changed.position_bias(L, L))
        return changed(jnp.asarray(x_BLD), reads, is_training=True, **options)

    return apply(params)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_output_and_order_of_the_statistics(scan_layers):
    config = dataclasses.replace(SPARSE, scan_layers=scan_layers)
    stack, params = make(config)
    y_BLD, stats = run(stack, params)
    x_BLD, is_token_BL, mask_BLM = inputs()
    flat = unrolled_blocks(params) if scan_layers else params
    assert [f"layer_{i}" for i in range(4)] == sorted(flat["blocks"])
    assert ["experts" in flat["blocks"][f"layer_{i}"]["ffn"] for i in range(4)] == [0, 1, 0, 1]
    want_BLD, losses = oracle.stack(
        config, flat, x_BLD.astype(np.float64), is_token_BL, mask_BLM, factor=1.0, causal=True
    )
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stats.balance_loss, losses, rtol=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3  # so that their order was seen
    assert stats.load_E.shape == (2, 3)


def test_a_dense_stack_has_no_statistics():
    for scan_layers in (False, True):
        stack, params = make(dataclasses.replace(DENSE, scan_layers=scan_layers))
        assert run(stack, params)[1] is None


def test_scanned_blocks_start_apart_and_as_unrolled_ones_do(key):
    switch = dataclasses.replace(SWITCH, every=1)
    config = dataclasses.replace(
        SPARSE, d_model=32, d_ff=64, num_decoder_layers=2, switch=switch
    )

    def draw(config):
        return lambda key: nnx.to_pure_dict(nnx.state(build(config, key)))

    flat = unrolled_blocks(jax.jit(draw(dataclasses.replace(config, scan_layers=True)))(key))
    jax.tree.map(np.testing.assert_array_equal, flat, jax.jit(draw(config))(key))
    first, second = (flat["blocks"][name]["ffn"] for name in ("layer_0", "layer_1"))
    assert np.any(first["w_router_DE"] != second["w_router_DE"])
    assert np.any(first["experts"]["w_in_EDF"] != second["experts"]["w_in_EDF"])
    for layer in (first, second):
        np.testing.assert_allclose(np.std(layer["experts"]["w_in_EDF"]), 32**-0.5, rtol=0.05)


def num_products(jaxpr) -> int:
    return sum(each.primitive.name == "dot_general" for each in equations(jaxpr))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_computes_again_what_its_name_says(scan_layers):
    """That it happens at all; that no gradient changes is shown on whole models."""

    def traced(remat):
        config = dataclasses.replace(DENSE, scan_layers=scan_layers, remat=remat)
        stack, params = make(config)
        grad = jax.grad(lambda params: jnp.sum(run(stack, params)[0] ** 2))
        return jax.jit(grad).trace(params)

    programs = {remat: traced(remat) for remat in ("none", "minimal", "full")}
    none, minimal, full = (num_products(each.jaxpr.jaxpr) for each in programs.values())
    # Forward products of a block: q, k, v, scores, bias, mixing, out, w_in, w_out. Its gradient
    # does not need the result of the last one, so that is not computed again.
    assert minimal == none
    assert full - none == 7 * (1 if scan_layers else 2)
    # A loop needs no barrier between its passes, which would copy each block's parameters.
    has_barrier = "optimization_barrier" in programs["full"].lower().as_text()
    assert has_barrier == (not scan_layers)


def test_input_and_output_drop_out_over_the_whole_length(key):
    """Blocks of zeros: what is left is dropout(norm(dropout(x)))."""
    config = dataclasses.replace(DENSE, dropout_rate=0.5)
    stack, params = make(config)
    params = jax.tree.map(np.zeros_like, params)
    params["norm"]["scale_D"] += 1.0
    _, is_token_BL, mask_BLM = inputs()
    reads = BlockInputs(is_token_BL, mask_BLM, jnp.zeros((2, L, L)))

    @jax.jit
    @jax.vmap
    def drop(key):
        x_BLD = jnp.ones((B, L, D))
        return with_params(stack, params)(x_BLD, reads, is_training=True, key=key)[0]

    y_SBLD = np.asarray(drop(jax.random.split(key, 200)))
    assert np.ptp(y_SBLD, axis=2).max() == 0
    # Kept by both masks: a quarter of 200 * 2 * 8 draws, five deviations of 0.0077.
    assert abs(np.mean(y_SBLD[:, :, 0] != 0) - 0.25) < 0.038
    # A kept entry, with n of D kept at the input: 2 (input) / (2 sqrt(n / D)) * 2 (output).
    values = np.unique(y_SBLD[y_SBLD != 0].round(4))
    possible = [2 / np.sqrt(n / D) for n in range(1, D + 1)]
    assert all(np.min(np.abs(np.array(possible) - value)) < 1e-3 for value in values)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_each_block_has_masks_of_its_own(scan_layers, key):
    """Biases of 1 in block 0 and of 10 in block 1, and no final norm to hide them."""
    config = dataclasses.replace(GPT, dropout_rate=0.5, scan_layers=scan_layers)
    stack, params = make(config)
    params = jax.tree.map(np.zeros_like, params)
    if scan_layers:
        params["blocks"]["layer_0"]["ffn"]["b_out_D"] += np.array([[1.0], [10.0]])
    else:
        for i, bias in enumerate([1.0, 10.0]):
            params["blocks"][f"layer_{i}"]["ffn"]["b_out_D"] += bias
    changed = with_params(stack, params)
    changed.norm = lambda x_BLD: x_BLD
    x_BLD, _, mask_BLM = jnp.zeros((200, L, D)), *inputs()[1:]
    reads = BlockInputs(jnp.ones((200, L), bool), jnp.asarray(mask_BLM[:1]))
    y_BLD, _ = jax.jit(lambda key: changed(x_BLD, reads, is_training=True, key=key))(key)
    # Every value is doubled by its block's mask and again by the output's.
    kept_BD = np.asarray(y_BLD)[:, 0]
    kept_BD = kept_BD[kept_BD != 0]
    values, counts = np.unique(kept_BD, return_counts=True)
    assert values.tolist() == [4.0, 40.0, 44.0]
    assert counts.min() > 0.25 * kept_BD.size
