# SPDX-License-Identifier: Apache-2.0
"""Whole models: what sees what, by gradient; scanned equals unrolled; remat; names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.axes import dims_of
from switchx.models.config import ModelConfig, Precision, RouterConfig, SwitchConfig
from switchx.models.params import abstract_params, bind, forward, init_params
from switchx.models.unroll import unrolled
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules
from tests.cases import slow
from tests.compare import assert_close
from tests.layers.weights import numbers_like
from tests.models.batches import GPT_STYLE, make_batch
from tests.training.jobs import run_model, with_switch

V = 40
SWITCH = SwitchConfig(
    4, every=2, capacity_factor=8.0, eval_capacity_factor=8.0, router=RouterConfig(jitter=0.0)
)
T5 = ModelConfig("encoder_decoder", V, 16, 24, 2, 8, 2, 2, activation="relu", switch=SWITCH)
T5_DECODER = dataclasses.replace(
    T5, architecture="decoder_only", num_encoder_layers=0, activation="swiglu"
)
GPT = dataclasses.replace(T5_DECODER, max_length=16, **GPT_STYLE)
UNTIED = dataclasses.replace(T5, tie_embeddings=False, activation="geglu")
CONFIGS = {"t5": T5, "t5_decoder": T5_DECODER, "gpt": GPT, "untied": UNTIED}
ON_ALL = pytest.mark.parametrize(
    "name", ["t5", "gpt", *(slow(n) for n in ("t5_decoder", "untied"))]
)


def deeper(config):
    """Four blocks a stack: two repeats of dense and sparse."""
    num_encoder_layers = 4 if config.is_encoder_decoder else 0
    return dataclasses.replace(
        config, num_decoder_layers=4, num_encoder_layers=num_encoder_layers
    )


def numbers_for(config):
    return numbers_like(abstract_params(config), scale=0.3)


def batch_for(config):
    return make_batch(V, is_encoder_decoder=config.is_encoder_decoder)


def embedding_gradients(config, params, batch, places):
    """Norm of d logits[row, position] / d embedded token, for decoder and encoder tokens.

    For each of `places`, pairs of row and position.

    Every token of the batch is given a row of its own in a widened table, so that the
    gradient by table row is the gradient by position.
    """
    batch = dict(batch)
    names = [n for n in ("encoder_input_tokens", "decoder_input_tokens") if n in batch]
    table, offsets = [], {}
    original = np.asarray(params["embedding"]["embedding_VD"])
    for name in names:
        offsets[name] = sum(map(len, table))
        tokens = batch[name].reshape(-1)
        table.append(original[tokens])
        batch[name] = (offsets[name] + np.arange(tokens.size)).reshape(batch[name].shape)
    table_VD = jnp.asarray(np.concatenate(table))

    @jax.jit
    @jax.grad
    def gradient(table_VD, row, position):
        changed = params | {"embedding": params["embedding"] | {"embedding_VD": table_VD}}
        wide = dataclasses.replace(config, vocab_size=len(table_VD), tie_embeddings=False)
        changed["embedding"]["w_logits_DV"] = original.T
        model = bind(wide, changed)
        return jnp.sum(model(batch, is_training=False)[0][row, position] ** 2)

    for row, position in places:
        norms = np.linalg.norm(gradient(table_VD, row, position), axis=-1)
        yield {
            name: norms[offsets[name] :][: batch[name].size].reshape(batch[name].shape)
            for name in names
        }


@ON_ALL
def test_causality_and_packing_isolation_by_gradient(name):
    config = CONFIGS[name]
    params = numbers_for(config)
    batch = batch_for(config)
    segment_BL = batch["decoder_segment_ids"]
    places = [(0, 2), (0, 5), (1, 3)]
    gradients = embedding_gradients(config, params, batch, places)
    for (row, position), norms in zip(places, gradients, strict=True):
        sees_BL = norms["decoder_input_tokens"] > 1e-9
        expected_BL = np.zeros_like(sees_BL)
        same = segment_BL[row] == segment_BL[row, position]
        expected_BL[row] = same & (np.arange(len(same)) <= position)
        np.testing.assert_array_equal(sees_BL, expected_BL)
        if config.is_encoder_decoder:
            sees_BM = norms["encoder_input_tokens"] > 1e-9
            expected_BM = np.zeros_like(sees_BM)
            expected_BM[row] = batch["encoder_segment_ids"][row] == segment_BL[row, position]
            np.testing.assert_array_equal(sees_BM, expected_BM)


@ON_ALL
def test_scanned_equals_unrolled(name):
    """With the masks of dropout and the jitter of routers, which are each layer's own."""
    # Two repeats of a sparse block; those of a dense and a sparse one: test_stack.py.
    config = with_switch(CONFIGS[name], every=1, router=RouterConfig(jitter=0.1))
    config = dataclasses.replace(config, dropout_rate=0.2)
    scanned = dataclasses.replace(config, scan_layers=True)
    params, batch = numbers_for(scanned), batch_for(config)
    config_, layers = unrolled(scanned, params)
    assert config_ == config
    how = dict(is_training=True, key=jax.random.key(3))
    want, want_stats = run_model(config, layers, batch, **how)
    got, got_stats = run_model(scanned, params, batch, **how)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got_stats.load_E, want_stats.load_E)


