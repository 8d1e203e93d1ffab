# SPDX-License-Identifier: Apache-2.0
"""Today's decoder-only block against transformers with the same weights: each option.

Folders are written by `save_pretrained` from small random models, in float32 and eager mode.
Frequencies of rotary positions are compared with transformers' own functions.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx import tree
from switchx.interop.decoder_families import DECODERS, read_config
from switchx.interop.decoder_tensors import orders, read_params, tensor_names
from switchx.interop.huggingface_config import Fields
from switchx.interop.tensor_folder import WAY_OUT, TensorFolder, from_torch, to_torch
from switchx.models.params import forward
from tests.compare import assert_close_to_largest
from tests.interop.decoder_models import (
    BASE,
    CASES,
    SCALED,
    B,
    L,
    V,
    batch_of,
    of_release,
    theirs,
)

pytestmark = pytest.mark.hf


def ours(folder, **changes):
    """The model of a folder: configuration, parameters, the folder's tensors, names.

    Args:
        changes: to the family.
    """
    values = json.loads((folder / "config.json").read_text())
    kin = dataclasses.replace(DECODERS[values["model_type"]], **changes)
    tensors = TensorFolder(folder)
    config = read_config(kin, Fields(values, "config.json"))
    fields = Fields(values, "config.json")
    params, config = read_params(kin, fields, tensors, config, ((0, 1, 2), 0), None)
    return config, params, tensors, tensor_names(kin, config)


@pytest.fixture(scope="module")
def token_BL():
    return np.random.default_rng(0).integers(3, V, (B, L)).astype(np.int32)


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_tensors_are_theirs(case, tmp_path, token_BL):
    import torch

    model = theirs(case)
    model.save_pretrained(tmp_path)
    config, params, tensors, names = ours(tmp_path)
    tokens = torch.from_numpy(token_BL.astype(np.int64))
    # Of the mean of sines all weights have a gradient that is not small.
    logits = model(tokens).logits
    torch.mean(torch.sin(logits)).backward()

    def loss(params):
        logits_BLV, _ = forward(config, params, batch_of(token_BL), is_training=False)
        return jnp.mean(jnp.sin(logits_BLV)), logits_BLV

    (_, logits_BLV), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert_close_to_largest(logits_BLV, logits.detach().numpy(), 1e-5)
    # Experts are one tensor in memory and one each in files: the gradients go the same way.
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.zeros(()) if weight.grad is None else weight.grad)
    model.save_pretrained(tmp_path / "gradients")
    theirs_of = TensorFolder(tmp_path / "gradients")
    orders_of = orders(DECODERS[CASES[case][0]], config)

    def order_of(name):
        return orders_of.get(name.rpartition("/")[2])

    leaves = tree.named_leaves(gradient)
    if case == "granitemoe":
        theirs_of, weights = (
            tree.named_leaves(ours(folder, has_multipliers=False)[1])
            for folder in (tmp_path / "gradients", tmp_path)
        )
        # Our weights have its factors, and its one table is two of ours.
        table, logits = "embedding/embedding_VD", "embedding/w_logits_DV"
        weights[logits] = weights[table]
        for name, value in tree.named_leaves(params).items():
            leaves[name] *= np.linalg.norm(value) / np.linalg.norm(weights[name])
        leaves[table] += leaves.pop(logits).T
        for name, want in theirs_of.items():
            assert_close_to_largest({name: leaves.pop(name)}, {name: want}, 1e-4)
        assert not leaves
        return
    assert leaves.keys() == names.keys()
    for name, value in leaves.items():
        want = from_torch(name, config, map(theirs_of.read, names[name]))
        if name.endswith("router_bias_E"):
            continue  # it has no gradient
        order = order_of(name)
        want = want if order is None else want[..., order]
        assert_close_to_largest({name: value}, {name: want}, 1e-4)
    for name, value in tree.named_leaves(params).items():
        if order_of(name) is not None:
            value = np.asarray(value)[..., np.argsort(order_of(name))]
        for their, part in zip(names[name], to_torch(name, np.asarray(value)), strict=True):
            assert np.array_equal(part, tensors.read(their).reshape(part.shape)), their


@pytest.mark.parametrize("name", SCALED)
def test_frequencies_are_those_of_transformers(name):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = name.partition(" ")[0]
    rope = dict(rope_type=kind, rope_theta=1e4, **SCALED[name])
    config = LlamaConfig(**of_release(BASE | dict(head_dim=24, rope_parameters=rope)))
    want_K, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    rotary = read_config(DECODERS["llama"], Fields(config.to_dict(), "config.json")).rotary
    np.testing.assert_allclose(rotary.frequencies(24), want_K.numpy(), rtol=1e-6)
    assert rotary.magnitude == pytest.approx(factor, rel=1e-12)
    assert len(want_K) == 12


# What a wrong row of the table would be; some are no model of the tensors, all others lie.
MUTANTS = {
    "gate and up": ("olmoe", dict(matrices=("up_proj", "gate_proj", "down_proj"))),
    "w1 and w3": ("mixtral", dict(matrices=("w3", "w1", "w2"))),
    "fused ones": ("granitemoe", dict(fused=("output_linear.weight", "input_linear.weight"))),
    "pairs as halves": ("ernie4_5_moe", dict(has_pairs=False)),
    "halves as pairs": ("llama", dict(has_pairs=True)),
    "softmax of the chosen": ("olmoe", dict(normalizes=True)),
    "softmax of all": ("mixtral", dict(normalizes=False)),
    "no bias of choices": ("ernie4_5_moe", dict(router_bias="")),
    "scores of a softmax": ("glm4_moe", dict(has_sigmoid=False)),
    "whole heads": ("glm4_moe", dict(fraction=1.0)),
    "gates as they are": ("glm4_moe", dict(normalized=False)),
    "biases of all": ("glm4_moe", dict(flagged_bias="all")),
    "norm of no head": ("dots1", dict(qk_norm="none")),
    "dense blocks": ("dots1", dict(sparse="all")),
    "no multipliers": ("granitemoe", dict(has_multipliers=False)),
    "no norm of heads": ("qwen3", dict(qk_norm="none")),
    "norm of all heads": ("qwen3", dict(qk_norm="all")),
    "norm of each head": ("olmoe", dict(qk_norm="head")),
    "norms before": ("flex_olmo", dict(norm_place="before")),
    "norms after": ("olmoe", dict(norm_place="after")),
    "epsilon": ("olmo2", dict(epsilon=1e-2)),
    "theta": ("ernie4_5_moe", dict(theta=1e4)),
    "all blocks sparse": ("qwen2_moe", dict(sparse="all")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_table_are_caught(mutant, tmp_path, token_BL):
    import torch

    case, changes = MUTANTS[mutant]
    model = theirs(case)
    model.save_pretrained(tmp_path)
    fields = Fields(json.loads((tmp_path / "config.json").read_text()), "config.json")
    for name in ("rms_norm_eps", "rope_theta", "rope_parameters"):
        if mutant in ("epsilon", "theta"):
            fields.values.pop(name, None)
    if mutant == "whole heads":
        for values in (fields.values, fields.values.get("rope_parameters", {})):
            values.pop("partial_rotary_factor", None)
    if mutant == "gates as they are":
        del fields.values["norm_topk_prob"]
    with torch.no_grad():
        want_BLV = model(torch.from_numpy(token_BL.astype(np.int64))).logits.numpy()

    def error(kin) -> float:
        tensors = TensorFolder(tmp_path)
        config = read_config(kin, fields)
        params, config = read_params(kin, fields, tensors, config, ((0, 1, 2), 0), None)
        logits_BLV, _ = forward(config, params, batch_of(token_BL), is_training=False)
        return np.max(np.abs(np.asarray(logits_BLV) - want_BLV)) / np.max(np.abs(want_BLV))

    kin = DECODERS[CASES[case][0]]
    assert error(kin) <= 1e-5
    try:
        assert error(dataclasses.replace(kin, **changes)) > 1e-3
    except ValueError as refused:
        assert WAY_OUT in str(refused)
