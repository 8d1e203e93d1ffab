# SPDX-License-Identifier: Apache-2.0
"""The loss of logits of which a part is there at a time, against that of whole logits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from switchx import tree
from switchx.compiled.collectives import executed_collectives
from switchx.layers.embedding import Embedding
from switchx.models.config import ModelConfig, Precision
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.rules import Rules, param_shardings
from switchx.training.fused_loss import fused_batch_loss
from switchx.training.losses import (
    LossConfig,
    batch_loss,
    cross_entropy,
    cross_entropy_of,
    loss_denominators,
)
from tests.cases import slow_unless
from tests.compare import assert_close_to_largest
from tests.layers.weights import with_params
from tests.training.jobs import DENSE, make_batch, make_params
from tests.training.pipelines import assert_equal, pipelined, stacked, unpipelined

B, L, V, D, PARTS = 16, 6, 48, 8, 3
TIED = ModelConfig("decoder_only", V, D, 8, 2, 4, 1)
CONFIGS = {
    "tied": TIED,
    "untied": dataclasses.replace(TIED, tie_embeddings=False),
    "bfloat16": dataclasses.replace(TIED, precision=Precision(logits="bfloat16")),
}
LOSS = LossConfig("mean", z_loss=0.3, label_smoothing=0.2)
VOCABULARY_ROWS = Rules(params=(("V", ("data",)), ("D", ("fsdp",))), may_stay_whole=())
MESHES = {
    "data": MeshSpec(),
    "fsdp": MeshSpec(data=2, fsdp=4),
    "model": MeshSpec(data=4, model=2),
    "model alone": MeshSpec(data=1, model=8),
    "rows of the vocabulary": MeshSpec(data=4, fsdp=2, rules=VOCABULARY_ROWS),
}


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """So many parts of few tokens, too."""

    def num_parts(config, tokens):
        return PARTS if tokens % PARTS == 0 else 2 if tokens % 2 == 0 else 1

    monkeypatch.setattr(ModelConfig, "num_logit_parts", num_parts)


def inputs():
    rng = np.random.default_rng(0)
    x_BLD = rng.normal(size=(B, L, D)).astype(np.float32) * 3
    weights_BL = rng.choice([0, 0.5, 1, 2], (B, L)).astype(np.float32)
    return x_BLD, rng.integers(0, V, (B, L)), weights_BL


def weight_of(embedding):
    name = "embedding_VD" if embedding.config.tie_embeddings else "w_logits_DV"
    return name, getattr(embedding, name)[...]


def in_parts(embedding, name, x_BLD, weight, targets_BL, weights_BL):
    changed = with_params(embedding, {name: weight})
    sums = cross_entropy_of(changed, x_BLD, targets_BL, weights_BL, LOSS)
    return 7 * sums.loss, sums


def of_whole_logits(embedding, name, x_BLD, weight, targets_BL, weights_BL):
    logits_BLV = with_params(embedding, {name: weight}).logits(x_BLD)
    sums = cross_entropy(logits_BLV, targets_BL, weights_BL, LOSS)
    return 7 * sums.loss, sums


def with_gradients(function, *fixed):
    return jax.value_and_grad(functools.partial(function, *fixed), (0, 1), has_aux=True)


def compare(got, want, share=1e-5):
    dtypes, (got, want) = [], jax.device_get((got, want))
    for each in (got, want):
        dtypes.append([leaf.dtype for leaf in jax.tree.leaves(each)])
    assert dtypes[0] == dtypes[1]
    got, want = jax.tree.map(np.float32, (got, want))
    assert_close_to_largest(got, want, share)


@pytest.mark.parametrize("name", CONFIGS)
def test_sums_and_raw_gradients_are_those_of_whole_logits(name, key):
    embedding = Embedding(CONFIGS[name], key=key)
    weight_name, weight = weight_of(embedding)
    x_BLD, *of_tokens = inputs()
    got, want = (
        jax.jit(with_gradients(function, embedding, weight_name))(x_BLD, weight, *of_tokens)
        for function in (in_parts, of_whole_logits)
    )
    rtol = 1e-2 if name == "bfloat16" else 1e-5
    compare(got, want, rtol)
    # Without a gradient another function is run.
    compare(in_parts(embedding, weight_name, x_BLD, weight, *of_tokens), want[0], rtol)


def test_a_large_vocabulary_s_float16_gradients_do_not_vanish(key):
    """Of 250,000 words each has a probability of 4e-6, as a float16 a multiple of 6e-8."""
    half = Precision(compute="float16", logits="float16")
    rng = np.random.default_rng(0)
    x_BLD = rng.normal(size=(4, 6, D)).astype(np.float32) * 0.1
    of_tokens = rng.integers(0, 250_000, (4, 6)), np.ones((4, 6), np.float32)
    gradients = []
    for precision in (Precision(), half):
        config = dataclasses.replace(TIED, vocab_size=250_000, precision=precision)
        embedding = Embedding(config, key=key)
        name, weight = weight_of(embedding)
        x = x_BLD.astype(precision.compute_dtype)

        def loss(weight, embedding=embedding, name=name, x=x):
            changed = with_params(embedding, {name: weight})
            plain = LossConfig("mean", z_loss=0.0)
            return 2.0**15 * cross_entropy_of(changed, x, *of_tokens, plain).loss

        gradients.append(np.asarray(jax.jit(jax.grad(loss))(weight), np.float64))
    want, got = gradients
    error_V = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(error_V) < 1e-3


def test_no_whole_logits_are_there(key):
    """Neither forward nor backward."""
    embedding = Embedding(TIED, key=key)
    name, weight = weight_of(embedding)
    x_BLD, *of_tokens = inputs()
    jitted = jax.jit(with_gradients(in_parts, embedding, name))
    text = jitted.lower(x_BLD, weight, *of_tokens).as_text()
    assert f"tensor<{B * L // PARTS}x{V}x" in text
    assert all(f"tensor<{whole}x{V}x" not in text for whole in (B * L, f"{B}x{L}"))


DEFAULT = [("rows of the vocabulary", "tied"), ("model", "untied")]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        slow_unless((name, config) in DEFAULT, name, config)
        for name in MESHES
        for config in ("tied", "untied")
    ],
)
def test_on_every_mesh_and_the_weight_s_gradient_is_summed_once(name, config, key):
    """Not once a part, which a loop that the compiler splits by itself would do."""
    spec, embedding = MESHES[name], Embedding(CONFIGS[config], key=key)
    weight_name, weight = weight_of(embedding)
    x_BLD, *of_tokens = inputs()
    compute = with_gradients(in_parts, embedding, weight_name)
    want = jax.jit(with_gradients(of_whole_logits, embedding, weight_name))(
        x_BLD, weight, *of_tokens
    )
    mesh = spec.build()
    sharding = param_shardings(spec.rules, mesh, {weight_name: weight})[weight_name]
    rows = jax.sharding.NamedSharding(
        mesh, spec.rules.spec("B", (B,), mesh, table="activations")
    )
    with use_mesh(mesh, spec.rules):
        jitted = jax.jit(
            compute,
            in_shardings=(rows, sharding, rows, rows),
            out_shardings=(None, (rows, sharding)),
        )
        compiled = jitted.lower(x_BLD, weight, *of_tokens).compile()
        got = compiled(x_BLD, weight, *of_tokens)
    compare(got, want)
    if name == "model alone":
        return  # each device has all tokens
    executed = executed_collectives(compiled.as_text())
    # A device's own part of V, before it is summed; what is smaller is of a part's tokens.
    least = weight.nbytes // mesh.shape["model"] // mesh.shape["fsdp"]
    sums = {each: times for each, times in executed.items() if each.num_bytes >= least}
    assert {each.kind for each in sums} <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert set(sums.values()) == {1}


@pytest.mark.slow  # 15 s of compilation
def test_a_pipeline_s_stages_take_their_logits_in_parts():
    config = stacked(DENSE, 2)
    assert_equal(pipelined(config, MeshSpec(pipe=2, data=2, model=2)), unpipelined(config))


def test_buckets_take_logits_in_parts():
    """Inside of a `shard_map` over all axes."""
    config = dataclasses.replace(stacked(DENSE, 2), remat="minimal")
    spec, batch, params = MeshSpec(data=2, fsdp=4), make_batch(DENSE, 16), make_params(config)
    denominators = loss_denominators(config, batch, 1)

    def loss(function, params, **options):
        return function(
            config, LOSS, params, batch, denominators=denominators, key=None, **options
        )

    want = jax.jit(jax.grad(functools.partial(loss, batch_loss), has_aux=True))(params)
    mesh = spec.build()
    with use_mesh(mesh, spec.rules):
        placed = jax.device_put(params, param_shardings(spec.rules, mesh, params))
        bucketed = functools.partial(loss, fused_batch_loss, bucket_bytes=1 << 12)
        got = jax.jit(jax.grad(bucketed, has_aux=True))(placed)
    compare(tree.named_leaves(got[0]), tree.named_leaves(want[0]))
    compare(got[1], want[1])