@pytest.mark.parametrize("scan_layers", [True, slow(False)])
def test_remat_changes_no_gradient(scan_layers):
    # Two repeats of a sparse block where scanned, a dense and a sparse block unrolled.
    switch = dataclasses.replace(SWITCH, every=1 if scan_layers else 2)
    config = dataclasses.replace(T5_DECODER, scan_layers=scan_layers, switch=switch)
    params, batch = numbers_for(config), batch_for(config)

    def loss(params, config):
        logits, stats = forward(config, params, batch, is_training=True)
        return jnp.mean(logits**2) + jnp.sum(stats.balance_loss)

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    want = grad(params, config)
    for remat in ("minimal", "full"):
        got = grad(params, dataclasses.replace(config, remat=remat))
        assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_half_precision_is_near_float32(dtype):
    config = dataclasses.replace(T5, precision=Precision(compute=dtype))
    params, batch = numbers_for(T5), batch_for(T5)
    want, _ = run_model(T5, params, batch, is_training=False)
    got, _ = run_model(config, params, batch, is_training=False)
    assert got.dtype == jnp.float32
    most = 0.05 if dtype == "bfloat16" else 0.01
    assert 1e-4 < float(jnp.std(got - want) / jnp.std(want)) < most


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_every_parameter_is_named_by_its_dimensions(name, scan_layers):
    config = dataclasses.replace(deeper(CONFIGS[name]), scan_layers=scan_layers)
    sizes = {"D": 16, "F": 24, "H": 2, "K": 8, "V": V, "E": 4, "U": 32, "L": 16, "N": 2}
    for path, leaf in tree.named_leaves(abstract_params(config)).items():
        dims = dims_of(path.rsplit("/", 1)[-1], len(leaf.shape))
        assert leaf.shape == tuple(sizes[letter] for letter in dims), path


def test_abstract_parameters_are_those_that_are_drawn():
    abstract = abstract_params(UNTIED)
    drawn = jax.eval_shape(lambda key: init_params(UNTIED, key), jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), drawn)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(abstract))


def test_dropout_is_random_in_training_and_absent_without_a_key():
    plain = dataclasses.replace(T5_DECODER, switch=None)
    config = dataclasses.replace(plain, dropout_rate=0.5)
    params, batch = numbers_for(config), batch_for(config)

    def logits(config, key):
        return np.asarray(run_model(config, params, batch, is_training=True, key=key)[0])

    same = logits(config, jax.random.key(1))
    np.testing.assert_array_equal(same, logits(config, jax.random.key(1)))
    assert not np.allclose(same, logits(config, jax.random.key(2)))
    np.testing.assert_allclose(logits(config, None), logits(plain, None), rtol=1e-6)


def test_abstract_parameters_do_not_remember_a_mesh():
    """They are cached: traced first under a mesh, they must not carry its sharding."""
    config = dataclasses.replace(T5, d_ff=40)  # of no other test, so not yet cached
    with use_mesh(MeshSpec(data=4, expert=2).build(), Rules()):
        abstract_params(config)
    assert all(leaf.sharding is None for leaf in jax.tree.leaves(abstract_params(config)))
