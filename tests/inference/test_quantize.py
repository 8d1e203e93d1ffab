# SPDX-License-Identifier: Apache-2.0
"""Experts in other forms, quantized or an array each, are the weights that they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SeparateMatrices, dequantize
from switchx import tree
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator
from switchx.inference.quantize import (
    is_quantized,
    model_bytes,
    native,
    packed,
    quantize_experts,
    separate_experts,
)
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.models.params import forward, init_params
from switchx.models.stored_experts import EXPERT_MATRICES
from tests.cases import slow_unless
from tests.data.refusals import refused
from tests.inference import tiny
from tests.models.batches import make_batch
from tests.training.jobs import with_switch

CONFIG = ModelConfig(
    "encoder_decoder", 40, 16, 32, 2, 8, 1, 1, switch=SwitchConfig(4, every=1, expert_bias=True)
)
DEFAULT = [(8, "gather"), (4, "dropless")]
BATCH = make_batch(40, is_encoder_decoder=True)


def dequantized(params):
    """The same with float weights."""
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if is_quantized(leaf) else leaf,
        params,
        is_leaf=is_quantized,
    )


@pytest.mark.parametrize(
    ("bits", "dispatcher"),
    [
        slow_unless((bits, name) in DEFAULT, bits, name)
        for bits in (8, 4)
        for name in ("gather", "einsum", "dropless")
    ],
)
def test_logits_are_those_of_the_weights_it_stands_for(bits, dispatcher, key):
    config = with_switch(CONFIG, dispatcher=dispatcher)
    config, params, errors, _ = quantize_experts(config, init_params(config, key), bits=bits)
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    assert sum(map(is_quantized, leaves)) == len(errors) == 6  # in, gate, out of two blocks
    run = jax.jit(lambda params: forward(config, params, BATCH, is_training=False)[0])
    np.testing.assert_allclose(run(params), run(dequantized(params)), rtol=2e-5, atol=2e-5)


def test_errors_are_those_of_the_weights(key):
    params = init_params(CONFIG, key)
    # Experts of unequal size, one of zeros.
    params = tree.map_named(
        lambda name, w: w * np.arange(len(w))[:, None, None] if EXPERT_MATRICES in name else w,
        params,
    )
    before = tree.named_leaves(params)
    _, quantized, errors, _ = quantize_experts(CONFIG, params, bits=4)
    after = tree.named_leaves(dequantized(quantized))
    for each in errors:
        w_EDF, got_EDF = (
            np.asarray(leaves[each.name], np.float64) for leaves in (before, after)
        )
        error_E = np.sqrt(
            np.sum((w_EDF - got_EDF) ** 2, axis=(1, 2))
            / np.maximum(np.sum(w_EDF**2, axis=(1, 2)), 1e-9)
        )
        whole = np.sqrt(np.sum((w_EDF - got_EDF) ** 2) / np.sum(w_EDF**2))
        assert each.error == pytest.approx(whole, rel=1e-4)
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


def test_scanned_layers_are_unrolled(key):
    config = dataclasses.replace(CONFIG, num_encoder_layers=2, scan_layers=True)
    quantized_config, params, errors, _ = quantize_experts(
        config, init_params(config, key), bits=8
    )
    assert not quantized_config.scan_layers
    assert len(errors) == 9 and all(EXPERT_MATRICES in each.name for each in errors)
    logits_BLV = jax.eval_shape(
        lambda params: forward(quantized_config, params, BATCH, is_training=False)[0], params
    )
    assert logits_BLV.shape[-1] == config.vocab_size


def test_four_bits_are_packed_on_cpu_and_native_or_fragments_elsewhere(key, monkeypatch):
    _, params, _, _ = quantize_experts(CONFIG, init_params(CONFIG, key), bits=4)
    here, elsewhere = native(params), native(params, "tpu")
    for got, dtype in ((here, "uint8"), (elsewhere, "int4"), (packed(elsewhere), "uint8")):
        leaves = filter(is_quantized, jax.tree.leaves(got, is_leaf=is_quantized))
        assert [leaf.values.dtype for leaf in leaves] == [dtype] * 6
    for got in (here, packed(elsewhere)):
        jax.tree.map(np.testing.assert_array_equal, got, params)
    forms = {None: "fragments", "cpu": "packed"}
    monkeypatch.setattr("switchx.inference.quantize.form_of_int4", forms.get)
    wide = dataclasses.replace(CONFIG, d_model=64, d_ff=64)
    for bits in (8, 4):
        _, params, _, _ = quantize_experts(wide, init_params(wide, key), bits=bits)
        for in_order in (False, True):
            got = native(params, in_order=in_order)
            leaves = filter(is_quantized, jax.tree.leaves(got, is_leaf=is_quantized))
            assert {leaf.is_fragments for leaf in leaves} == {not in_order}
            jax.tree.map(np.testing.assert_array_equal, packed(got), params)


def test_a_dense_model_is_refused_and_biases_are_not_quantized(key):
    with refused("has no Switch FFN, and so no experts to quantize"):
        quantize_experts(dataclasses.replace(CONFIG, switch=None), {}, bits=8)
    _, _, _, sizes = quantize_experts(CONFIG, init_params(CONFIG, key), bits=8)
    E, D, F = 4, 16, 32
    assert sizes.quantized == 2 * 3 * E * D * F * 4
    assert sizes.experts - sizes.quantized == 2 * E * (D + F) * 4


def is_separate(leaf) -> bool:
    return isinstance(leaf, SeparateMatrices)


def taken_apart(params) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_separate)
    return {tree.path_name(path) for path, leaf in leaves if is_separate(leaf)}


def test_experts_alone_are_taken_apart_once():
    config, params = tiny.model()
    names = taken_apart(separate_experts(params))
    assert names and names == {
        name for name in tree.named_leaves(params) if "/experts/w_" in name
    }
    _, params = tiny.model()
    apart = separate_experts(params)
    again = separate_experts(apart)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(again), strict=True):
        assert one is other
    config, params = tiny.model()
    _, quantized, _, _ = quantize_experts(config, params, bits=8)
    assert taken_apart(separate_experts(quantized)) == set()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert taken_apart(separate_experts(jax.device_put(params, everywhere))) == set()


@pytest.mark.slow
def test_texts_are_those_of_the_stacked_experts():
    config, params = tiny.model()
    inputs = np.random.default_rng(0).integers(3, config.vocab_size, (5, 6)).tolist()
    generator = Generator(config, params, DecodingConfig(6, beam_size=3, pruning="none"), 8)
    apart = dict(generator(inputs))
    generator.params = jax.tree.map(jnp.asarray, params)
    stacked = dict(generator(inputs))
    for number in range(len(inputs)):
        assert apart[number][0].tokens == stacked[number][0].tokens
        np.testing.assert_allclose(apart[number][0].score, stacked[number][0].score, rtol=1e-5)
