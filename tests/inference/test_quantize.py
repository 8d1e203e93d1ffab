# SPDX-License-Identifier: Apache-2.0
"""A model with quantized experts is the model with the weights that they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dequantize
from switchx import tree
from switchx.inference.quantize import (
    EXPERTS,
    is_quantized,
    model_bytes,
    native,
    packed,
    quantize_experts,
)
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import forward, init_params
from tests.data.refusals import refused
from tests.models.batches import make_batch

CONFIG = ModelConfig(
    "encoder_decoder", 40, 16, 32, 2, 8, 2, 2, switch=SwitchConfig(4, expert_bias=True)
)
BATCH = make_batch(40, is_encoder_decoder=True)


def dequantized(params):
    """The same with float weights."""
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf,
        params,
        is_leaf=is_quantized,
    )


@pytest.mark.parametrize("dispatcher", ["gather", "einsum", "dropless"])
@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_the_weights_it_stands_for(bits, dispatcher, key):
    switch = dataclasses.replace(CONFIG.switch, dispatcher=dispatcher)
    config = dataclasses.replace(CONFIG, switch=switch)
    config, params, errors, _ = quantize_experts(config, init_params(config, key), bits=bits)
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    assert sum(map(is_quantized, leaves)) == len(errors) == 6  # in, gate, out of two layers
    run = jax.jit(lambda params: forward(config, params, BATCH, is_training=False)[0])
    np.testing.assert_allclose(run(params), run(dequantized(params)), rtol=2e-5, atol=2e-5)


def test_errors_are_those_of_the_weights(key):
    params = init_params(CONFIG, key)
    before = tree.named_leaves(params)
    _, quantized, errors, _ = quantize_experts(CONFIG, params, bits=4)
    after = tree.named_leaves(dequantized(quantized))
    for each in errors:
        w_EDF, got_EDF = (
            np.asarray(leaves[each.name], np.float64) for leaves in (before, after)
        )
        error_E = np.sqrt(
            np.sum((w_EDF - got_EDF) ** 2, axis=(1, 2)) / np.sum(w_EDF**2, axis=(1, 2))
        )
        assert each.error == pytest.approx(np.sqrt(np.mean(error_E**2)), rel=1e-4)
        assert each.worst_error == pytest.approx(error_E.max(), rel=1e-4)
        assert 0.03 < each.error < 0.15


def test_bytes_at_int4_with_the_rest_in_bfloat16(key):
    """Experts are 95% of this model: at most 1/6.5 of its float32 bytes are left."""
    config = ModelConfig(
        "decoder_only",
        512,
        64,
        256,
        2,
        32,
        2,
        activation="relu",
        switch=SwitchConfig(64, every=1),
    )
    config, params, _, sizes = quantize_experts(
        config, init_params(config, key), bits=4, rest="bfloat16"
    )
    assert 0.94 < sizes.experts / sizes.before < 0.99
    assert sizes.quantized == sizes.experts
    assert sizes.after == model_bytes(params) <= sizes.before / 6.5
    compiled = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + leaf, params))
    arguments = compiled.lower(params).compile().memory_analysis().argument_size_in_bytes
    assert arguments == pytest.approx(sizes.after, rel=1e-3)
    assert config.precision.compute == "bfloat16" and config.precision.router == "float32"
    names = tree.named_leaves(params)
    assert all(leaf.dtype == jnp.float32 for name, leaf in names.items() if "router" in name)
    embedding = names["embedding/embedding_VD"]
    assert embedding.dtype == jnp.bfloat16


def test_biases_are_experts_that_are_not_quantized(key):
    _, _, _, sizes = quantize_experts(CONFIG, init_params(CONFIG, key), bits=8)
    E, D, F = 4, 16, 32
    assert sizes.quantized == 2 * 3 * E * D * F * 4
    assert sizes.experts - sizes.quantized == 2 * E * (D + F) * 4


def test_scanned_layers_are_unrolled(key):
    config = dataclasses.replace(CONFIG, num_encoder_layers=4, scan_layers=True)
    quantized_config, params, errors, _ = quantize_experts(
        config, init_params(config, key), bits=8
    )
    assert not quantized_config.scan_layers
    assert len(errors) == 9 and all(EXPERTS in each.name for each in errors)
    logits_BLV, _ = forward(quantized_config, params, BATCH, is_training=False)
    assert np.all(np.isfinite(logits_BLV))


def test_four_bits_are_packed_on_cpu_and_in_files_and_native_elsewhere(key):
    _, params, _, _ = quantize_experts(CONFIG, init_params(CONFIG, key), bits=4)
    here, elsewhere = native(params), native(params, "tpu")
    for got, dtype in ((here, "uint8"), (elsewhere, "int4"), (packed(elsewhere), "uint8")):
        leaves = filter(is_quantized, jax.tree.leaves(got, is_leaf=is_quantized))
        assert [leaf.values.dtype for leaf in leaves] == [dtype] * 6
    for got in (here, packed(elsewhere)):
        jax.tree.map(np.testing.assert_array_equal, got, params)


def test_a_dense_model_is_refused(key):
    with refused("<any>has no Switch FFN, and so no experts to quantize<any>"):
        quantize_experts(dataclasses.replace(CONFIG, switch=None), {}, bits=8)
